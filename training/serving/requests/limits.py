"""What a request may cost: limits of bodies, and of what a model is asked for.

Everything from outside has a limit, and is measured before anything is built of it: a body before
it is parsed, the shapes of tensors before they are filled. `describe` lists all limits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from training.serving.requests.errors import UNAVAILABLE, RequestError

NESTING = 32
"""Lists and objects inside each other."""
EXAMPLE_BYTES = 32
"""Bytes of a serialized Example that count as one value. A list may hold one value a byte: lists
are counted beside (`count_lists` of `tensors`)."""
CATALOGUE_SCORES = 1 << 26
"""Scores of a call that ranks the whole catalogue, rows x items: 256 MB."""
JOINED_PAIRS = 4096
"""Pairs of rows and candidates of a call that several requests share; more gains nothing."""
CALL_ITEMS = 20_000
"""Items that a ranking model scores in one call where nothing retrieves them."""
SMALL_BYTES = 1 << 16
"""Bodies up to this length are read even where others fill the memory that bodies may take."""
FULL_BODIES = 32
"""Bodies of the greatest length that may be arriving at a time."""
PIPELINED = 16
"""Requests of a connection that wait for the answer before theirs; more are not parsed yet."""
WAITING_VALUES = 16
"""Requests of the most values whose inputs are held at a time."""
LENGTH, CANDIDATES = 1000, 5000
EXCLUDED, KEY_BYTES = 10_000, 1024
FILTERED_COLUMNS, FILTERED_VALUES = 32, 1000
"""Of a request for a list: items asked for, ranked and left out, bytes of a key, columns and values
of a filter."""
_OTHERS = bytes(set(range(256)) - set(b'[]{}",:'))


@dataclass(frozen=True)
class RequestLimits:
    """What one request may ask of a model.

    Attributes:
        rows: Rows.
        pairs: Pairs of a row and a candidate, and items of all lists that are asked for.
        values: Values of all inputs, after broadcasting: rows x candidates x length; in JSON also
            names, lists and objects.
        text_bytes: Longest text; serialized Examples are limited by the body alone.
    """

    rows: int = 1024
    pairs: int = 20_000
    values: int = 250_000
    text_bytes: int = 1 << 16


@dataclass(frozen=True)
class CallLimits:
    """What is called at a time, and what may wait for it.

    Attributes:
        threads: Calls at the same time.
        waiting: Requests that may wait.
    """

    threads: int = 2
    waiting: int = 1024


@dataclass(frozen=True)
class ConnectionLimits:
    """What connections may take.

    Attributes:
        count: Connections that are open at a time.
        head_bytes: Longest head of a request: its line and headers.
        head_seconds: Until a head has arrived, from the connection's start or the answer before.
        idle_seconds: Until a connection without a further request is closed.
        write_seconds: Until a client has read what is sent to it.
    """

    count: int = 512
    head_bytes: int = 1 << 14
    head_seconds: float = 10.0
    idle_seconds: float = 10.0
    write_seconds: float = 20.0


@dataclass(frozen=True)
class ServerLimits:
    """What the server may be asked for.

    Attributes:
        body_bytes: Longest body.
        seconds: Time until a body has arrived, and as much until it is answered.
        request: Of one request.
        calls: Of all of them together.
        connections: Of those that carry them.
    """

    body_bytes: int = 4 << 20
    seconds: float = 30.0
    request: RequestLimits = field(default_factory=RequestLimits)
    calls: CallLimits = field(default_factory=CallLimits)
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)

    def describe(self) -> dict[str, Any]:
        """Returns the limits by name, as `GET /v1/limits` shows them."""
        request, calls, connections = self.request, self.calls, self.connections
        return {
            "body_bytes": self.body_bytes,
            "body_seconds": self.seconds,
            "answer_seconds": self.seconds,
            "bodies_bytes": FULL_BODIES * self.body_bytes,
            "nesting": NESTING,
            "rows": request.rows,
            "candidates": request.pairs,
            "values": request.values,
            "text_bytes": request.text_bytes,
            "example_bytes_per_value": EXAMPLE_BYTES,
            "catalogue_scores": CATALOGUE_SCORES,
            "catalogue_items": min(CALL_ITEMS, request.pairs),
            "calls": calls.threads,
            "waiting_requests": calls.waiting,
            "waiting_values": WAITING_VALUES * request.values,
            "connections": connections.count,
            "head_bytes": connections.head_bytes,
            "head_seconds": connections.head_seconds,
            "idle_seconds": connections.idle_seconds,
            "write_seconds": connections.write_seconds,
            "pipelined_requests": PIPELINED,
        }


class Budget:
    """What all requests together hold of something.

    Args:
        most: How much of it may be held.
        what: Names it in the refusal.
    """

    def __init__(self, most: int, what: str) -> None:
        self._most, self._what, self.held = most, what, 0

    def take(self, count: int) -> None:
        """Takes some.

        Raises:
            RequestError: There is not as much left.
        """
        if self.held + count > self._most:
            raise RequestError(
                f"the server is full: requests hold {self._most} {self._what}; try again later",
                UNAVAILABLE,
            )
        self.held += count

    def give_back(self, count: int) -> None:
        """Gives some back."""
        self.held -= count


def check_json(body: bytes, values: int) -> None:
    """Refuses a body that is too much work to parse, without parsing it.

    Args:
        body: UTF-8.
        values: How many values, names, lists and objects it may hold.

    Raises:
        RequestError: It holds more, or nests them deeper than `NESTING`.
    """
    if len(body) <= values and body.count(b"[") + body.count(b"{") <= NESTING:
        return
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if body.count(b'"') > 2 * values:
        raise _refuse_values(values)
    outside = b"".join(body.translate(None, _OTHERS).split(b'"')[::2])
    if sum(map(outside.count, (b",", b":", b"[", b"{"))) > values:
        raise _refuse_values(values)
    marks = np.frombuffer(outside, np.uint8) | 0x20  # Brackets become braces.
    depth = np.cumsum((marks == ord("{")).astype(np.int8) - (marks == ord("}")), dtype=np.int32)
    if depth.max(initial=0) > NESTING:
        raise RequestError(f"lists and objects may be nested {NESTING} deep, not deeper")


def _refuse_values(values: int) -> RequestError:
    return RequestError(
        f"a request may hold {values} values, with names, lists and objects; ask for fewer rows"
    )


@dataclass(frozen=True)
class Cost:
    """What a call takes.

    Attributes:
        rows: Rows.
        pairs: Pairs of a row and a candidate; items of all lists that are asked for.
        width: Values of a row, of all inputs together.
    """

    rows: int
    pairs: int
    width: int

    @property
    def values(self) -> int:
        """Values of all rows."""
        return self.rows * self.width

    def join(self, other: Cost) -> Cost:
        """Returns what a call for the rows of both takes."""
        width = max(self.width, other.width)
        return Cost(self.rows + other.rows, self.pairs + other.pairs, width)


@dataclass(frozen=True)
class SignatureCost:
    """What makes calls of a signature expensive.

    Attributes:
        candidates: Inputs whose second axis is the candidates of a row.
        length: Input that says how long lists shall be; None: there is none.
        examples: Inputs of serialized Examples.
        catalogue: Items of the catalogue that each row is compared with; 0: it is not.
        repeated: Inputs of a row that the model repeats for each of its candidates, as a feature is
            made of them and of the candidate.
    """

    candidates: tuple[str, ...] = ()
    length: str | None = None
    examples: tuple[str, ...] = ()
    catalogue: int = 0
    repeated: tuple[str, ...] = ()

    @classmethod
    def read(cls, name: str, card: Mapping[str, Any]) -> SignatureCost:
        """Reads it from what `export.json` says of a signature."""
        about = card["signatures"].get(name, {})
        inputs, outputs = about.get("inputs", ()), about.get("outputs", ())
        is_retrieval = card["kind"] == "retrieval"
        lists = is_retrieval and any(output["name"] == "items" for output in outputs)
        extra = [item["name"] for item in inputs if "means" in item]
        paired = [item["name"] for item in inputs if item.get("per") == "candidate"]
        pairs = {item["feature"] for item in inputs if item["name"] in paired}
        rows = card.get("embeddings", {}).get("items", {}).get("rows", 0)
        return cls(
            candidates=tuple(paired if lists else [*paired, *extra]),
            length=extra[-1] if lists and extra else None,
            examples=tuple(item["name"] for item in inputs if "holds" in item),
            catalogue=int(rows) if lists else 0,
            repeated=tuple(
                item["name"]
                for item in inputs
                if item.get("per") == "row" and item["feature"] in pairs
            ),
        )

    def measure(self, inputs: Mapping[str, np.ndarray], limits: RequestLimits) -> Cost:
        """Returns what a call takes.

        Args:
            inputs: `[rows, …]`.
            limits: What it may take.

        Raises:
            RequestError: It would take more.
        """
        cost = self.measure_shapes({n: value.shape for n, value in inputs.items()}, limits)
        if self.length is not None and (asked := inputs[self.length]).size:
            check_count("items of lists", int(asked.max()) * cost.rows, limits.pairs)
        longest = 0
        for name, value in inputs.items():
            if value.dtype == object and value.size:
                found = max(map(len, value.ravel().tolist()))
                if name in self.examples:
                    longest = max(longest, found)
                else:
                    check_text(name, found, limits)
        if not longest:
            return cost
        width = check_example_bytes(cost.rows, longest, limits)
        return Cost(cost.rows, cost.pairs, max(cost.width, width))

    def measure_shapes(self, shapes: Mapping[str, Sequence[int]], limits: RequestLimits) -> Cost:
        """Returns what a call with inputs of given shapes takes; the lengths of texts are left out.

        Raises:
            RequestError: It would take more than the limits.
        """
        rows = max((shape[0] if shape else 1 for shape in shapes.values()), default=0)
        check_count("rows", rows, limits.rows)
        if self.catalogue:
            what = f"rows, as each is compared with {self.catalogue} items"
            check_count(what, rows, self._most_rows)
        pairs = max((prod(shapes[n][:2]) for n in self.candidates if n in shapes), default=0)
        check_count("candidates, of all rows", pairs, limits.pairs)
        each = max((shapes[n][1] for n in self.candidates if n in shapes), default=1)
        values = sum(
            prod(shape) * (each if name in self.repeated else 1) for name, shape in shapes.items()
        )
        check_count("values, rows x candidates x length of all inputs", values, limits.values)
        return Cost(rows, pairs, -(-values // rows) if rows else 0)

    def can_share(self, cost: Cost, limits: RequestLimits) -> bool:
        """Whether several requests may be one call that takes so much."""
        return (
            cost.rows <= min(limits.rows, self._most_rows)
            and cost.pairs <= min(JOINED_PAIRS, limits.pairs)
            and cost.values <= limits.values
        )

    @property
    def _most_rows(self) -> int:
        return max(1, CATALOGUE_SCORES // max(1, self.catalogue))


def check_count(what: str, count: int, most: int) -> None:
    """Refuses more of something than a request may have.

    Raises:
        RequestError: There is more.
    """
    if count > most:
        raise RequestError(f"a request may have {most} {what}; received {count}")


def check_text(name: str, size: int, limits: RequestLimits) -> None:
    """Refuses a text of an input that is too long.

    Raises:
        RequestError: It has more bytes than a text may have.
    """
    if size > limits.text_bytes:
        raise RequestError(
            f"input {name}: a text may have {limits.text_bytes} bytes; received {size}"
        )


def check_example_bytes(rows: int, longest: int, limits: RequestLimits) -> int:
    """Refuses serialized Examples that are too long together; returns the values that each counts.

    Args:
        rows: Examples.
        longest: Bytes of the longest one.
        limits: What they may take.

    Raises:
        RequestError: They take more.
    """
    width = -(-longest // EXAMPLE_BYTES)
    what = f"values (rows x bytes of the longest Example / {EXAMPLE_BYTES})"
    check_count(what, rows * width, limits.values)
    return width


def check_lists(rows: Iterable[Any], most: int) -> None:
    """Refuses lists of rows that are too long, before anything is built of them.

    Raises:
        RequestError: One is.
    """
    for values in rows:
        if isinstance(values, list):
            check_count("rows", len(values), most)


def describe_list_limits() -> dict[str, int]:
    """Returns the limits of a request for a list, by name."""
    return {
        "recommend_k": LENGTH,
        "recommend_candidates": CANDIDATES,
        "recommend_exclude": EXCLUDED,
        "recommend_key_bytes": KEY_BYTES,
        "recommend_filter_columns": FILTERED_COLUMNS,
        "recommend_filter_values": FILTERED_VALUES,
    }

"""What a request may cost, measured before anything is built of it; `describe` lists all limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any

import numpy as np

from training.serving.errors import RequestError

NESTING = 32  # Lists and objects inside each other.
EXAMPLE_BYTES = 32  # Bytes of a serialized Example that count as one value; lists count besides.
CATALOGUE_SCORES = 1 << 26  # Of a call that ranks the whole catalogue, rows x items: 256 MB.
JOINED_PAIRS = 4096  # Candidates of a call that several requests share; more gains nothing.
CALL_ITEMS = 20_000  # That a ranking model scores in one call where nothing retrieves them.
WAITING_VALUES = 16  # Requests of the most values whose inputs are held at a time.
LENGTH, CANDIDATES, EXCLUDED, KEY_CHARACTERS = 1000, 5000, 10_000, 1024
FILTERED_COLUMNS, FILTERED_VALUES = 32, 1000
"""Of `/v1/recommend`: items asked for, ranked and left out, of a key, and of a filter."""
_TEXT = bytes(set(range(256)) - set(b'[]{}",:'))


@dataclass(frozen=True)
class RequestLimits:
    """What one request may ask of a model."""

    rows: int = 1024
    pairs: int = 20_000  # Rows x candidates, and items of all lists that are asked for.
    values: int = 250_000  # Rows x candidates x length of all inputs; of JSON, names and lists too.
    text_bytes: int = 1 << 16


@dataclass(frozen=True)
class CallLimits:
    """How many calls run at a time, and how many requests may wait for one."""

    threads: int = 2
    waiting: int = 1024


@dataclass(frozen=True)
class ServerLimits:
    """What the server may be asked for."""

    body_bytes: int = 4 << 20
    seconds: float = 30.0  # Until a body has arrived, and as many until it is answered.
    request: RequestLimits = field(default_factory=RequestLimits)
    calls: CallLimits = field(default_factory=CallLimits)

    def describe(self) -> dict[str, float]:
        """Returns the limits by name, as `GET /v1/limits` shows them."""
        own = {"body_bytes": self.body_bytes, "seconds": self.seconds, "nesting": NESTING}
        return {**own, **asdict(self.request)}


def check_count(what: str, count: int, most: int) -> None:
    """Refuses more of something than a request may have."""
    if count > most:
        raise RequestError(f"a request may have {most} {what}; received {count}")


def check_json(body: bytes, values: int) -> None:
    """Refuses a body of too many values, names, lists and objects, without parsing it."""
    if len(body) <= values and body.count(b"[") + body.count(b"{") <= NESTING:
        return
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    check_count("quotes", body.count(b'"'), 2 * values)
    outside = b"".join(body.translate(None, _TEXT).split(b'"')[::2])
    found = sum(map(outside.count, (b",", b":", b"[", b"{")))
    check_count("values, with names, lists and objects", found, values)
    marks = np.frombuffer(outside, np.uint8) | 0x20  # Brackets become braces.
    depth = np.cumsum((marks == ord("{")).astype(np.int8) - (marks == ord("}")), dtype=np.int32)
    check_count("lists and objects inside each other", int(depth.max(initial=0)), NESTING)


@dataclass(frozen=True)
class Cost:
    """What a call takes: rows, pairs of a row and a candidate, values of a row of all inputs."""

    rows: int
    pairs: int
    width: int

    @property
    def values(self) -> int:
        return self.rows * self.width

    def join(self, other: Cost) -> Cost:
        """Returns what a call for the rows of both takes."""
        width = max(self.width, other.width)
        return Cost(self.rows + other.rows, self.pairs + other.pairs, width)


@dataclass(frozen=True)
class SignatureCost:
    """What makes calls of a signature expensive."""

    candidates: tuple[str, ...] = ()  # Inputs whose second axis is the candidates of a row.
    length: str | None = None  # Input that says how long lists shall be.
    examples: tuple[str, ...] = ()  # Inputs of serialized Examples.
    catalogue: int = 0  # Items of the catalogue that each row is compared with.
    repeated: tuple[str, ...] = ()  # Inputs of a row that the model repeats for each candidate.

    @classmethod
    def read(cls, name: str, card: Mapping[str, Any]) -> SignatureCost:
        """Reads it from what `export.json` says of a signature."""
        about = card["signatures"].get(name, {})
        inputs, outputs = about.get("inputs", ()), about.get("outputs", ())
        lists = card["kind"] == "retrieval" and any(one["name"] == "items" for one in outputs)
        extra = [item["name"] for item in inputs if "means" in item]
        paired = {
            item["name"]: item["feature"] for item in inputs if item.get("per") == "candidate"
        }
        of_rows = {item["name"]: item["feature"] for item in inputs if item.get("per") == "row"}
        rows = card.get("embeddings", {}).get("items", {}).get("rows", 0)
        return cls(
            candidates=tuple(paired if lists else [*paired, *extra]),
            length=extra[-1] if lists and extra else None,
            examples=tuple(item["name"] for item in inputs if "holds" in item),
            catalogue=int(rows) if lists else 0,
            repeated=tuple(key for key, made in of_rows.items() if made in paired.values()),
        )

    def measure(self, inputs: Mapping[str, np.ndarray], limits: RequestLimits) -> Cost:
        """Returns what a call with inputs `[rows, …]` takes; what takes more is refused."""
        rows = max((len(value) if value.ndim else 1 for value in inputs.values()), default=0)
        check_count("rows", rows, limits.rows)
        what = f"rows, as each is compared with {self.catalogue} items"
        check_count(what, rows, self._most_rows)
        if self.length is not None and (asked := inputs[self.length]).size:
            check_count("items of lists", int(asked.max()) * rows, limits.pairs)
        shapes = [inputs[name].shape for name in self.candidates if name in inputs]
        pairs = max((prod(shape[:2]) for shape in shapes), default=0)
        check_count("candidates, of all rows", pairs, limits.pairs)
        each = max((shape[1] for shape in shapes), default=1)
        sizes = [value.size * (each if n in self.repeated else 1) for n, value in inputs.items()]
        longest = self._check_texts(inputs, limits.text_bytes)
        width = max(-(-sum(sizes) // max(1, rows)), -(-longest // EXAMPLE_BYTES))
        what = "values, rows x candidates x length of all inputs"
        check_count(what, rows * width if longest else sum(sizes), limits.values)
        return Cost(rows, pairs, width)

    def _check_texts(self, inputs: Mapping[str, np.ndarray], most: int) -> int:
        """Refuses texts that are too long; returns the bytes of the longest Example."""
        texts = {n: value.ravel().tolist() for n, value in inputs.items() if value.dtype == object}
        lengths = {name: max(map(len, found), default=0) for name, found in texts.items()}
        for name in lengths.keys() - self.examples:
            check_count(f"bytes in a text, as of input {name}", lengths[name], most)
        return max((lengths.get(name, 0) for name in self.examples), default=0)

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

"""Requests that ask for far more than they say, and what `/healthz` takes meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from tests.bench.serve.load import Request, Served, ask

CONNECTIONS = 4
"""That attack at a time."""
HEALTH: Request = ("GET", "/healthz", None)


def build_attacks(row: Mapping[str, Any]) -> dict[str, Request]:
    """Builds requests, by what is wrong with them.

    Args:
        row: A row of `score_items`, with `items`.
    """

    def predict(body: Any) -> Request:
        return ("POST", "/v1/models/ranker:predict", body)

    def recommend(body: Any) -> Request:
        return ("POST", "/v1/recommend", body)

    def choose(count: int) -> Request:
        return recommend({"user": 1003, "filter": {"category": [str(n) for n in range(count)]}})

    def score(rows: int, items: int) -> Request:
        one = {**row, "items": [101] * items}
        return predict({"signature_name": "score_items", "instances": [one] * rows})

    texts = ["x" * 3_900_000, *["a"] * 200]
    return {
        "1.2 MB of wrong keys": recommend({"user": 1003, "exclude": [None] * 200_000}),
        "40,000 unknown keys": recommend({f"key{n}": 1 for n in range(40_000)}),
        "a filter of 100,000 values": choose(100_000),
        "a filter of 1,000 values": choose(1000),
        "400,000 candidates": score(1, 400_000),
        "100 rows of 1,000 candidates": score(100, 1000),
        "20,000 candidates, as many as allowed": score(1, 20_000),
        "4 MB of empty lists": predict('{"instances": [' + "[]," * 1_300_000 + "[]]}"),
        "240,000 empty lists": predict('{"instances": [' + "[]," * 120_000 + "[]]}"),
        "120,000 names": predict({"inputs": {f"n{n}": 1 for n in range(60_000)}}),
        "nested lists": predict('{"instances": ' + "[" * 1_000_000),
        "a text of 3 MB": recommend({"user": "x" * 3_000_000}),
        "a user id of 10 MB": recommend({"user": "x" * 10_000_000}),
        "text among numbers": predict({"inputs": {"user_id": texts}}),
        "a signature's name of 1.2 MB": predict({"signature_name": [None] * 200_000,
                                                 "instances": [row]}),
        "digits": predict('{"instances": [' + "9" * 1_000_000 + "]}"),
    }  # fmt: skip


def attack(
    served: Served, row: Mapping[str, Any], seconds: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Attacks a server in each way for a while.

    Yields:
        Name of the attack, the first one `nothing`, and what it did: percentiles of `/healthz` in
        milliseconds, what was answered to the attack, and the resident memory of the server before
        and after it.
    """
    works: dict[str, Callable[[], Any]] = {
        name: partial(_repeat, served, request, seconds)
        for name, request in build_attacks(row).items()
    }
    ask(served, [HEALTH], 1, seconds=2)
    yield "nothing", {**ask(served, [HEALTH], 1, seconds=seconds), "MiB": served.read_mib()}
    for name, work in works.items():
        before = served.read_mib()
        with ThreadPoolExecutor(1) as pool:
            attacked = pool.submit(work)
            health = ask(served, [HEALTH], 1, seconds=seconds)
            answers = attacked.result()
        yield name, {**health, "attack": answers, "MiB": before, "MiB after": served.read_mib()}


def _repeat(served: Served, request: Request, seconds: int) -> dict[str, int]:
    codes: dict[str, int] = ask(served, [request], CONNECTIONS, seconds=seconds)["codes"]
    return codes

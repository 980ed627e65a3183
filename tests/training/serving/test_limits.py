"""What a request may cost: measured before anything is built of it, and stated."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.machine import growth
from training.serving.requests.errors import MESSAGE_CHARACTERS, RequestError, hide_folders
from training.serving.requests.limits import (
    NESTING,
    Cost,
    RequestLimits,
    SignatureCost,
    check_json,
)

GUIDE = Path(__file__).parents[3] / "docs" / "guide" / "serving.md"
LIMITS = RequestLimits(rows=8, pairs=100, values=1000, text_bytes=20)
PAIRED = SignatureCost(candidates=("items",))
LISTS = SignatureCost(length="k", catalogue=1 << 24)
SERIALIZED = SignatureCost(examples=("examples",))


def of_shapes(shapes: dict[str, list[int]]) -> dict[str, np.ndarray]:
    """Inputs of one value each, whatever their shape."""
    return {name: np.broadcast_to(np.int8(1), shape) for name, shape in shapes.items()}


def nest(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


@pytest.mark.parametrize(
    "body",
    [
        nest(NESTING),
        json.dumps({"a": ["[" * 500, '"' * 40, "\\" * 41, '\\"[' * 40, ",:{" * 900]}).encode(),
        json.dumps([[1, [2]]] * 20).encode(),
        b"",
        b'"',
        b'"\\',
    ],
)
def test_texts_are_neither_nesting_nor_values(body) -> None:
    check_json(body, 100)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (nest(NESTING + 1), "inside each other; received 33"),
        (b'{"]]]]": ' * 33 + b"1" + b"}" * 33, "32 lists and objects inside"),
        (b'["\\\\", ' * 33 + b"]" * 33, "32 lists and objects inside"),
        (nest(NESTING) + b"," + nest(NESTING + 1), "32 lists and objects inside"),
        (b"[" + b"1," * 200 + b"1]", "may have (100 values|200 quotes)"),
        (b"[" + b"[]," * 90 + b"[]]", "may have (100 values|200 quotes)"),
        (b"{" + b'"a":1,' * 90 + b"}", "may have (100 values|200 quotes)"),
        (b"[" + b'""' * 300 + b"]", "may have (100 values|200 quotes)"),
    ],
)
def test_bodies_that_are_much_work_are_refused_before_they_are_parsed(body, said) -> None:
    with pytest.raises(RequestError, match=said):
        check_json(body, 100)


@pytest.mark.parametrize(
    ("cost", "shapes", "said"),
    [
        (PAIRED, {"user": [9], "items": [9, 1]}, "8 rows; received 9"),
        (PAIRED, {"user": [1], "items": [1, 101]}, "100 candidates, of all rows; received 101"),
        (PAIRED, {"user": [4], "items": [4, 26]}, "100 candidates, of all rows; received 104"),
        (PAIRED, {"history": [1, 10**12], "items": [1, 1]}, "received 1000000000001"),
        (SignatureCost(candidates=("genres",)), {"genres": [2, 50, 11]}, "received 1100"),
        (LISTS, {"user": [5], "k": [5]}, "4 rows, as each is compared with 16777216 items"),
    ],
)
def test_shapes_are_measured_before_tensors_are_filled(cost, shapes, said) -> None:
    with pytest.raises(RequestError, match=said):
        cost.measure(of_shapes(shapes), LIMITS)


def test_inputs_that_a_feature_joins_with_the_candidate_count_for_each() -> None:
    inputs = [
        {"name": "history", "feature": "cross", "per": "row"},
        {"name": "price", "feature": "cross", "per": "candidate"},
        {"name": "viewed", "feature": "viewed", "per": "row"},
    ]
    card = {"kind": "ranking", "signatures": {"candidates": {"inputs": inputs}}}
    cost = SignatureCost.read("candidates", card)
    shapes = {"history": [2, 9], "price": [2, 20], "viewed": [2, 40]}
    assert cost.measure(of_shapes(shapes), LIMITS).values == 2 * (9 * 20 + 20 + 40)
    with pytest.raises(RequestError, match="length of all inputs; received 1120"):
        cost.measure(of_shapes({**shapes, "history": [2, 25]}), LIMITS)


def test_lists_texts_and_examples_are_measured() -> None:
    def texts(*values: bytes) -> np.ndarray:
        return np.array(values, object)

    refused = [
        (LISTS, {"user": np.zeros(3), "k": np.array([5, 40, 1])}, "items of lists; received 120"),
        (PAIRED, {"user": texts(b"x" * 21)}, "20 bytes in a text, as of input user; received 21"),
        (SERIALIZED, {"examples": texts(*[b""] * 7, b"x" * 6400)}, "received 1600"),
    ]  # fmt: skip
    for cost, inputs, said in refused:
        with pytest.raises(RequestError, match=said):
            cost.measure(inputs, LIMITS)
    assert LISTS.measure({"k": np.array([50, 2])}, LIMITS) == Cost(2, 0, 1)
    long = SERIALIZED.measure({"examples": texts(b"", b"x" * 6400)}, LIMITS)
    assert (long.rows, long.values) == (2, 400)  # All rows are padded to the longest.


def test_requests_share_a_call_only_within_the_limits_of_one() -> None:
    one = Cost(rows=1, pairs=60, width=70)
    assert PAIRED.can_share(one, LIMITS)
    assert not PAIRED.can_share(one.join(one), LIMITS)
    wide, narrow = Cost(1, 0, 400), Cost(2, 0, 1)
    assert wide.join(narrow) == Cost(3, 0, 400)
    assert not SERIALIZED.can_share(wide.join(narrow), LIMITS)
    assert not LISTS.can_share(Cost(5, 0, 1), LIMITS)


def test_errors_are_short_and_name_no_folders() -> None:
    assert len(RequestError("x" * 10**6).message) == MESSAGE_CHARACTERS
    for text, shown in (
        ("cannot open /srv/models/demo/1/saved_model.pb: gone",
         "cannot open saved_model.pb: gone"),
        ("s3://bucket/models/demo/1/variables failed", "variables failed"),
        ("'/a/b c/d.txt' and (/x/y/z)", "'b c/d.txt' and (z)"),
        ("1/2 of and/or", "1/2 of and/or"),
    ):  # fmt: skip
        assert hide_folders(text) == shown


@pytest.mark.parametrize("part", ["a.", "/a ", "file:/"])
def test_no_text_takes_long_to_be_searched_for_folders(part) -> None:
    def prepare(count: int):
        return lambda: hide_folders(part * count)

    assert growth(prepare, 1 << 12, 1 << 16) < 40


def test_every_limit_is_shown_and_documented(client) -> None:
    shown = client.get("/v1/limits").json()
    assert (shown["rows"], shown["pairs"], shown["body_bytes"]) == (64, 20_000, 200_000)
    guide = GUIDE.read_text(encoding="utf-8")
    assert [name for name in shown if f"`{name}`" not in guide] == []

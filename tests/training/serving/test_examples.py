"""`tf.Example`s of requests: a context is read once; lists are counted before they are padded."""

from __future__ import annotations

import asyncio
import base64
import tracemalloc
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import tensorflow as tf

from training.raw_inputs import json_values
from training.raw_inputs.input_columns import InputColumn
from training.raw_inputs.written_values import WrittenForm
from training.serving.models.batching import Batcher, Builder
from training.serving.requests.errors import RequestError
from training.serving.requests.examples import count_lists, parse_examples, serialize_examples
from training.serving.requests.limits import CallLimits, Cost, RequestLimits, SignatureCost

SPACED = WrittenForm("history", separator=" ")
HISTORY = InputColumn("history", "history", "history", "int64", True, None, 15, 0, written=SPACED)
GENDER = InputColumn("gender", "gender", "gender", "string", False, None, None, None, "<null>")
HOLDS = [HISTORY.to_json(), GENDER.to_json()]
LIMITS = RequestLimits()


def parse(context: dict, *examples: dict) -> list[dict[str, list]]:
    found = parse_examples({"context": context, "examples": list(examples)}, HOLDS, LIMITS)
    return [read(one) for one in found]


def read(serialized: bytes) -> dict[str, list]:
    features = tf.train.Example.FromString(serialized).features.feature
    return {n: list(getattr(f, f.WhichOneof("kind")).value) for n, f in features.items()}


def write(**lists: list[int]) -> bytes:
    features = {
        name: tf.train.Feature(int64_list=tf.train.Int64List(value=values))
        for name, values in lists.items()
    }
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


@pytest.fixture
def texts_read(monkeypatch) -> list[str]:
    """Texts of lists that were taken apart."""
    found: list[str] = []
    read_entries = json_values.parse_entries

    def note(text: str, *rest: Any) -> list:
        found.append(text)
        return read_entries(text, *rest)

    monkeypatch.setattr(json_values, "parse_entries", note)
    return found


def test_an_example_says_more_than_the_context_and_something_else(texts_read) -> None:
    context = {"history": "1 2 3", "gender": "F"}
    found = parse(context, {}, {"gender": "M"}, {"history": [7]}, {"gender": None})
    own = {"history": [1, 2, 3], "gender": [b"F"]}
    assert found == [
        own, {**own, "gender": [b"M"]}, {**own, "history": [7]}, {"history": [1, 2, 3]},
    ]  # fmt: skip
    assert texts_read == ["1 2 3"]


@pytest.mark.parametrize(
    ("context", "said"),
    [
        ({"gender": "x" * 60_000}, "rows x bytes of the longest Example"),
        ({"gender": "x" * 70_000}, "input gender: a text may have 65536 bytes; received 70000"),
        ({"history": " ".join("1" * 20_000)}, "times examples; received 2000000"),
        ({"history": [1] * 20_000}, "times examples; received 2000000"),
    ],
)
def test_a_context_is_no_way_to_ask_for_more(texts_read, context, said) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match=said):
            parse(context, *[{}] * 1000 if "gender" in context else [{}] * 100)
        assert tracemalloc.get_traced_memory()[1] < 5 << 20
    finally:
        tracemalloc.stop()
    assert len(texts_read) <= 1


def test_texts_of_examples_hold_no_more_values_than_a_request(texts_read) -> None:
    rows = [{"history": "1"}, *[{"history": " ".join("1" * 5000)}] * 99]
    with pytest.raises(RequestError, match="times examples; received 500000"):
        parse({}, *rows)
    assert len(texts_read) == 2


def test_lists_of_examples_count_as_they_are_padded() -> None:
    rows = [write(history=[1] * 7, seen=[1]), write(history=[1], seen=[1] * 5), write()]
    holds = [HISTORY.to_json(), replace(HISTORY, name="seen").to_json()]
    assert count_lists(np.array(rows, object), holds) == 12
    fixed = [replace(HISTORY, length=4).to_json(), GENDER.to_json()]
    assert count_lists(np.array(rows, object), fixed) == 0
    texts = [replace(HISTORY, dtype="string").to_json()]
    for broken in (rows, [b"\xff"]):
        with pytest.raises(RequestError):
            count_lists(np.array(broken, object), texts)


class Serialized:
    """Stands for a version that takes Examples."""

    def find_specs(self, signature: str) -> dict:
        return {}

    def find_cost(self, signature: str) -> SignatureCost:
        return SignatureCost(examples=("inputs",))

    def find_inputs(self, signature: str) -> dict:
        return {"inputs": {"holds": HOLDS}}


@pytest.mark.parametrize(
    ("lengths", "width"),
    [([20], 38), ([100] * 200, 100), ([60_000, 1], 60_000), ([125_001, 1], None)],
)
def test_a_byte_of_an_example_may_be_a_value(lengths, width) -> None:
    """Few bytes are counted as if each were one; of many the lists are looked at."""
    inputs = {"inputs": np.array([write(history=[1] * one) for one in lengths], object)}
    builder = Builder()
    batcher = Batcher(CallLimits(), LIMITS, lambda rows: None, builder)

    async def measure() -> Cost:
        return await batcher._measure(cast("Any", Serialized()), "examples", inputs)

    try:
        if width is None:
            with pytest.raises(RequestError, match=r"padded to the longest; received 250002"):
                asyncio.run(measure())
        else:
            assert asyncio.run(measure()).width >= width
            assert asyncio.run(measure()).width <= 2 * width
    finally:
        batcher.close()
        builder.close()


def test_a_long_list_in_few_bytes_is_refused_before_a_call(client) -> None:
    rows = [write(history=[1] * 130_000), write(history=[1])]
    texts = [{"b64": base64.b64encode(one).decode()} for one in rows]
    asked = {"signature_name": "examples", "instances": texts}
    answer = client.post("/v1/models/scores:predict", json=asked)
    assert answer.status_code == 400
    assert "values of lists in Examples, padded to the longest" in answer.json()["error"]


HELD = [
    {"name": name, "feature": name, "column": column, "dtype": "int64", "is_list": False,
     "length": None, "max_len": None, "pad_token": None, "null_token": -1, "per": "row"}
    for name, column in (("uid", "Wer"), ("sorte", "kind"), ("cross_kind", "kind"))
]  # fmt: skip


def build_message(context: dict[str, int] | None = None, **values: int) -> Any:
    def build(features: dict[str, int]) -> tf.train.Example:
        lists = {n: tf.train.Int64List(value=[v]) for n, v in features.items()}
        named = {n: tf.train.Feature(int64_list=found) for n, found in lists.items()}
        return tf.train.Example(features=tf.train.Features(feature=named))

    found = {"examples": [build(values)]}
    return SimpleNamespace(**found, **({} if context is None else {"context": build(context)}))


@pytest.mark.parametrize(
    ("context", "values"),
    [
        (None, {"uid": 7, "sorte": 3, "cross_kind": 3}),
        (None, {"Wer": 7, "kind": 3}),
        (None, {"uid": 7, "cross_kind": 3}),  # Parts of a cross hold the values of its column.
        ({"Wer": 7}, {"kind": 3}),
        ({"Wer": 8}, {"Wer": 7, "sorte": 3}),
    ],
)
def test_examples_may_have_the_names_of_the_source(context, values) -> None:
    [serialized] = serialize_examples(build_message(context, **values), HELD)
    features = tf.train.Example.FromString(serialized).features.feature
    found = {name: list(feature.int64_list.value) for name, feature in features.items()}
    assert found == {"uid": [7], "sorte": [3], "cross_kind": [3]}


def test_a_feature_that_no_input_has_is_refused() -> None:
    with pytest.raises(RequestError, match="unknown feature typo; allowed: uid, sorte"):
        serialize_examples(build_message(typo=7, kind=3), HELD)

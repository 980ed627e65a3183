"""`tf.Example`s of requests: lists are counted before they are padded."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import tensorflow as tf

from training.raw_inputs.inputs import InputColumn, WrittenForm
from training.serving.models.batching import Batcher, Builder
from training.serving.requests.errors import RequestError
from training.serving.requests.limits import CallLimits, Cost, RequestLimits, SignatureCost
from training.serving.requests.tensors import count_lists

SPACED = WrittenForm("history", separator=" ")
HISTORY = InputColumn("history", "history", "history", "int64", True, None, 15, 0, written=SPACED)
GENDER = InputColumn("gender", "gender", "gender", "string", False, None, None, None, "<null>")
HOLDS = [HISTORY.to_json(), GENDER.to_json()]
LIMITS = RequestLimits()


def write(**lists: list[int]) -> bytes:
    features = {
        name: tf.train.Feature(int64_list=tf.train.Int64List(value=values))
        for name, values in lists.items()
    }
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


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

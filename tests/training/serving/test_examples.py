"""`tf.Example`s of requests: lists are counted before they are padded."""

from __future__ import annotations

import base64
from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf

from training.raw_inputs.inputs import InputColumn
from training.raw_inputs.requests import RawValueError
from training.serving.requests.errors import RequestError
from training.serving.requests.limits import RequestLimits, SignatureCost
from training.serving.requests.tensors import Signature, check_examples, measure_inputs

HISTORY = InputColumn("history", "history", "history", "int64", True, None, 15, 0)
GENDER = InputColumn("gender", "gender", "gender", "string", False, None, None, None, "<null>")


def write(**lists: list[int]) -> bytes:
    features = {
        name: tf.train.Feature(int64_list=tf.train.Int64List(value=values))
        for name, values in lists.items()
    }
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def test_lists_of_examples_count_as_they_are_padded() -> None:
    rows = [write(history=[1] * 7, seen=[1]), write(history=[1], seen=[1] * 5), write()]
    holds = [HISTORY.to_json(), replace(HISTORY, name="seen").to_json()]
    assert check_examples(np.array(rows, object), holds) == 12
    fixed = [replace(HISTORY, length=4).to_json(), GENDER.to_json()]
    assert check_examples(np.array(rows, object), fixed) == 0
    texts = [replace(HISTORY, dtype="string").to_json()]
    for broken in (rows, [b"\xff"]):
        with pytest.raises((RequestError, RawValueError)):
            check_examples(np.array(broken, object), texts)


@pytest.mark.parametrize(
    ("lengths", "width"), [([20], 20), ([100] * 200, 100), ([60_000, 1], 60_000)]
)
def test_lists_and_bytes_of_examples_are_measured(lengths, width) -> None:
    inputs = {"inputs": np.array([write(history=[1] * one) for one in lengths], object)}
    about = {"inputs": {"holds": [HISTORY.to_json(), GENDER.to_json()]}}
    taken = Signature({}, about, SignatureCost(examples=("inputs",)))
    found = measure_inputs(inputs, taken, RequestLimits())
    assert (found.rows, found.width) == (len(lengths), width)


def test_a_long_list_in_few_bytes_is_refused_before_a_call(client) -> None:
    rows = [write(history=[1] * 130_000), write(history=[1])]
    texts = [{"b64": base64.b64encode(one).decode()} for one in rows]
    asked = {"signature_name": "examples", "instances": texts}
    answer = client.post("/v1/models/scores:predict", json=asked)
    assert answer.status_code == 400
    assert "values of lists in Examples, padded to the longest" in answer.json()["error"]

"""What is asked of a server holds the bytes that the model is to read."""

from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import requests
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from training.apply.endpoint import Endpoint, post_json
from training.serving.tensors import parse_predict

TASKS = [{"name": "click", "kind": "binary"}]
SPECS = {"vector": tf.TensorSpec([None], tf.string), "names": tf.TensorSpec([None, 2], tf.string)}


@given(st.lists(st.tuples(st.binary(max_size=8), st.binary(max_size=3), st.text()), min_size=1))
def test_bytes_arrive_as_they_are(rows):
    vectors, names = (np.empty(shape, object) for shape in ((len(rows),), (len(rows), 2)))
    for row, (vector, name, text) in enumerate(rows):
        vectors[row] = vector
        names[row] = [name, text.encode("utf-8", "replace")]
    received: list[dict[str, np.ndarray]] = []

    def post(url: str, body: dict[str, Any]) -> tuple[int, Any]:
        parsed, _ = parse_predict(json.loads(json.dumps(body)), SPECS)
        received.append(parsed)
        return 200, {"outputs": [0.0] * len(parsed["vector"])}

    Endpoint("http://host/v1/models/m", (), post, rows=3).call(
        "serving_default", {"vector": vectors, "names": names}
    )
    for name, sent in (("vector", vectors), ("names", names)):
        assert np.concatenate([part[name] for part in received]).tolist() == sent.tolist()


def test_a_token_goes_with_each_request(monkeypatch):
    seen = []

    def post(url: str, data: str, headers: dict[str, str], timeout: int) -> Any:
        seen.append(headers.get("Authorization"))
        return SimpleNamespace(status_code=200, json=lambda: {"outputs": [0.5]})

    monkeypatch.setattr(requests, "post", post)
    for token in (None, "t" * 16):
        endpoint = Endpoint("http://host/v1/models/m", TASKS, partial(post_json, token=token))
        answer = endpoint.call("serving_default", {"a": np.zeros(1)})
        assert answer["click"].tolist() == [0.5]
    assert seen == [None, "Bearer " + "t" * 16]

"""What is asked of a server holds the bytes that the model is to read."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from training.apply.endpoint import Endpoint
from training.serving.tensors import parse_predict

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

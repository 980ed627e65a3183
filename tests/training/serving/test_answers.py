"""JSON of answers: short floats that somebody else reads back to the bit."""

from __future__ import annotations

import json

import numpy as np
import pytest

from training.serving.requests.tensors import encode_json, format_predict


def draw_floats() -> np.ndarray:
    """Every exponent, both signs, bounds and zeros."""
    bits = np.random.default_rng(1).integers(0, 2**32, 20_000, dtype=np.uint32)
    drawn = bits.view(np.float32)
    bounds = np.array([0.0, -0.0, 0.1, 1.0, 1e-45, np.finfo(np.float32).max], np.float32)
    return np.concatenate([bounds, drawn[np.isfinite(drawn)]])


def test_floats_are_read_back_to_the_bit() -> None:
    drawn = draw_floats()
    text = encode_json(format_predict({"scores": drawn[None]}, is_row=True))
    [found] = json.loads(text)["predictions"]
    np.testing.assert_array_equal(np.float32(found).view(np.int32), drawn.view(np.int32))


def test_floats_are_as_short_as_they_can_be() -> None:
    body = format_predict({"scores": np.array([0.1, 1 / 3, 1.0], np.float32)}, is_row=False)
    assert encode_json(body) == b'{"outputs":[0.1,0.33333334,1.0]}'


@pytest.mark.parametrize("is_row", [True, False])
def test_outputs_of_all_types_and_shapes(is_row) -> None:
    outputs = {
        "score": np.array([0.5, 2.0], np.float32),
        "pairs": np.arange(12, dtype=np.int64).reshape(3, 2, 2).transpose(1, 0, 2),
        "none": np.zeros((2, 0), np.float32),
        "known": np.array([True, False]),
        "item": np.array(["Müller".encode(), b"\xff"], object),
        "raw_bytes": np.array([[b"a"], [b"b"]], object),
    }
    found = json.loads(encode_json(format_predict(outputs, is_row=is_row)))
    expected = {name: value.tolist() for name, value in outputs.items()}
    expected["item"] = ["Müller", {"b64": "/w=="}]
    expected["raw_bytes"] = [[{"b64": "YQ=="}], [{"b64": "Yg=="}]]
    if is_row:
        rows = [{name: value[n] for name, value in expected.items()} for n in range(2)]
        assert found == {"predictions": rows}
    else:
        assert found == {"outputs": expected}

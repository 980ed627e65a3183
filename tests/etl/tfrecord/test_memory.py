from __future__ import annotations

import numpy as np
import pytest

from etl.tfrecord import memory
from etl.tfrecord.memory import allocate


def test_memory_is_aligned():
    arrays = allocate({"a": ((3, 5), np.dtype(np.float32)), "b": ((7,), np.dtype(np.int64))})
    for array in arrays.values():
        array[:] = 1
        assert array.ctypes.data % 64 == 0
    assert (arrays["a"].shape, arrays["b"].dtype) == ((3, 5), np.int64)
    arrays["a"][:] = 2
    assert arrays["b"].tolist() == [1] * 7


def test_memory_is_used_again_only_when_every_view_has_gone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "_FREE", [])  # else what other tests gave back may come first
    shapes = {"a": ((40_000_000,), np.dtype(np.uint8))}
    array = allocate(shapes)["a"]
    place = array.ctypes.data
    view = array[5:].view(np.uint8)[3:]
    del array
    other = allocate(shapes)["a"]
    assert abs(other.ctypes.data - place) >= 40_000_000
    view[:] = 1
    del view
    again = allocate(shapes)["a"]
    assert again.ctypes.data == place

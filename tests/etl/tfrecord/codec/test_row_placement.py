from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etl.tfrecord.codec import decode, kernels
from etl.tfrecord.codec.decode import RowWriter
from etl.tfrecord.codec.kernels import allocate
from etl.tfrecord.types.parts import join_steps, list_lengths


def test_memory_is_used_again_only_when_every_view_has_gone(monkeypatch: pytest.MonkeyPatch):
    # Else what other tests gave back may come first.
    monkeypatch.setattr(kernels, "_FREE", [])
    shapes = {"a": ((40_000_000,), np.dtype(np.uint8))}
    array = allocate(shapes)["a"]
    assert array.ctypes.data % 64 == 0
    place = array.ctypes.data
    view = array[5:].view(np.uint8)[3:]
    del array
    other = allocate(shapes)["a"]
    assert abs(other.ctypes.data - place) >= 40_000_000
    view[:] = 1
    del view
    again = allocate(shapes)["a"]
    assert again.ctypes.data == place


TYPES = {"int64": pa.int64(), "float32": pa.float32()}


@given(
    kind=st.sampled_from(sorted(TYPES)),
    lists=st.lists(st.lists(st.integers(-(2**20), 2**20), max_size=70), min_size=1, max_size=30),
    length=st.integers(0, 66),
    offset=st.integers(0, 3),
    seed=st.integers(0, 9),
)
def test_lists_are_cut_padded_and_placed(kind, lists, length, offset, seed):
    column = pa.array([[1]] * offset + lists, pa.list_(TYPES[kind])).slice(offset)
    places = np.random.default_rng(seed).permutation(len(lists) + 2)[: len(lists)]
    places[0] = -1 if seed % 2 else places[0]
    out = np.full((len(lists) + 2, length), 5, kind)
    expected = out.copy()
    for place, values in zip(places, lists, strict=True):
        if place >= 0:
            expected[place] = (values + [7] * length)[:length]
    RowWriter([out], [7]).write([column], places)
    np.testing.assert_array_equal(out, expected)


@given(
    kind=st.sampled_from(sorted(TYPES)),
    sizes=st.lists(st.integers(0, 140), min_size=1, max_size=40),
    length=st.integers(24, 130),
    shift=st.integers(0, 15),
)
def test_arrays_beyond_the_cache_hold_the_same(kind, sizes, length, shift):
    flat = np.arange(sum(sizes)).astype(kind)
    column = pa.ListArray.from_arrays(np.cumsum([0, *sizes]).astype(np.int32), pa.array(flat))
    places = np.random.default_rng(shift).permutation(len(sizes))
    near, far = (
        np.zeros(shift + len(sizes) * length, kind)[shift:].reshape(-1, length) for _ in range(2)
    )
    RowWriter([near], [-1]).write([column], places)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "_FAR_BYTES", 0)
        RowWriter([far], [-1]).write([column], places)
    np.testing.assert_array_equal(far, near)


@given(
    values=st.lists(st.integers(-(2**62), 2**62), min_size=1, max_size=40),
    seed=st.integers(0, 99),
)
def test_scalars_of_both_widths_are_placed(values, seed):
    places = np.random.default_rng(seed).permutation(len(values))
    whole, halves = np.zeros(len(values), np.int64), np.zeros(len(values), np.float32)
    columns = [pa.array(values), pa.array(np.asarray(values, np.float32))]
    RowWriter([whole, halves], [0, 0]).write(columns, places)
    np.testing.assert_array_equal(whole[places], values)
    np.testing.assert_array_equal(halves[places], np.asarray(values, np.float32))


def test_what_does_not_fit_is_refused():
    writer = RowWriter([np.zeros(3, np.int64)], [0])
    with pytest.raises(IndexError, match="place 3"):
        writer.write([pa.array([1])], np.array([3]))
    with pytest.raises(TypeError, match="float"):
        writer.write([pa.array([1.0], pa.float32())], np.array([0]))
    with pytest.raises(TypeError, match="int32"):
        RowWriter([np.zeros(3, np.int32)], [0])
    with pytest.raises(TypeError, match="3 and 4"):
        RowWriter([np.zeros(3, np.int64), np.zeros(4, np.int64)], [0, 0])


def test_lengths_and_joined_steps():
    lists = pa.array([[1, 2], None, [], [3]])
    assert list_lengths(lists).tolist() == [2, 0, 0, 1]
    assert list_lengths(lists.slice(1, 2)).tolist() == [0, 0]
    steps = pa.array([[[1], [2, 3]], [], None, [[], [4]]])
    assert join_steps(steps).to_pylist() == [[1, 2, 3], [], [], [4]]
    assert join_steps(steps.slice(2)).to_pylist() == [[], [4]]

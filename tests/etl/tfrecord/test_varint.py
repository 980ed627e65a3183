"""Varints against protobuf's own encoder."""

import numpy as np
import pytest
from google.protobuf.internal.encoder import _VarintBytes
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from etl.tfrecord import varint


@njit
def write(address: int, value: np.uint64) -> int:
    return varint.store_varint(address, value)


@njit
def write_exact(address: int, value: int) -> int:
    return varint.store_exact_varint(address, value)


@njit
def read(address: int, end: int) -> tuple:
    return varint.read_varint(address, end)


@given(st.integers(0, 2**64 - 1) | st.integers(0, 63).map(lambda bits: 1 << bits))
@settings(max_examples=300, deadline=None)
def test_store_and_read_match_protobuf(value: int) -> None:
    expected = _VarintBytes(value)
    out = np.zeros(24, np.uint8)
    base = out.ctypes.data
    assert write(base, np.uint64(value)) - base == len(expected)
    assert out[: len(expected)].tobytes() == expected
    found, stop = read(base, base + len(expected))
    assert int(found) == value
    assert stop - base == len(expected)


@pytest.mark.parametrize("value", [0, 127, 128, 2**31 - 1, 2**62])
def test_exact_store_touches_nothing_past_it(value: int) -> None:
    expected = _VarintBytes(value)
    out = np.full(24, 0xEE, np.uint8)
    write_exact(out.ctypes.data, value)
    assert out.tobytes() == expected + b"\xee" * (24 - len(expected))


@pytest.mark.parametrize("data", [b"", b"\x80", b"\xff" * 9, b"\xff" * 11, b"\x80" * 20])
def test_cut_or_overlong_varints_are_refused(data: bytes) -> None:
    buffer = np.frombuffer(data + b"\x01", np.uint8)
    base = buffer.ctypes.data
    _, stop = read(base, base + len(data))
    assert stop == varint.FAILED

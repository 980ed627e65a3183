from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.encoders.hashing import hash_bytes, mix64

MASK = 2**64 - 1


def mix64_reference(key: int) -> int:
    key ^= key >> 33
    key = key * 0xFF51AFD7ED558CCD & MASK
    key ^= key >> 33
    key = key * 0xC4CEB9FE1A85EC53 & MASK
    return key ^ key >> 33


def hash_of(data: bytes) -> int:
    buffer = np.frombuffer(data + b"\0", np.uint8)
    return int(hash_bytes(buffer.ctypes.data, len(data)))


@settings(deadline=None)
@given(st.integers(0, MASK))
def test_mix64_is_murmur3s_finalizer(key):
    assert int(mix64(np.uint64(key))) == mix64_reference(key)


@settings(deadline=None)
@given(st.binary(max_size=40), st.data())
def test_each_byte_and_the_length_count(data, draw):
    assert hash_of(data) != hash_of(data + b"\0")
    if data:
        position = draw.draw(st.integers(0, len(data) - 1))
        other = bytearray(data)
        other[position] ^= draw.draw(st.integers(1, 255))
        assert hash_of(data) != hash_of(bytes(other))


def test_nothing_beyond_the_end_counts():
    for length in range(40):
        data = np.arange(64, dtype=np.uint8)
        before = int(hash_bytes(data.ctypes.data, length))
        data[length:] = 255
        assert int(hash_bytes(data.ctypes.data, length)) == before


def test_merged_sketches_rely_on_these_values():
    """Pinned: statistics of shards written by different versions are merged."""
    assert [hash_of(data) for data in (b"", b"abc", b"four", b"0123456789abcdef!")] == PINNED


PINNED = [0x0, 0x21BC67BB17B53436, 0xAF796F42CB18C6, 0x7BD90F20387660ED]

"""Hash functions of the lookup tables and of the distinct-count sketches.

Sketches of different shards, hosts and versions are merged: what these functions return must never
change. They are not the hash of any feature.
"""

from __future__ import annotations

import numpy as np

from etl.tfrecord.kernels import inlined, load_u8, load_u32, load_u64

_WEYL = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, odd
_MIX_1 = np.uint64(0xFF51AFD7ED558CCD)
_MIX_2 = np.uint64(0xC4CEB9FE1A85EC53)
_HALF_WORD = np.uint64(32)
_SHIFT = np.uint64(33)


@inlined
def mix64(key: np.uint64) -> np.uint64:
    """Spreads each bit of a key over all 64 bits, one to one (MurmurHash3's `fmix64`)."""
    mixed = (key ^ (key >> _SHIFT)) * _MIX_1
    mixed = (mixed ^ (mixed >> _SHIFT)) * _MIX_2
    return mixed ^ (mixed >> _SHIFT)


@inlined
def hash_bytes(address: int, length: int) -> np.uint64:
    """Hashes `length` bytes at `address` word by word; reads nothing outside of them."""
    state = np.uint64(length) * _WEYL
    i = 0
    while i + 8 <= length:
        state = (state ^ load_u64(address + i)) * _WEYL
        state ^= state >> _HALF_WORD
        i += 8
    rest = length - i
    tail = np.uint64(0)
    if rest >= 4:  # two words that may overlap
        tail = np.uint64(load_u32(address + i)) | (
            np.uint64(load_u32(address + length - 4)) << _HALF_WORD
        )
    elif rest > 0:  # first, middle and last byte: all of 1 to 3
        tail = (
            np.uint64(load_u8(address + i))
            | (np.uint64(load_u8(address + i + (rest >> 1))) << np.uint64(8))
            | (np.uint64(load_u8(address + length - 1)) << np.uint64(16))
        )
    return mix64(state ^ tail)

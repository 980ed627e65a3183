"""FarmHash Fingerprint64, the hash of `tf.strings.to_hash_bucket_fast`, for Arrow columns.

Source: google/farmhash, `farmhashna::Hash64`, which `Fingerprint64` is defined to be for ever.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import numpy as np
import pyarrow as pa

from etl.encoders.buffers import BYTES_TYPES, bytes_cells, has_value, int64_cells, load_span
from etl.encoders.casting import cast_values
from etl.tfrecord.kernels import (
    inlined,
    kernel,
    load_i64,
    load_u8,
    load_u32,
    load_u64,
    outlined,
    store_u8,
)

_K0 = np.uint64(0xC3A5C85C97CB3127)
_K1 = np.uint64(0xB492B66FBE98F273)
_K2 = np.uint64(0x9AE16A3B2F90404F)
_SEED = np.uint64(81)
_WORD_BITS = np.uint64(64)
_DECIMAL_BYTES = 20  # of the least int64, its sign included


def fingerprint_values(values: pa.Array) -> np.ndarray:
    """Hashes the text of each value; integers stand for their decimal text.

    Args:
        values: Integers, strings or binaries `[rows]`, possibly sliced; nulls give any number.

    Returns:
        uint64 `[rows]`.

    Raises:
        pa.ArrowInvalid: Values of a type that has no exact text.
    """
    hashes = np.zeros(len(values), np.uint64)
    if values.type in BYTES_TYPES:
        _fingerprint_bytes(bytes_cells(values), hashes)
        return hashes
    if not pa.types.is_integer(values.type) or values.type == pa.uint64():
        return fingerprint_values(cast_values(values, pa.string()))
    values = cast_values(values, pa.int64())
    digits = np.empty(_DECIMAL_BYTES, np.uint8)
    _fingerprint_int64(int64_cells(values), digits.ctypes.data, hashes)
    return hashes


@kernel
def _fingerprint_bytes(cells, hashes):
    for row in range(hashes.size):
        if has_value(cells, row):
            address, length = load_span(cells, row)
            hashes[row] = fingerprint64(address, length)


@kernel
def _fingerprint_int64(cells, digits, hashes):
    for row in range(hashes.size):
        if has_value(cells, row):
            value = load_i64(cells[2] + 8 * (cells[3] + row))
            rest = np.uint64(value)
            if value < 0:
                rest = ~rest + np.uint64(1)
            at = digits + _DECIMAL_BYTES
            while True:
                at -= 1
                tenth = rest // np.uint64(10)
                store_u8(at, np.uint8(rest - tenth * np.uint64(10)) + np.uint8(48))
                rest = tenth
                if rest == np.uint64(0):
                    break
            if value < 0:
                at -= 1
                store_u8(at, np.uint8(45))
            hashes[row] = fingerprint64(at, digits + _DECIMAL_BYTES - at)


@outlined
def fingerprint64(address, length):
    """Fingerprint64 of `length` bytes at `address`, uint64; reads nothing outside of them."""
    if length <= 16:
        return _hash_to_16(address, length)
    if length <= 32:
        return _hash_to_32(address, length)
    if length <= 64:
        return _hash_to_64(address, length)
    return _hash_long(address, length)


@inlined
def _rotate(value, bits):
    return (value >> np.uint64(bits)) | (value << (_WORD_BITS - np.uint64(bits)))


@inlined
def _shift_mix(value):
    return value ^ (value >> np.uint64(47))


@inlined
def _hash_16(low, high, factor):
    mixed = _shift_mix((low ^ high) * factor)
    return _shift_mix((high ^ mixed) * factor) * factor


@inlined
def _hash_to_16(address, length):
    size = np.uint64(length)
    if length >= 8:
        factor = _K2 + size * np.uint64(2)
        a = load_u64(address) + _K2
        b = load_u64(address + length - 8)
        c = _rotate(b, 37) * factor + a
        d = (_rotate(a, 25) + b) * factor
        return _hash_16(c, d, factor)
    if length >= 4:
        factor = _K2 + size * np.uint64(2)
        first = np.uint64(load_u32(address))
        last = np.uint64(load_u32(address + length - 4))
        return _hash_16(size + (first << np.uint64(3)), last, factor)
    if length > 0:
        first = np.uint64(load_u8(address))
        middle = np.uint64(load_u8(address + (length >> 1)))
        last = np.uint64(load_u8(address + length - 1))
        y = first + (middle << np.uint64(8))
        z = size + (last << np.uint64(2))
        return _shift_mix((y * _K2) ^ (z * _K0)) * _K2
    return _K2


@inlined
def _fold_ends(address, length, first):
    """Factor of the length, and two words of the first and last 16 bytes."""
    factor = _K2 + np.uint64(length) * np.uint64(2)
    a = load_u64(address) * first
    b = load_u64(address + 8)
    c = load_u64(address + length - 8) * factor
    d = load_u64(address + length - 16) * _K2
    return factor, _rotate(a + b, 43) + _rotate(c, 30) + d, a + _rotate(b + _K2, 18) + c


@inlined
def _hash_to_32(address, length):
    factor, y, z = _fold_ends(address, length, _K1)
    return _hash_16(y, z, factor)


@inlined
def _hash_to_64(address, length):
    factor, y, z = _fold_ends(address, length, _K2)
    z = _hash_16(y, z, factor)
    a = load_u64(address) * _K2
    e = load_u64(address + 16) * factor
    f = load_u64(address + 24)
    g = (y + load_u64(address + length - 32)) * factor
    h = (z + load_u64(address + length - 24)) * factor
    return _hash_16(_rotate(e + f, 43) + _rotate(g, 30) + h, e + _rotate(f + a, 18) + g, factor)


@inlined
def _weak_hash_32(address, a, b):
    """Two words from 32 bytes and two seeds."""
    last = load_u64(address + 24)
    a += load_u64(address)
    b = _rotate(b + a + last, 21)
    seed = a
    a += load_u64(address + 8)
    a += load_u64(address + 16)
    b += _rotate(a, 44)
    return a + last, b + seed


@inlined
def _hash_long(address, length):
    """More than 64 bytes: blocks of 64, then the last 64 bytes, which may overlap."""
    x = _SEED * _K2 + load_u64(address)
    y = _SEED * _K1 + np.uint64(113)
    z = _shift_mix(y * _K2 + np.uint64(113)) * _K2
    v0, v1, w0, w1 = np.uint64(0), np.uint64(0), np.uint64(0), np.uint64(0)
    end = address + ((length - 1) // 64) * 64
    last = end + ((length - 1) & 63) - 63
    while address != end:
        x = _rotate(x + y + v0 + load_u64(address + 8), 37) * _K1
        y = _rotate(y + v1 + load_u64(address + 48), 42) * _K1
        x ^= w1
        y += v0 + load_u64(address + 40)
        z = _rotate(z + w0, 33) * _K1
        v0, v1 = _weak_hash_32(address, v1 * _K1, x + w0)
        w0, w1 = _weak_hash_32(address + 32, z + w1, y + load_u64(address + 16))
        x, z = z, x
        address += 64
    factor = _K1 + ((z & np.uint64(0xFF)) << np.uint64(1))
    w0 += np.uint64((length - 1) & 63)
    v0 += w0
    w0 += v0
    x = _rotate(x + y + v0 + load_u64(last + 8), 37) * factor
    y = _rotate(y + v1 + load_u64(last + 48), 42) * factor
    x ^= w1 * np.uint64(9)
    y += v0 * np.uint64(9) + load_u64(last + 40)
    z = _rotate(z + w0, 33) * factor
    v0, v1 = _weak_hash_32(last, v1 * factor, x + w0)
    w0, w1 = _weak_hash_32(last + 32, z + w1, y + load_u64(last + 16))
    x, z = z, x
    return _hash_16(
        _hash_16(v0, w0, factor) + _shift_mix(y) * _K0 + z, _hash_16(v1, w1, factor) + x, factor
    )

"""Hashed ids: FarmHash Fingerprint64, buckets, 64-bit keys, n-grams of text.

Fingerprint64 is the hash of `tf.strings.to_hash_bucket_fast`, so that a served model computes
the same ids (google/farmhash, `farmhashna::Hash64`, which it is defined to be for ever).
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conf.encoders.text import Ngrams
from conf.schema import FIRST_TOKEN_ID, OOV_ID
from etl.encoders.arrow_columns import (
    array_buffers,
    as_text,
    has_value,
    load_span,
    to_arrow,
    valid_mask,
)
from etl.tfrecord.codec.kernels import (
    inlined,
    kernel,
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


def fingerprint_values(values: pa.Array) -> np.ndarray:
    """Hashes the text of each value, uint64 `[rows]`; integers stand for their decimal text."""
    values = as_text(values)
    hashes = np.zeros(len(values), np.uint64)
    _fingerprint_bytes(array_buffers(values), hashes)
    return hashes


@kernel
def _fingerprint_bytes(buffers, hashes):
    for row in range(hashes.size):
        if has_value(buffers, row):
            address, length = load_span(buffers, row)
            hashes[row] = fingerprint64(address, length)


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


def hash_to_buckets(values: pa.Array, buckets: int) -> np.ndarray:
    """Returns the bucket of each value, int64 `[rows]`: `tf.strings.to_hash_bucket_fast`."""
    return (fingerprint_values(values) % np.uint64(buckets)).astype(np.int64)


def hash_values(values: pa.Array, buckets: int | None) -> pa.Array:
    """Returns int64 ids `[values]` from the hash of each value's text; null is OOV.

    Without buckets the whole fingerprint is a key. The two keys that would read as padding and OOV
    are moved up by 2.
    """
    if buckets is None:
        ids = fingerprint_values(values).view(np.int64)
        ids[(ids >= 0) & (ids < FIRST_TOKEN_ID)] += FIRST_TOKEN_ID
    else:
        ids = hash_to_buckets(values, buckets) + FIRST_TOKEN_ID
    ids[~valid_mask(values)] = OOV_ID
    return to_arrow(ids)


_SPACE = np.uint8(32)


def hash_grams(
    texts: pa.Array, operation: Ngrams, max_len: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ids of the n-grams of strings, int64, and their offsets, int64 `[rows + 1]`."""
    by_word, sizes = operation.unit == "word", np.array(operation.sizes, np.int64)
    size = pc.sum(pc.binary_length(texts)).as_py() or 0
    bounds = np.zeros(len(texts) + 1, np.int64)
    # A byte of slack: an empty buffer has no address of its own.
    plain = np.empty(size + 1, np.uint8)
    _simplify(array_buffers(texts), operation.lower, plain.ctypes.data, bounds)
    spans = np.empty((int(np.diff(bounds).max(initial=0)) + 1, 2), np.int64)
    ids = np.empty(size * len(sizes), np.int64)
    limit = len(ids) if max_len is None else max_len
    offsets = np.zeros(len(texts) + 1, np.int64)
    shape = (by_word, sizes, limit, np.uint64(operation.buckets))
    _hash_grams(plain.ctypes.data, bounds, shape, spans, offsets, ids)
    return ids[: offsets[-1]], offsets


@inlined
def _separates(byte):
    """Whether a byte is ASCII and neither letter nor digit."""
    letter = byte | np.uint8(32)
    is_letter = letter >= np.uint8(97) and letter <= np.uint8(122)
    is_digit = byte >= np.uint8(48) and byte <= np.uint8(57)
    return byte < np.uint8(128) and not is_letter and not is_digit


@kernel
def _simplify(buffers, lower, plain, bounds):
    """Copies the words of each text with one space between; `bounds[row + 1]` is where it ends."""
    at = 0
    for row in range(bounds.size - 1):
        start = at
        if has_value(buffers, row):
            address, length = load_span(buffers, row)
            pending = False
            for i in range(length):
                byte = load_u8(address + i)
                if _separates(byte):
                    pending = at > start
                    continue
                if pending:
                    store_u8(plain + at, _SPACE)
                    at += 1
                    pending = False
                if lower and byte >= np.uint8(65) and byte <= np.uint8(90):
                    byte = byte + np.uint8(32)
                store_u8(plain + at, byte)
                at += 1
        bounds[row + 1] = at


@inlined
def _find_units(plain, start, end, by_word, spans):
    """Writes first and last position of each word or character; returns how many there are."""
    count = 0
    for i in range(start, end):
        byte = load_u8(plain + i)
        if by_word and byte == _SPACE:
            continue
        if by_word:
            begins = i == start or load_u8(plain + i - 1) == _SPACE
        else:
            begins = (byte & np.uint8(0xC0)) != np.uint8(0x80)
        if begins:
            spans[count, 0] = i
            count += 1
        spans[count - 1, 1] = i + 1
    return count


@kernel
def _hash_grams(plain, bounds, shape, spans, offsets, ids):
    """Fills `ids`, and where those of each row end; a row has `limit` of them at most."""
    by_word, sizes, limit, buckets = shape
    at = 0
    for row in range(bounds.size - 1):
        units = _find_units(plain, bounds[row], bounds[row + 1], by_word, spans)
        end = at + limit
        for size in sizes:
            for i in range(units - size + 1):
                if at == end:
                    break
                begin = spans[i, 0]
                length = spans[i + size - 1, 1] - begin
                ids[at] = FIRST_TOKEN_ID + np.int64(fingerprint64(plain + begin, length) % buckets)
                at += 1
        offsets[row + 1] = at

"""Cells in the form that all common writers produce, read in a few word loads.

Whatever deviates is left to the walk field by field.
"""

# mypy: disable-error-code="no-untyped-def"

import numpy as np

from etl.tfrecord.bit_groups import gather_groups
from etl.tfrecord.decode_kernels_keys import (
    BYTE_COUNT,
    DEPTH,
    END,
    ENTRY_TAG,
    HEAD,
    KEY_BYTES,
    KEY_TAG,
    KIND,
    PLACE_BYTES,
    PLACES,
    SINCE,
    START,
    VALID,
    VALUE_COUNT,
    VALUES,
)
from etl.tfrecord.kernels import (
    inlined,
    load_u8,
    load_u32,
    load_u64,
    same_bytes,
    store_u8,
    store_u32,
    store_u64,
    trailing_zeros,
)
from etl.tfrecord.packed import count_packed
from etl.tfrecord.varint import CONTINUATION, FAILED
from etl.tfrecord.walk_kernels import (
    BYTES,
    FLOAT,
    INT,
    PACKED_TAG,
    VALUE_TAG,
    measure_list,
)

# 12 <n + 4> <kind tag> <n + 2> 0A <n>: what follows the key in a cell with n bytes of numbers.
_INT_TAIL = 0x0000_000A_021A_0412
_FLOAT_TAIL = 0x0000_000A_0212_0412
_BYTES_TAIL = 0x0000_000A_020A_0412
_TAIL_STEP = 0x0000_0100_0100_0100
_TAIL_MASK = 0x0000_FFFF_FFFF_FFFF
# In place of an address to count from: what is stored is no entry, but a list message, or the
# packed numbers or the byte string themselves.
LIST_ALONE, VALUE_ALONE = 0, 1


@inlined
def store_place(feature, row, start, end, since, count, total):
    """Notes where a list or byte string lies and what it holds."""
    place = feature[PLACES] + PLACE_BYTES * row
    store_u64(place + START, np.uint64(start))
    store_u64(place + END, np.uint64(end))
    store_u64(place + SINCE, np.uint64(since))
    store_u64(place + VALUE_COUNT, np.uint64(count))
    store_u64(place + BYTE_COUNT, np.uint64(total))


@inlined
def _has_head(p, head, head_bytes):
    """Whether a cell begins as `head` does, its own length aside; reads whole words."""
    word, i = load_u64(p) & ~np.uint64(0xFF00), 0
    while i + 8 < head_bytes:
        if word != load_u64(head + i):
            return False
        i += 8
        word = load_u64(p + i)
    beyond = np.uint64(8 * (8 - (head_bytes - i)))
    return (word << beyond) == (load_u64(head + i) << beyond)


@inlined
def read_compact(feature, p, end, limit, row):
    """Reads a cell with the expected key and one number or short string in canonical form.

    Returns:
        The address past the cell, or `FAILED` where it is anything else: nothing is stored then.
    """
    kind, head, head_bytes = feature[KIND], feature[HEAD], feature[KEY_BYTES] + 4
    if feature[DEPTH] != 0 or p + head_bytes + 8 > limit:
        return np.int64(FAILED)
    size = np.int64(load_u8(p + 1))
    stop = p + 2 + size
    rest = stop - p - head_bytes
    # All loads below end within 16 bytes of the cell's end.
    if size > 127 or rest < 6 or stop > end or stop + 16 > limit:
        return np.int64(FAILED)
    if kind != BYTES and (rest < 7 or rest > 14):
        return np.int64(FAILED)
    if not _has_head(p, head, head_bytes):
        return np.int64(FAILED)
    tail, n = p + head_bytes, np.uint64(rest - 6)
    form = _INT_TAIL if kind == INT else _FLOAT_TAIL if kind == FLOAT else _BYTES_TAIL
    pattern = np.uint64(form) + n * np.uint64(_TAIL_STEP)
    if (load_u64(tail) & np.uint64(_TAIL_MASK)) != pattern:
        return np.int64(FAILED)
    if kind == BYTES:
        place = feature[PLACES] + PLACE_BYTES * row
        store_u64(place + START, np.uint64(tail + 6))
        store_u64(place + SINCE, np.uint64(VALUE_ALONE))
        store_u64(place + BYTE_COUNT, n)
        store_u8(feature[VALID] + row, np.uint8(1))
        return stop
    if kind == FLOAT:
        if n != np.uint64(4):
            return np.int64(FAILED)
        store_u32(feature[VALUES] + 4 * row, load_u32(tail + 6))
    else:
        word = load_u64(tail + 6)
        ends = ~word & np.uint64(CONTINUATION)
        bits = n << np.uint64(3)
        if ends == np.uint64(0) or trailing_zeros(ends) + np.uint64(1) != bits:
            return np.int64(FAILED)
        value = gather_groups(word & (~np.uint64(0) >> (np.uint64(64) - bits)))
        store_u64(feature[VALUES] + 8 * row, value)
    store_u8(feature[VALID] + row, np.uint8(1))
    return stop


@inlined
def _read_short_length(p, end):
    """Start and end of a field whose length at `p` takes one or two bytes; `FAILED` otherwise."""
    if end - p < 2:
        return np.int64(FAILED), np.int64(FAILED)
    low, high = np.int64(load_u8(p)), np.int64(load_u8(p + 1))
    start, length = p + 1, low
    if low >= 0x80:
        start, length = p + 2, (high << 7) | (low & 0x7F)
        if high >= 0x80:
            return np.int64(FAILED), np.int64(FAILED)
    if length > end - start:
        return np.int64(FAILED), np.int64(FAILED)
    return start, start + length


@inlined
def _store_numbers(feature, row, start, stop):
    """Takes over packed numbers; returns whether they are whole."""
    if feature[KIND] == INT:
        count = count_packed(start, stop)
    else:
        count = (stop - start) >> 2 if (stop - start) & 3 == 0 else np.int64(FAILED)
    if count < 0:
        return False
    store_u8(feature[VALID] + row, np.uint8(1))
    store_place(feature, row, start, stop, VALUE_ALONE, count, 0)
    return True


@inlined
def read_simple(feature, p, end, row):
    """Takes over a list or byte string under the expected key, in the form that writers produce.

    Returns:
        The address past the cell, or `FAILED` where it is anything else: nothing is stored then.
    """
    kind, failed = feature[KIND], np.int64(FAILED)
    is_list = feature[DEPTH] != 0
    if feature[DEPTH] > 1 or (not is_list and kind != BYTES) or load_u8(p) != np.uint8(ENTRY_TAG):
        return failed
    # Each message must fill the one around it: then nothing else is in there.
    start, stop = _read_short_length(p + 1, end)
    if start < 0 or start >= stop or load_u8(start) != np.uint8(KEY_TAG):
        return failed
    key, after = _read_short_length(start + 1, stop)
    length = feature[KEY_BYTES]
    if key < 0 or after - key != length or not same_bytes(feature[HEAD] + 4, key, length):
        return failed
    if after >= stop or load_u8(after) != np.uint8(VALUE_TAG):
        return failed
    member, last = _read_short_length(after + 1, stop)
    if last != stop or member >= stop or np.int64(load_u8(member)) != (kind << 3 | 2):
        return failed
    low, high = _read_short_length(member + 1, stop)
    if high != stop:
        return failed
    if kind != BYTES and low < high and load_u8(low) == np.uint8(PACKED_TAG):
        packed, last = _read_short_length(low + 1, high)
        if last == high:
            return stop if _store_numbers(feature, row, packed, last) else failed
    count, total = measure_list(kind, low, high)
    if count < 0 or (not is_list and count > 1):
        return failed
    store_place(feature, row, low, high, LIST_ALONE, count, total)
    store_u8(feature[VALID] + row, np.uint8(is_list or count > 0))
    return stop

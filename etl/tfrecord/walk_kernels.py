"""Walks protobuf messages field by field; trusts no byte of its input.

Every read is checked against the end of the message that holds it.
"""

# mypy: disable-error-code="no-untyped-def"

import numpy as np

from etl.tfrecord.kernels import (
    copy_bytes,
    inlined,
    load_u8,
    load_u32,
    outlined,
    store_i32,
    store_u32,
)
from etl.tfrecord.packed import count_packed, read_packed
from etl.tfrecord.varint import FAILED, read_varint

# Kinds of lists, numbered as the members of Feature's oneof.
ABSENT, BYTES, FLOAT, INT = 0, 1, 2, 3

VALUE_TAG, PACKED_TAG, FEATURE_TAG = 0x12, 0x0A, 0x0A


@inlined
def read_length(p, end):
    """Start and end of a length-delimited field whose length is at `p`; `FAILED` if cut."""
    length, p = read_varint(p, end)
    if p < 0 or length > np.uint64(end - p):
        return FAILED, FAILED
    return p, p + np.int64(length)


@inlined
def read_field(p, end):
    """Tag, and start and end of the field's value (`FAILED` if malformed).

    For a length-delimited field that is the range of its content, otherwise of the encoded value.
    """
    tag, p = read_varint(p, end)
    if p < 0 or tag < np.uint64(8) or tag > np.uint64(0xFFFFFFFF):
        return np.int64(0), FAILED, FAILED
    wire_type = np.int64(tag & np.uint64(7))
    stop = np.int64(FAILED)
    if wire_type == 2:
        p, stop = read_length(p, end)
    elif wire_type == 0:
        _, stop = read_varint(p, end)
    elif wire_type == 1:
        stop = p + 8
    elif wire_type == 5:
        stop = p + 4
    if stop < 0 or stop > end:
        return np.int64(0), FAILED, FAILED
    return np.int64(tag), p, stop


@inlined
def _short_bytes(p, end):
    """Length of the BytesList's value at `p` if it is whole and its length takes one byte, or -1.

    Its bytes begin at `p + 2` then.
    """
    if end - p < 2 or load_u8(p) != np.uint8(0x0A):
        return np.int64(FAILED)
    size = np.int64(load_u8(p + 1))
    return size if size < 0x80 and size <= end - p - 2 else np.int64(FAILED)


@outlined
def measure_list(kind, p, end):
    """Values in a BytesList, FloatList or Int64List and their total length; `FAILED` if bad."""
    count, total = np.int64(0), np.int64(0)
    while p < end:
        size = _short_bytes(p, end) if kind == BYTES else np.int64(FAILED)
        if size >= 0:
            count += 1
            total += size
            p += 2 + size
            continue
        tag, start, stop = read_field(p, end)
        if stop < 0:
            return np.int64(FAILED), total
        if tag == 0x0A and kind == BYTES:
            count += 1
            total += stop - start
        elif tag == 0x0A and kind == INT:
            packed = count_packed(start, stop)
            if packed < 0:
                return np.int64(FAILED), total
            count += packed
        elif tag == 0x0A and kind == FLOAT:
            if (stop - start) & 3 != 0:
                return np.int64(FAILED), total
            count += (stop - start) >> 2
        elif (tag == 0x08 and kind == INT) or (tag == 0x0D and kind == FLOAT):
            count += 1
        p = stop
    return count, total


@outlined
def measure_members(p, end, kind, count, total, since):
    """Walks the members of a Feature, continuing what earlier pieces of it have left.

    Returns:
        Kind of the list it ends up with, number of values (`FAILED` if malformed), their total
        length in bytes where they are byte strings, and the address from which on its members
        count: what stands before belongs to a kind that was replaced.
    """
    while p < end:
        member, low, high = read_field(p, end)
        if high < 0:
            return kind, np.int64(FAILED), total, since
        if member == 0x0A or member == 0x12 or member == 0x1A:
            if kind != member >> 3:
                kind, count, total, since = member >> 3, np.int64(0), np.int64(0), low
            values, size = measure_list(kind, low, high)
            if values < 0:
                return kind, np.int64(FAILED), total, since
            count += values
            total += size
        p = high
    return kind, count, total, since


@outlined
def measure_entry(p, end):
    """Walks the Feature of a map entry; returns what `measure_members` does."""
    kind, count, total, since = np.int64(ABSENT), np.int64(0), np.int64(0), np.int64(p)
    while p < end:
        tag, inner, stop = read_field(p, end)
        if stop < 0:
            return kind, np.int64(FAILED), total, since
        if tag == VALUE_TAG:
            kind, count, total, since = measure_members(inner, stop, kind, count, total, since)
            if count < 0:
                return kind, count, total, since
        p = stop
    return kind, count, total, since


@inlined
def fill_numbers(kind, start, stop, limit, values, at):
    """Copies packed numbers to position `at` on; returns the next position, or `FAILED`."""
    if kind == INT:
        after = read_packed(start, stop, limit, values + 8 * at)
        return (after - values) >> 3 if after >= 0 else np.int64(FAILED)
    copy_bytes(values + 4 * at, start, stop - start)
    return at + ((stop - start) >> 2)


@outlined
def fill_list(kind, p, end, limit, values, offsets, at, byte_at):
    """Copies a list's values from position `at` on; returns the next position, or `FAILED`."""
    while p < end:
        size = _short_bytes(p, end) if kind == BYTES else np.int64(FAILED)
        if size >= 0:
            copy_bytes(values + byte_at, p + 2, size)
            byte_at += size
            at += 1
            store_i32(offsets + 4 * at, np.int32(byte_at))
            p += 2 + size
            continue
        tag, start, stop = read_field(p, end)
        if stop < 0:
            return np.int64(FAILED), byte_at
        if kind == BYTES and tag == 0x0A:
            copy_bytes(values + byte_at, start, stop - start)
            byte_at += stop - start
            at += 1
            store_i32(offsets + 4 * at, np.int32(byte_at))
        elif kind == FLOAT and tag == 0x0D:
            store_u32(values + 4 * at, load_u32(start))
            at += 1
        elif kind != BYTES and (tag == PACKED_TAG or (kind == INT and tag == 0x08)):
            at = fill_numbers(kind, start, stop, limit, values, at)
            if at < 0:
                return at, byte_at
        p = stop
    return at, byte_at


@outlined
def fill_members(kind, p, end, since, limit, values, offsets, at, byte_at):
    """Copies the values of a Feature that `measure_members` has accepted, from position `at` on.

    Returns:
        The next position of values and of bytes; the first is `FAILED` for a varint over ten
        bytes long.
    """
    while p < end:
        member, low, high = read_field(p, end)
        if low >= since and (member == 0x0A or member == 0x12 or member == 0x1A):
            at, byte_at = fill_list(kind, low, high, limit, values, offsets, at, byte_at)
            if at < 0:
                return at, byte_at
        p = high
    return at, byte_at


@outlined
def fill_entry(kind, p, end, since, limit, values, offsets, at, byte_at):
    """Copies the values of an entry that `measure_entry` has accepted; as `fill_members`."""
    while p < end:
        tag, inner, stop = read_field(p, end)
        if tag == VALUE_TAG:
            at, byte_at = fill_members(
                kind, inner, stop, since, limit, values, offsets, at, byte_at
            )
            if at < 0:
                return at, byte_at
        p = stop
    return at, byte_at

"""Compiled reads of protobuf messages: fields, keys and features; no byte is trusted.

Every read is checked against the end of the message that holds it. An entry of a map is walked
twice: `measure_value` counts what its value holds, `fill_value` copies it.
"""

# mypy: disable-error-code="no-untyped-def"

from collections.abc import Sequence

import numpy as np

from conf.errors import ConfigError
from etl.tfrecord.codec.kernels import (
    copy_bytes,
    inlined,
    kernel,
    load_u8,
    load_u32,
    load_u64,
    outlined,
    same_bytes,
    store_i32,
    store_u32,
)
from etl.tfrecord.codec.varint import FAILED, count_packed, read_packed, read_varint
from etl.tfrecord.types.features import RECORD_TYPES

# Kinds of lists, numbered as the members of Feature's oneof.
ABSENT, BYTES, FLOAT, INT = 0, 1, 2, 3

# Fields, with the wire type of what has a length.
FEATURES_TAG, FEATURE_LISTS_TAG = 0x0A, 0x12  # of a record
ENTRY_TAG, KEY_TAG, VALUE_TAG = 0x0A, 0x0A, 0x12  # of a map
FEATURE_TAG, VALUES_TAG = 0x0A, 0x0A  # of a FeatureList, and of a list

# 12 <n + 4> <kind tag> <n + 2> 0A <n> in one word: what follows the key in an entry that holds one
# value of n bytes.
INT_TAIL, FLOAT_TAIL = 0x0000_000A_021A_0412, 0x0000_000A_0212_0412
BYTES_TAIL, TAIL_STEP = 0x0000_000A_020A_0412, 0x0000_0100_0100_0100


def check_record_type(record_type: str) -> None:
    """Refuses a record type that there is not."""
    if record_type not in RECORD_TYPES:
        raise ConfigError(
            "unknown TFRecord record type",
            received=repr(record_type),
            allowed=", ".join(RECORD_TYPES),
        )


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
        length, p = read_varint(p, end)
        if p >= 0 and length <= np.uint64(end - p):
            stop = p + np.int64(length)
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
def read_key(p, end):
    """Start and length of an entry's key (empty if it has none), or `FAILED`."""
    key, length = np.int64(p), np.int64(0)
    while p < end:
        tag, start, stop = read_field(p, end)
        if stop < 0:
            return np.int64(FAILED), length
        if tag == KEY_TAG:
            key, length = start, stop - start
        p = stop
    return key, length


# First fields of a row about a key.
HEAD = 0  # address of `0A 00 0A <key length> key`, padded to whole words with zeros
KEY_BYTES = 1


@inlined
def _hash_key(p, length):
    """A hash of a key, by words; its quality matters for speed alone."""
    value, i = np.uint64(length), 0
    while i + 8 <= length:
        value = (value ^ load_u64(p + i)) * np.uint64(0x9E3779B97F4A7C15)
        value ^= value >> np.uint64(29)
        i += 8
    while i < length:
        value = (value ^ np.uint64(load_u8(p + i))) * np.uint64(0x9E3779B97F4A7C15)
        value ^= value >> np.uint64(29)
        i += 1
    return value


@kernel
def _hash_keys(keys, table):
    """Fills a hash table of keys: int64, -1 where empty, a power of two long."""
    table[:] = -1
    wrap = np.uint64(len(table) - 1)
    for f in range(len(keys)):
        slot = _hash_key(keys[f, HEAD] + 4, keys[f, KEY_BYTES]) & wrap
        while table[slot] >= 0:
            slot = (slot + np.uint64(1)) & wrap
        table[slot] = f


@inlined
def find_key(keys, table, expected, key, length):
    """Row of a key, -1 if it has none; tries the expected one first."""
    if keys[expected, KEY_BYTES] == length and same_bytes(keys[expected, HEAD] + 4, key, length):
        return np.int64(expected)
    wrap = np.uint64(len(table) - 1)
    slot = _hash_key(key, length) & wrap
    while table[slot] >= 0:
        f = table[slot]
        if keys[f, KEY_BYTES] == length and same_bytes(keys[f, HEAD] + 4, key, length):
            return f
        slot = (slot + np.uint64(1)) & wrap
    return np.int64(-1)


def build_head(key: bytes, entry_bytes: int = 0) -> np.ndarray:
    """First bytes of an entry under a key, padded to whole words with zeros."""
    lengths = bytes([ENTRY_TAG, entry_bytes & 0xFF, KEY_TAG, len(key) & 0xFF])
    return np.frombuffer(lengths + key + bytes(-(len(key) + 4) % 8), np.uint8)


class KeyTable:
    """Keys in memory: `rows`, int64 `[keys, 2]`, one at least, and their hash `table`."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        heads = [build_head(key) for key in keys]
        self._memory = np.concatenate([*heads, np.zeros(8, np.uint8)])
        starts = np.cumsum([0, *(head.size for head in heads)])[:-1]
        places = zip(self._memory.ctypes.data + starts, map(len, keys), strict=True)
        self.rows = np.array([*places] or [(0, -1)], np.int64)  # No key has this length.
        self.table = np.empty(1 << (2 * len(keys) + 1).bit_length(), np.int64)
        _hash_keys(self.rows[: len(keys)], self.table)


@inlined
def _short_bytes(p, end):
    """Length of the BytesList's value at `p` if it is whole and its length takes one byte, or -1.

    Its bytes begin at `p + 2` then.
    """
    if end - p < 2 or load_u8(p) != np.uint8(VALUES_TAG):
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
        if tag == VALUES_TAG and kind == BYTES:
            count += 1
            total += stop - start
        elif tag == VALUES_TAG:
            packed = count_numbers(kind, start, stop)
            if packed < 0:
                return np.int64(FAILED), total
            count += packed
        elif (tag == 0x08 and kind == INT) or (tag == 0x0D and kind == FLOAT):
            count += 1
        p = stop
    return count, total


@inlined
def count_numbers(kind, start, stop):
    """Number of packed values, or `FAILED` if the last is cut."""
    if kind == INT:
        return count_packed(start, stop)
    return (stop - start) >> 2 if (stop - start) & 3 == 0 else np.int64(FAILED)


@outlined
def _measure_feature(p, end, kind, count, total, since):
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
def measure_value(p, end, is_nested):
    """Walks a map entry whose value is a Feature, or a FeatureList where it is nested.

    Returns:
        Kinds of lists that occur (bit k for kind k; `FAILED` if malformed), number of Features,
        of values, bytes of byte strings, and `since` of a Feature as `_measure_feature` has it.
    """
    kinds, lists, values, size = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
    none, zero, failed = np.int64(ABSENT), np.int64(0), np.int64(FAILED)
    kind, since = none, np.int64(p)
    while p < end:
        tag, inner, stop = read_field(p, end)
        if stop < 0:
            return failed, lists, values, size, since
        if tag == VALUE_TAG and not is_nested:
            kind, values, size, since = _measure_feature(inner, stop, kind, values, size, since)
            if values < 0:
                return failed, lists, values, size, since
        while is_nested and tag == VALUE_TAG and inner < stop:
            member, low, high = read_field(inner, stop)
            if high < 0:
                return failed, lists, values, size, since
            if member == FEATURE_TAG:
                found, count, total, _ = _measure_feature(low, high, none, zero, zero, low)
                if count < 0:
                    return failed, lists, values, size, since
                kinds |= np.int64(1) << found
                lists, values, size = lists + 1, values + count, size + total
            inner = high
        p = stop
    if not is_nested:
        kinds = np.int64(1) << kind
    return kinds, lists, values, size, since


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
        if kind == BYTES and tag == VALUES_TAG:
            copy_bytes(values + byte_at, start, stop - start)
            byte_at += stop - start
            at += 1
            store_i32(offsets + 4 * at, np.int32(byte_at))
        elif kind == FLOAT and tag == 0x0D:
            store_u32(values + 4 * at, load_u32(start))
            at += 1
        elif kind != BYTES and (tag == VALUES_TAG or (kind == INT and tag == 0x08)):
            at = fill_numbers(kind, start, stop, limit, values, at)
            if at < 0:
                return at, byte_at
        p = stop
    return at, byte_at


@outlined
def _fill_feature(kind, p, end, since, limit, values, offsets, at, byte_at):
    """Copies the values of a Feature that has been measured, from position `at` on.

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
def fill_value(kind, p, end, since, limit, values, offsets, at, byte_at):
    """Copies the Feature of an entry that has been measured; as `_fill_feature`."""
    while p < end:
        tag, inner, stop = read_field(p, end)
        if tag == VALUE_TAG:
            at, byte_at = _fill_feature(
                kind, inner, stop, since, limit, values, offsets, at, byte_at
            )
            if at < 0:
                return at, byte_at
        p = stop
    return at, byte_at


@outlined
def fill_nested(kind, p, end, limit, values, offsets, list_offsets, at, byte_at, list_at):
    """Copies the FeatureList of an entry that has been measured; as `_fill_feature`."""
    none, zero = np.int64(ABSENT), np.int64(0)
    while p < end:
        tag, inner, stop = read_field(p, end)
        while tag == VALUE_TAG and inner < stop:
            member, low, high = read_field(inner, stop)
            if member == FEATURE_TAG:
                _, start, last = read_field(low, high)
                if last != high:  # not one list alone: some of them may not count
                    _, _, _, start = _measure_feature(low, high, none, zero, zero, low)
                at, byte_at = _fill_feature(
                    kind, low, high, start, limit, values, offsets, at, byte_at
                )
                if at < 0:
                    return at, byte_at, list_at
                list_at += 1
                store_i32(list_offsets + 4 * list_at, np.int32(at))
            inner = high
        p = stop
    return at, byte_at, list_at

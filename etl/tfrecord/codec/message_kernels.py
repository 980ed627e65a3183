"""Compiled reads of protobuf messages: fields, keys and entries of features; no byte is trusted.

Every read is checked against the end of the message that holds it. Entries in the form that all
common writers produce are read in a few word loads; what deviates is walked field by field.
"""

# mypy: disable-error-code="no-untyped-def"

import numpy as np

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
    store_u8,
    store_u32,
    store_u64,
    trailing_zeros,
)
from etl.tfrecord.codec.varint import (
    CONTINUATION,
    FAILED,
    count_packed,
    gather_groups,
    read_packed,
    read_varint,
)

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


# Outcomes.
OK, MALFORMED, OTHER_KIND, NOT_SCALAR, REFUSED = 0, 1, 2, 3, 4

# Fields of a row of the feature table.
(
    KIND,
    DEPTH,  # 0 for one value, 1 for a list, 2 for a feature list
    HEAD,  # address of `0A 00 0A <key length> key`, padded to whole words with zeros
    KEY_BYTES,
    VALID,  # address of uint8 [rows], 1 where the feature is present, or why it is refused
    PLACES,  # lists and bytes: address of the place of row 0, as if all rows had one
    VALUES,  # address of the output: int64 or uint32 [rows] for numbers that are no list
    ROW_OFFSETS,  # lists and bytes: address of int32 [rows + 1], the first one set
    BYTE_OFFSETS,  # lists of bytes: address of int32 [COUNT_ROOM + 1], the first one set
    LIST_OFFSETS,  # feature lists: address of int32 [LIST_ROOM + 1], the first one set
    COUNT,  # values of lists that have been copied
    SIZE,  # bytes of byte strings
    LISTS,  # features of feature lists
    COUNT_ROOM,  # for how many there is room in the output
    SIZE_ROOM,
    LIST_ROOM,
    COUNT_NEED,  # how many there are in the rows that have been looked at
    SIZE_NEED,
    LIST_NEED,
) = range(19)
FEATURE_FIELDS = 19

# A place: where a list or byte string lies in the input, and what it holds. Words, by address.
(
    START,  # where the entry begins
    END,
    SINCE,  # address from which on the members of the oneof count
    VALUE_COUNT,  # how many values it holds (feature lists: in all its features)
    BYTE_COUNT,  # bytes: total length of its values
    LIST_COUNT,  # feature lists: features
) = range(0, 48, 8)
PLACE_BYTES = 48

ENTRY_TAG, KEY_TAG = 0x0A, 0x0A


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
def build_key_table(features, table):
    """Fills a hash table of the features' keys: int64, -1 where empty, a power of two long."""
    table[:] = -1
    wrap = np.uint64(len(table) - 1)
    for f in range(len(features)):
        slot = _hash_key(features[f, HEAD] + 4, features[f, KEY_BYTES]) & wrap
        while table[slot] >= 0:
            slot = (slot + np.uint64(1)) & wrap
        table[slot] = f


@inlined
def find_feature(features, table, expected, key, length):
    """Number of the feature with a key, -1 if it is not wanted; tries the expected one first."""
    if features[expected, KEY_BYTES] == length and same_bytes(
        features[expected, HEAD] + 4, key, length
    ):
        return np.int64(expected)
    wrap = np.uint64(len(table) - 1)
    slot = _hash_key(key, length) & wrap
    while table[slot] >= 0:
        f = table[slot]
        if features[f, KEY_BYTES] == length and same_bytes(features[f, HEAD] + 4, key, length):
            return f
        slot = (slot + np.uint64(1)) & wrap
    return np.int64(-1)


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


# 12 <n + 4> <kind tag> <n + 2> 0A <n>: what follows the key in an entry with n bytes of numbers.
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
    """Whether an entry begins as `head` does, its own length aside; reads whole words."""
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
    """Reads an entry with the expected key and one number or short string in canonical form.

    Returns:
        The address past the entry, or `FAILED` where it is anything else: nothing is stored then.
    """
    kind, head, head_bytes = feature[KIND], feature[HEAD], feature[KEY_BYTES] + 4
    if feature[DEPTH] != 0 or p + head_bytes + 8 > limit:
        return np.int64(FAILED)
    size = np.int64(load_u8(p + 1))
    stop = p + 2 + size
    rest = stop - p - head_bytes
    # All loads below end within 16 bytes of the entry's end.
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
        The address past the entry, or `FAILED` where it is anything else: nothing is stored then.
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

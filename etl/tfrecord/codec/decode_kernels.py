"""Compiled decoder of `tf.train.Example` and `SequenceExample`; trusts no byte of its input.

Records are gone through once. Values are copied as they are met, as far as the outputs have room,
and counted in any case: where there was not enough, what is missing is known. Entries in the form
that all common writers produce are read in a few word loads.
"""

# mypy: disable-error-code="no-untyped-def"

from collections.abc import Sequence

import numpy as np

from conf.errors import ConfigError
from etl.tfrecord.codec.kernels import (
    LINE_BYTES,
    copy_bytes,
    inlined,
    kernel,
    load_u8,
    load_u32,
    load_u64,
    outlined,
    prefetch,
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


# What a row of a table says of a key: the address of `0A 00 0A <key length> key`, padded to whole
# words with zeros.
KEY_FIELDS = ("head", "key_bytes")


def build_row(*names: str) -> np.dtype[np.void]:
    """Type of a row of int64 fields, which kernels take as a record."""
    return np.dtype([(name, np.int64) for name in names])


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


@inlined
def find_slot(keys, table, key, length):
    """Slot of a key in a hash table of keys (int64, -1 where empty, a power of two long).

    A key that has none gets the slot where it would go.
    """
    wrap = np.uint64(len(table) - 1)
    slot = _hash_key(key, length) & wrap
    while table[slot] >= 0:
        f = table[slot]
        if keys[f].key_bytes == length and same_bytes(keys[f].head + 4, key, length):
            break
        slot = (slot + np.uint64(1)) & wrap
    return slot


@inlined
def find_key(keys, table, expected, key, length):
    """Row of a key, -1 if it has none; tries the expected one first."""
    if keys[expected].key_bytes == length and same_bytes(keys[expected].head + 4, key, length):
        return np.int64(expected)
    return np.int64(table[find_slot(keys, table, key, length)])


@kernel
def _hash_keys(keys, table):
    """Fills a hash table."""
    table[:] = -1
    for f in range(len(keys)):
        table[find_slot(keys, table, keys[f].head + 4, keys[f].key_bytes)] = f


def build_head(key: bytes, entry_bytes: int = 0) -> np.ndarray:
    """First bytes of an entry under a key, padded to whole words with zeros."""
    lengths = bytes([ENTRY_TAG, entry_bytes & 0xFF, KEY_TAG, len(key) & 0xFF])
    return np.frombuffer(lengths + key + bytes(-(len(key) + 4) % 8), np.uint8)


class KeyTable:
    """Keys in memory: `rows`, `KEY_FIELDS` `[keys]`, one at least, and their hash `table`."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        heads = [build_head(key) for key in keys]
        self._memory = np.concatenate([*heads, np.zeros(8, np.uint8)])
        starts = np.cumsum([0, *(head.size for head in heads)])[:-1]
        places = zip(self._memory.ctypes.data + starts, map(len, keys), strict=True)
        self.rows = np.array([*places] or [(0, -1)], build_row(*KEY_FIELDS))  # no key is so long
        self.table = np.empty(1 << (2 * len(keys) + 1).bit_length(), np.int64)
        _hash_keys(self.rows[: len(keys)], self.table)


# Outcomes.
OK, MALFORMED, OTHER_KIND, NOT_SCALAR, REFUSED = range(5)

# A row of the feature table, all int64, after what it says of the key.
FEATURE = build_row(
    *KEY_FIELDS,
    "kind",
    "depth",  # 0 for one value, 1 for a list, 2 for a feature list
    "valid",  # address of uint8 [rows], 1 where the feature is present, or why it is refused
    "values",  # address of the output: int64 or float32, of scalars [rows], or bytes
    "row_offsets",  # address of int32 [rows + 1], the first one set; 0 for scalar numbers
    "byte_offsets",  # bytes: address of int32 [values + 1], of scalars the same as of the rows
    "list_offsets",  # feature lists: address of int32 [list_room + 1], the first one set
    "count_room",  # lists: for how many values there is room in the output
    "size_room",  # bytes: for how many of them
    "list_room",  # feature lists: for how many features
    "count",  # how many values there are in the rows so far
    "size",
    "lists",
    "first_count",  # how many there are before the row that the last entry belongs to
    "first_size",
    "first_lists",
    "row",  # this row, -1 for none
)


@inlined
def _take_string(feature, room, start, size, at, byte_at):
    """Copies a byte string to position `at`, if there is room; returns the next positions."""
    if at < room and byte_at + size <= feature.size_room:
        copy_bytes(feature.values + byte_at, start, size)
        store_i32(feature.byte_offsets + 4 * (at + 1), np.int32(byte_at + size))
    return at + 1, byte_at + size


@inlined
def _take_numbers(feature, room, kind, start, stop, limit, at):
    """Copies packed numbers to position `at` on, if there is room; returns the next position.

    It is `FAILED` if the last one is cut; a varint over ten bytes long is noticed by copying.
    """
    values = feature.values
    if kind == FLOAT:
        count = (stop - start) >> 2
        if (stop - start) & 3 != 0:
            return np.int64(FAILED)
        if at + count <= room:
            copy_bytes(values + 4 * at, start, stop - start)
        return at + count
    count = stop - start  # at most
    if at + count > room:
        count = count_packed(start, stop)
        if count < 0 or at + count > room:
            return at + count if count >= 0 else np.int64(FAILED)
    after = read_packed(start, stop, limit, values + 8 * at)
    return (after - values) >> 3 if after >= 0 else np.int64(FAILED)


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
def take_list(feature, room, kind, p, end, limit, at, byte_at):
    """Takes a BytesList, FloatList or Int64List; returns the next positions, `FAILED` if bad."""
    if kind != feature.kind:
        room = np.int64(0)
    while p < end:
        size = _short_bytes(p, end) if kind == BYTES else np.int64(FAILED)
        if size >= 0:
            at, byte_at = _take_string(feature, room, p + 2, size, at, byte_at)
            p += 2 + size
            continue
        tag, start, stop = read_field(p, end)
        if stop < 0:
            return np.int64(FAILED), byte_at
        if tag == VALUES_TAG and kind == BYTES:
            at, byte_at = _take_string(feature, room, start, stop - start, at, byte_at)
        elif tag == VALUES_TAG or (tag == 0x08 and kind == INT) or (tag == 0x0D and kind == FLOAT):
            at = _take_numbers(feature, room, kind, start, stop, limit, at)
            if at < 0:
                return at, byte_at
        p = stop
    return at, byte_at


@outlined
def _take_feature(feature, room, p, end, limit, kind, first, at, byte_first, byte_at):
    """Takes a Feature, or a further piece of one that is of a kind so far.

    A list of another kind replaces what stands between the first and the next positions. Returns
    the kind of the list it ends up with, and the next positions, `FAILED` if malformed.
    """
    while p < end:
        member, low, high = read_field(p, end)
        if high < 0:
            return kind, np.int64(FAILED), byte_at
        if member == 0x0A or member == 0x12 or member == 0x1A:
            if kind != member >> 3:
                kind, at, byte_at = member >> 3, first, byte_first
            at, byte_at = take_list(feature, room, kind, low, high, limit, at, byte_at)
            if at < 0:
                return kind, at, byte_at
        p = high
    return kind, at, byte_at


@outlined
def take_value(feature, room, p, end, limit, at, byte_at, list_at):
    """Takes what the map entry [p, end) holds: a Feature, a FeatureList of a nested feature.

    It goes to these positions of values, bytes and Features, as far as there is room; lists of
    another kind are counted alone. Returns the kinds of lists that it holds (bit k for kind k;
    `FAILED` if malformed), and the next positions.
    """
    is_nested, failed, none = feature.depth > 1, np.int64(FAILED), np.int64(ABSENT)
    kinds, kind, first, byte_first = np.int64(0), none, at, byte_at
    while p < end:
        tag, inner, stop = read_field(p, end)
        if stop < 0:
            return failed, at, byte_at, list_at
        if tag == VALUE_TAG and not is_nested:
            kind, at, byte_at = _take_feature(
                feature, room, inner, stop, limit, kind, first, at, byte_first, byte_at
            )
            if at < 0:
                return failed, at, byte_at, list_at
        while is_nested and tag == VALUE_TAG and inner < stop:
            member, low, high = read_field(inner, stop)
            if high < 0:
                return failed, at, byte_at, list_at
            if member == FEATURE_TAG:
                kind, at, byte_at = _take_feature(
                    feature, room, low, high, limit, none, at, at, byte_at, byte_at
                )
                if at < 0:
                    return failed, at, byte_at, list_at
                kinds |= np.int64(1) << kind
                list_at += 1
                if list_at <= feature.list_room:
                    store_i32(feature.list_offsets + 4 * list_at, np.int32(at))
            inner = high
        p = stop
    return kinds if is_nested else np.int64(1) << kind, at, byte_at, list_at


@inlined
def _end_rows(feature, row):
    """Stores where the values of the last row end, and those of the empty ones before `row`."""
    offsets, depth = feature.row_offsets, feature.depth
    end = feature.lists if depth > 1 else feature.count if depth > 0 else feature.size
    if offsets != 0:
        for ended in range(feature.row + 1, row + 1):
            store_i32(offsets + 4 * ended, np.int32(end))


@inlined
def _begin_row(feature, row):
    """Goes to a row, or back to its beginning: an entry of the same key is replaced.

    Returns positions of its first value, byte and Feature, and for how many values there is room.
    """
    if feature.row != row:
        _end_rows(feature, row)
        feature.row, feature.first_count = row, feature.count
        feature.first_size, feature.first_lists = feature.size, feature.lists
    if feature.depth == 0:
        return np.int64(row), feature.first_size, np.int64(0), np.int64(row + 1)
    return feature.first_count, feature.first_size, feature.first_lists, feature.count_room


@inlined
def _store_row(feature, row, is_present, at, byte_at, list_at):
    """Takes over the values up to these positions as those of a row."""
    feature.count, feature.size, feature.lists = at, byte_at, list_at
    store_u8(feature.valid + row, np.uint8(is_present))


_TAIL_MASK = 0x0000_FFFF_FFFF_FFFF


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
def _read_compact(feature, p, end, limit, row):
    """Reads an entry with the expected key and one number or short string in canonical form.

    Returns the address past it, or `FAILED` where it is anything else: nothing is stored then.
    """
    kind, head, head_bytes = feature.kind, feature.head, feature.key_bytes + 4
    if feature.depth != 0 or p + head_bytes + 8 > limit:
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
    form = INT_TAIL if kind == INT else FLOAT_TAIL if kind == FLOAT else BYTES_TAIL
    pattern = np.uint64(form) + n * np.uint64(TAIL_STEP)
    if (load_u64(tail) & np.uint64(_TAIL_MASK)) != pattern:
        return np.int64(FAILED)
    if kind == BYTES:
        at, byte_at, list_at, room = _begin_row(feature, row)
        at, byte_at = _take_string(feature, room, tail + 6, np.int64(n), at, byte_at)
        _store_row(feature, row, True, at, byte_at, list_at)
        return stop
    if kind == FLOAT:
        if n != np.uint64(4):
            return np.int64(FAILED)
        store_u32(feature.values + 4 * row, load_u32(tail + 6))
    else:
        word = load_u64(tail + 6)
        ends = ~word & np.uint64(CONTINUATION)
        bits = n << np.uint64(3)
        if ends == np.uint64(0) or trailing_zeros(ends) + np.uint64(1) != bits:
            return np.int64(FAILED)
        value = gather_groups(word & (~np.uint64(0) >> (np.uint64(64) - bits)))
        store_u64(feature.values + 8 * row, value)
    store_u8(feature.valid + row, np.uint8(1))
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
def read_simple_entry(expected, p, end):
    """Reads an entry under the expected key, in the form that writers produce.

    Each message fills the one around it: then nothing else is in there. Returns the kind of list,
    start and end of its content, and the end of the entry; `FAILED` where it is anything else.
    """
    failed = np.int64(FAILED)
    if load_u8(p) != np.uint8(ENTRY_TAG):
        return failed, failed, failed, failed
    start, stop = _read_short_length(p + 1, end)
    if start < 0 or start >= stop or load_u8(start) != np.uint8(KEY_TAG):
        return failed, failed, failed, failed
    key, after = _read_short_length(start + 1, stop)
    length = expected.key_bytes
    if key < 0 or after - key != length or not same_bytes(expected.head + 4, key, length):
        return failed, failed, failed, failed
    if after >= stop or load_u8(after) != np.uint8(VALUE_TAG):
        return failed, failed, failed, failed
    member, last = _read_short_length(after + 1, stop)
    if last != stop or member >= stop:
        return failed, failed, failed, failed
    tag = np.int64(load_u8(member))
    low, high = _read_short_length(member + 1, stop)
    if high != stop or (tag != 0x0A and tag != 0x12 and tag != 0x1A):
        return failed, failed, failed, failed
    return tag >> 3, low, high, stop


@inlined
def _read_simple(feature, p, end, limit, row):
    """Takes over a list or byte string in simple form; returns the address past it or `FAILED`."""
    kind, failed = feature.kind, np.int64(FAILED)
    is_list = feature.depth != 0
    if feature.depth > 1 or (not is_list and kind != BYTES):
        return failed
    found, low, high, stop = read_simple_entry(feature, p, end)
    if found != kind:
        return failed
    first, byte_at, list_at, room = _begin_row(feature, row)
    at, packed, last = first, failed, failed
    if kind != BYTES and low < high and load_u8(low) == np.uint8(VALUES_TAG):
        packed, last = _read_short_length(low + 1, high)
    if packed >= 0 and last == high:
        at = _take_numbers(feature, room, kind, packed, last, limit, at)
    else:
        at, byte_at = take_list(feature, room, kind, low, high, limit, at, byte_at)
    if at < 0 or (not is_list and at > first + 1):
        return failed
    _store_row(feature, row, is_list or at > first, at, byte_at, list_at)
    return stop


@outlined
def _read_entry(feature, p, end, limit, row):
    """Takes over an entry of any form; returns an outcome."""
    kind, depth = feature.kind, feature.depth
    first, byte_at, list_at, room = _begin_row(feature, row)
    kinds, at, byte_at, list_at = take_value(feature, room, p, end, limit, first, byte_at, list_at)
    if kinds < 0:
        return MALFORMED
    outcome = OK
    if (kinds & ~((np.int64(1) << kind) | np.int64(1 << ABSENT))) != 0:
        outcome = OTHER_KIND
    elif depth == 0 and at > first + 1:
        outcome = NOT_SCALAR
    if outcome != OK:  # unless a later entry of the same key replaces this one
        store_u8(feature.valid + row, np.uint8(outcome))
        return outcome
    is_present = depth > 1 or (kinds >> kind != 0 and (depth > 0 or at > first))
    _store_row(feature, row, is_present, at, byte_at, list_at)
    return OK


@inlined
def _scan_entries(features, table, successors, is_nested, p, end, limit, row):
    """Goes through the entries of one map; returns an outcome and a feature."""
    previous, refused = len(features) + np.int64(is_nested), False
    while p < end:
        expected = successors[previous]
        stop = _read_compact(features[expected], p, end, limit, row)
        if stop < 0:
            stop = _read_simple(features[expected], p, end, limit, row)
        if stop > 0:
            previous, p = expected, stop
            continue
        tag, start, stop = read_field(p, end)
        if stop < 0:
            return MALFORMED, np.int64(-1)
        if tag == ENTRY_TAG:
            key, length = read_key(start, stop)
            if key < 0:
                return MALFORMED, np.int64(-1)
            f = find_key(features, table, expected, key, length)
            if f >= 0 and (features[f].depth > 1) == is_nested:
                successors[previous] = f
                previous = f
                outcome = _read_entry(features[f], start, stop, limit, row)
                if outcome == MALFORMED:
                    return MALFORMED, f
                refused |= outcome != OK
        p = stop
    return REFUSED if refused else OK, np.int64(-1)


@inlined
def _find_refused(features, row):
    """Outcome and number of the first feature whose last entry was refused; (OK, -1) if none."""
    for f in range(len(features)):
        outcome = load_u8(features[f].valid + row)
        if outcome > np.uint8(1):
            return np.int64(outcome), np.int64(f)
    return np.int64(OK), np.int64(-1)


@inlined
def _scan_record(features, table, successors, p, end, limit, row):
    """Decodes the maps of a record; returns outcome and feature (-1 for none)."""
    refused = False
    while p < end:
        tag, start, stop = read_field(p, end)
        if stop < 0:
            return np.int64(MALFORMED), np.int64(-1)
        is_nested = tag == FEATURE_LISTS_TAG
        is_map = is_nested or tag == FEATURES_TAG
        if is_map and successors[len(features) + np.int64(is_nested)] >= 0:
            outcome, f = _scan_entries(
                features, table, successors, is_nested, start, stop, limit, row
            )
            if outcome == MALFORMED:
                return np.int64(MALFORMED), f
            refused |= outcome == REFUSED
        p = stop
    if refused:
        return _find_refused(features, row)
    return np.int64(OK), np.int64(-1)


_RECORDS_AHEAD = 4  # how far ahead memory is asked for
SOUND = -2


@kernel
def decode(base, index, limit, features, table, successors, malformed):
    """Decodes records into the outputs of a feature table, as far as these have room.

    Args:
        base: Address of the buffer.
        index: Start and length of each record, int64 `[rows, 2]`, within the buffer.
        limit: Address past the buffer.
        features: Feature table, `FEATURE` `[features]`, of one row at least: an Example's
            features, or those of a SequenceExample's context and its feature lists.
            What the rows hold is counted in it.
        table: Hash table of their keys.
        successors: Which feature was last seen to follow which, int64 `[features + 2]`; the last
            two are the first of the context and of the feature lists, -1 where there is none.
            Kept between calls, it makes the order of a file's features known.
        malformed: int64 `[rows]`, all `SOUND`: gets the feature (-1 for none) at which a record is
            malformed, whose row is of no use; without rows, to stop at the first.

    Returns:
        Outcome, record and feature at which the pass ended; (OK, -1, -1) for all records.
    """
    for row in range(len(index)):
        if row + _RECORDS_AHEAD < len(index):
            ahead, size = base + index[row + _RECORDS_AHEAD, 0], index[row + _RECORDS_AHEAD, 1]
            prefetch(ahead)
            # Long lists cross pages, where the CPU sees no pattern; short records are met in time.
            for line in range(LINE_BYTES, min(size & -1024, 4096), LINE_BYTES):
                prefetch(ahead + line)
        p = base + index[row, 0]
        end = p + index[row, 1]
        outcome, f = _scan_record(features, table, successors, p, end, limit, row)
        if outcome == MALFORMED and len(malformed) > 0:
            malformed[row] = f
        elif outcome != OK:
            return outcome, np.int64(row), f
    for f in range(len(features)):
        _end_rows(features[f], np.int64(len(index)))
    return np.int64(OK), np.int64(-1), np.int64(-1)


@kernel
def gather(base, index, target):
    """Copies whole records, int64 `[rows, 2]` start and length from `base`, one after another."""
    for row in range(len(index)):
        copy_bytes(target, base + index[row, 0], index[row, 1])
        target += index[row, 1]

"""Compiled decoder of framed `tf.train.Example` records; trusts no byte of its input.

Every read is checked against the end of the message that holds it. Cells in the form that all
common writers produce take a fast path of a few word loads; anything else that protobuf accepts
(fields in any order, unpacked numbers, repeated keys, unknown fields, lists in several pieces) is
walked field by field, with protobuf's rules: the last entry of a key wins, the last member of a
oneof wins, repeated occurrences of one member are concatenated.
"""

# mypy: disable-error-code="no-untyped-def"

import numpy as np

from etl.tfrecord.kernels import (
    inlined,
    kernel,
    load_i64,
    load_u8,
    load_u32,
    load_u64,
    same_bytes,
    store_u8,
    store_u32,
    store_u64,
    trailing_zeros,
)
from etl.tfrecord.varint import CONTINUATION, FAILED, gather_groups
from etl.tfrecord.walk_kernels import (
    ABSENT,
    BYTES,
    FLOAT,
    INT,
    fill_entry,
    measure_entry,
    read_field,
)

# Outcomes.
OK, MALFORMED, OTHER_KIND, NOT_SCALAR, UNKNOWN_KEY, REFUSED = 0, 1, 2, 3, 4, 5

# Fields of a row of the feature table.
(
    KIND,
    IS_LIST,
    HEAD,  # address of `0A 00 0A <key length> key`, padded to whole words with zeros
    KEY_BYTES,
    VALUES,  # scalars: address of int64 or uint32 [rows]
    VALID,  # address of uint8 [rows], 1 where the feature is present, or why it is refused
    STARTS,  # lists and bytes: address of int64 [rows], where the entry begins
    ENDS,  # ... and ends
    COUNTS,  # ... and how many values it holds
    BYTE_COUNTS,  # bytes: address of int64 [rows], total length of its values
    SINCE,  # ... and address from which on the members of the oneof count
) = range(11)
FEATURE_FIELDS = 11

# 12 <n + 4> <kind tag> <n + 2> 0A <n>: what follows the key in a cell with n bytes of numbers.
_INT_TAIL = 0x0000_000A_021A_0412
_FLOAT_TAIL = 0x0000_000A_0212_0412
_TAIL_STEP = 0x0000_0100_0100_0100
_TAIL_MASK = 0x0000_FFFF_FFFF_FFFF
_FEATURES_TAG, _ENTRY_TAG, _KEY_TAG = 0x0A, 0x0A, 0x0A


@kernel
def fill(feature, rows, limit, values, offsets):
    """Copies the values of a list or bytes feature out of all rows that `scan` has measured.

    Args:
        feature: Row of the feature table, int64 `[FEATURE_FIELDS]`.
        rows: Number of records.
        limit: Address past the input buffer.
        values: Address of the output values.
        offsets: Address of int64 `[values + 1]`, the first one set; bytes only.

    Returns:
        The first malformed record, or -1.
    """
    at, byte_at = np.int64(0), np.int64(0)
    for row in range(rows):
        if load_u8(feature[VALID] + row) != np.uint8(0):
            at, byte_at = fill_entry(
                feature[KIND],
                load_i64(feature[STARTS] + 8 * row),
                load_i64(feature[ENDS] + 8 * row),
                load_i64(feature[SINCE] + 8 * row),
                limit, values, offsets, at, byte_at,
            )  # fmt: skip
            if at < 0:
                return row
    return -1


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
def _find_feature(features, table, expected, key, length):
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
def _read_key(p, end):
    """Start and length of an entry's key (empty if it has none), or `FAILED`."""
    key, length = np.int64(p), np.int64(0)
    while p < end:
        tag, start, stop = read_field(p, end)
        if stop < 0:
            return np.int64(FAILED), length
        if tag == _KEY_TAG:
            key, length = start, stop - start
        p = stop
    return key, length


@inlined
def _read_compact(feature, p, end, limit, row):
    """Reads a cell with the expected key and one number in canonical form.

    Returns:
        The address past the cell, or `FAILED` where it is anything else: nothing is stored then.
    """
    kind, head, head_bytes = feature[KIND], feature[HEAD], feature[KEY_BYTES] + 4
    if feature[IS_LIST] != 0 or kind == BYTES or p + head_bytes + 8 > limit:
        return np.int64(FAILED)
    word = load_u64(p)
    size = np.int64((word >> np.uint64(8)) & np.uint64(0xFF))
    stop = p + 2 + size
    rest = stop - p - head_bytes
    # All loads below end within 16 bytes of the cell's end.
    if size > 127 or rest < 7 or rest > 14 or stop > end or stop + 16 > limit:
        return np.int64(FAILED)
    word &= ~np.uint64(0xFF00)
    i = 0
    while i + 8 < head_bytes:
        if word != load_u64(head + i):
            return np.int64(FAILED)
        i += 8
        word = load_u64(p + i)
    beyond = np.uint64(8 * (8 - (head_bytes - i)))
    if (word << beyond) != (load_u64(head + i) << beyond):
        return np.int64(FAILED)
    tail, n = p + head_bytes, np.uint64(rest - 6)
    pattern = np.uint64(_INT_TAIL if kind == INT else _FLOAT_TAIL) + n * np.uint64(_TAIL_STEP)
    if (load_u64(tail) & np.uint64(_TAIL_MASK)) != pattern:
        return np.int64(FAILED)
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
def _store_entry(feature, p, end, limit, row):
    """Takes over an entry of any form: a scalar's value, or where a list's values lie."""
    kind, count, total, since = measure_entry(p, end)
    is_list = feature[IS_LIST] != 0
    outcome = OK
    if count < 0:
        return MALFORMED
    if kind != ABSENT and kind != feature[KIND]:
        outcome = OTHER_KIND
    elif not is_list and count > 1:
        outcome = NOT_SCALAR
    if outcome != OK:  # unless a later entry of the same key replaces this one
        store_u8(feature[VALID] + row, np.uint8(outcome))
        return outcome
    present = kind != ABSENT and (is_list or count > 0)
    store_u8(feature[VALID] + row, np.uint8(present))
    if is_list or feature[KIND] == BYTES:
        store_u64(feature[STARTS] + 8 * row, np.uint64(p))
        store_u64(feature[ENDS] + 8 * row, np.uint64(end))
        store_u64(feature[SINCE] + 8 * row, np.uint64(since))
        store_u64(feature[COUNTS] + 8 * row, np.uint64(count))
        if feature[KIND] == BYTES:
            store_u64(feature[BYTE_COUNTS] + 8 * row, np.uint64(total))
    elif present:
        width = 8 if feature[KIND] == INT else 4
        target = feature[VALUES] + width * row
        zero = np.int64(0)
        at, _ = fill_entry(feature[KIND], p, end, since, limit, target, 0, zero, zero)
        if at < 0:
            return MALFORMED
    return OK


@inlined
def _scan_features(features, table, successors, p, end, limit, row):
    """Goes through the entries of one Features message; returns an outcome and a feature."""
    previous, refused = len(features), False
    while p < end:
        expected = successors[previous]
        stop = _read_compact(features[expected], p, end, limit, row)
        if stop > 0:
            previous, p = expected, stop
            continue
        tag, start, stop = read_field(p, end)
        if stop < 0:
            return MALFORMED, -1
        if tag == _ENTRY_TAG:
            key, length = _read_key(start, stop)
            if key < 0:
                return MALFORMED, -1
            f = _find_feature(features, table, expected, key, length)
            if f >= 0:
                successors[previous] = f
                previous = f
                outcome = _store_entry(features[f], start, stop, limit, row)
                if outcome == MALFORMED:
                    return MALFORMED, f
                refused |= outcome != OK
        p = stop
    return REFUSED if refused else OK, -1


@inlined
def _find_refused(features, row):
    """Outcome and number of the first feature whose last entry was refused; (OK, -1) if none."""
    for f in range(len(features)):
        outcome = load_u8(features[f, VALID] + row)
        if outcome > np.uint8(1):
            return np.int64(outcome), f
    return np.int64(OK), -1


@kernel
def scan(base, index, limit, features, table, successors):
    """Decodes the numbers and measures the lists and byte strings of records.

    Args:
        base: Address of the buffer.
        index: Start and length of each record, int64 `[rows, 2]`, within the buffer.
        limit: Address past the buffer.
        features: Feature table, int64 `[features, FEATURE_FIELDS]`, at least one row.
        table: Hash table of their keys.
        successors: Which feature was last seen to follow which, int64 `[features + 1]`; kept
            between calls, it makes the order of a file's features known after its first record.

    Returns:
        Outcome, record and feature at which the scan ended; (OK, -1, -1) for all records.
    """
    for row in range(len(index)):
        p = base + index[row, 0]
        end = p + index[row, 1]
        refused = False
        while p < end:
            tag, start, stop = read_field(p, end)
            if stop < 0:
                return MALFORMED, row, -1
            if tag == _FEATURES_TAG:
                outcome, f = _scan_features(features, table, successors, start, stop, limit, row)
                if outcome == MALFORMED:
                    return MALFORMED, row, f
                refused |= outcome == REFUSED
            p = stop
        if refused:
            outcome, f = _find_refused(features, row)
            if outcome != OK:
                return outcome, row, f
    return OK, -1, -1


@kernel
def survey(base, index, first, features, table, kinds, lengths):
    """Notes what records hold: bit k of `kinds[f]` for kind k, and the longest list of each.

    Args:
        base: Address of the buffer.
        index: Start and length of each record, int64 `[rows, 2]`.
        first: Record to begin with.
        features: Keys known so far; the other fields are not used.
        table: Hash table of their keys.
        kinds: uint8 `[features]`, updated.
        lengths: int64 `[features]`, updated.

    Returns:
        Outcome, record, and start and length of a key that is not known (outcome UNKNOWN_KEY).
    """
    for row in range(first, len(index)):
        p = base + index[row, 0]
        end = p + index[row, 1]
        while p < end:
            tag, q, message_end = read_field(p, end)
            if message_end < 0:
                return MALFORMED, row, 0, 0
            while tag == _FEATURES_TAG and q < message_end:
                entry_tag, start, stop = read_field(q, message_end)
                if stop < 0:
                    return MALFORMED, row, 0, 0
                if entry_tag == _ENTRY_TAG:
                    key, length = _read_key(start, stop)
                    kind, count, _, _ = measure_entry(start, stop)
                    if key < 0 or count < 0:
                        return MALFORMED, row, 0, 0
                    f = _find_feature(features, table, 0, key, length)
                    if f < 0:
                        return UNKNOWN_KEY, row, key - base, length
                    kinds[f] |= np.uint8(1 << kind)
                    lengths[f] = max(lengths[f], count)
                q = stop
            p = message_end
    return OK, -1, 0, 0

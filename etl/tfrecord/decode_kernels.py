"""Compiled decoder of framed `tf.train.Example` records; trusts no byte of its input.

Every read is checked against the end of the message that holds it. Cells in the form that all
common writers produce take a fast path of a few word loads; anything else that protobuf accepts
(fields in any order, unpacked numbers, repeated keys, unknown fields, lists in several pieces) is
walked field by field, with protobuf's rules: the last entry of a key wins, the last member of a
oneof wins, repeated occurrences of one member are concatenated.
"""

# mypy: disable-error-code="no-untyped-def"

import numpy as np

from etl.tfrecord.decode_kernels_cells import LIST_ALONE, read_compact, read_simple
from etl.tfrecord.decode_kernels_keys import (
    BYTE_COUNTS,
    COUNTS,
    ENDS,
    ENTRY_TAG,
    IS_LIST,
    KIND,
    MALFORMED,
    NOT_SCALAR,
    OK,
    OTHER_KIND,
    REFUSED,
    SINCE,
    STARTS,
    VALID,
    VALUES,
    find_feature,
    read_key,
)
from etl.tfrecord.kernels import (
    copy_bytes,
    inlined,
    kernel,
    load_i64,
    load_u8,
    store_u8,
    store_u64,
)
from etl.tfrecord.walk_kernels import (
    ABSENT,
    BYTES,
    INT,
    fill_entry,
    fill_list,
    measure_entry,
    read_field,
)

FEATURES_TAG = 0x0A


@kernel
def gather(base, index, target):
    """Copies whole records, int64 `[rows, 2]` start and length from `base`, one after another."""
    for row in range(len(index)):
        copy_bytes(target, base + index[row, 0], index[row, 1])
        target += index[row, 1]


@kernel
def fill(feature, rows, limit, values, offsets, malformed):
    """Copies the values of a list or bytes feature out of all rows that `scan` has measured.

    Args:
        feature: Row of the feature table, int64 `[FEATURE_FIELDS]`.
        rows: Number of records.
        limit: Address past the input buffer.
        values: Address of the output values.
        offsets: Address of int64 `[values + 1]`, the first one set; bytes only.
        malformed: uint8 `[rows]` in which to mark malformed records, going on after each; empty
            to stop at the first.

    Returns:
        The malformed record that ended the pass, or -1.
    """
    at, byte_at = np.int64(0), np.int64(0)
    for row in range(rows):
        if load_u8(feature[VALID] + row) != np.uint8(0):
            start, end = load_i64(feature[STARTS] + 8 * row), load_i64(feature[ENDS] + 8 * row)
            since = load_i64(feature[SINCE] + 8 * row)
            if since == LIST_ALONE:
                next_at, next_byte = fill_list(
                    feature[KIND], start, end, limit, values, offsets, at, byte_at
                )
            else:
                next_at, next_byte = fill_entry(
                    feature[KIND], start, end, since, limit, values, offsets, at, byte_at
                )
            if next_at >= 0:
                at, byte_at = next_at, next_byte
            elif len(malformed) == 0:
                return row
            else:
                malformed[row] = np.uint8(1)
    return -1


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
        stop = read_compact(features[expected], p, end, limit, row)
        if stop < 0:
            stop = read_simple(features[expected], p, end, row)
        if stop > 0:
            previous, p = expected, stop
            continue
        tag, start, stop = read_field(p, end)
        if stop < 0:
            return MALFORMED, -1
        if tag == ENTRY_TAG:
            key, length = read_key(start, stop)
            if key < 0:
                return MALFORMED, -1
            f = find_feature(features, table, expected, key, length)
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
def find_refused(features, row):
    """Outcome and number of the first feature whose last entry was refused; (OK, -1) if none."""
    for f in range(len(features)):
        outcome = load_u8(features[f, VALID] + row)
        if outcome > np.uint8(1):
            return np.int64(outcome), f
    return np.int64(OK), -1


@inlined
def scan_record(features, table, successors, p, end, limit, row, features_tag):
    """Decodes the Features message that a record holds under a tag.

    Returns:
        Outcome, and the feature that it is about (-1 for none).
    """
    refused = False
    while p < end:
        tag, start, stop = read_field(p, end)
        if stop < 0:
            return MALFORMED, np.int64(-1)
        if tag == features_tag:
            outcome, f = _scan_features(features, table, successors, start, stop, limit, row)
            if outcome == MALFORMED:
                return MALFORMED, np.int64(f)
            refused |= outcome == REFUSED
        p = stop
    if refused:
        outcome, f = find_refused(features, row)
        return outcome, np.int64(f)
    return OK, np.int64(-1)


@kernel
def scan(base, index, limit, features, table, successors, outcomes):
    """Decodes the numbers and measures the lists and byte strings of records.

    Args:
        base: Address of the buffer.
        index: Start and length of each record, int64 `[rows, 2]`, within the buffer.
        limit: Address past the buffer.
        features: Feature table, int64 `[features, FEATURE_FIELDS]`, at least one row.
        table: Hash table of their keys.
        successors: Which feature was last seen to follow which, int64 `[features + 1]`; kept
            between calls, it makes the order of a file's features known after its first record.
        outcomes: int64 `[rows, 2]` for outcome and feature of each record, going on after a bad
            one; without rows, to stop at the first.

    Returns:
        Outcome, record and feature at which the scan ended; (OK, -1, -1) for all records.
    """
    for row in range(len(index)):
        p = base + index[row, 0]
        end = p + index[row, 1]
        outcome, f = scan_record(features, table, successors, p, end, limit, row, FEATURES_TAG)
        if len(outcomes) > 0:
            outcomes[row, 0], outcomes[row, 1] = outcome, f
        elif outcome != OK:
            return outcome, row, f
    return OK, -1, -1

"""Compiled decoder of `tf.train.SequenceExample`; trusts no byte of its input.

The context is decoded as an Example's features are; here are the feature lists, with the same
rules of protobuf: the last entry of a key wins, and a FeatureList that comes in several pieces
is their concatenation.
"""

# mypy: disable-error-code="no-untyped-def"

import numpy as np

from etl.tfrecord.decode_kernels import FEATURES_TAG, find_refused, scan_record
from etl.tfrecord.decode_kernels_keys import (
    BYTE_COUNTS,
    COUNTS,
    ENDS,
    ENTRY_TAG,
    KIND,
    MALFORMED,
    OK,
    OTHER_KIND,
    OUTER_COUNTS,
    REFUSED,
    STARTS,
    VALID,
    find_feature,
    read_key,
)
from etl.tfrecord.kernels import (
    inlined,
    kernel,
    load_i64,
    load_u8,
    outlined,
    store_i32,
    store_u8,
    store_u64,
)
from etl.tfrecord.walk_kernels import (
    ABSENT,
    VALUE_TAG,
    fill_members,
    measure_members,
    read_field,
)

FEATURE_LISTS_TAG, FEATURE_TAG = 0x12, 0x0A


@outlined
def measure_feature_list(p, end, wanted):
    """Walks the FeatureList of a map entry.

    Args:
        p: Address of the entry.
        end: Address past it.
        wanted: Kind that its features shall have, or `ABSENT` for any.

    Returns:
        Outcome, the kinds that occur (bit k for kind k), number of features, of their values,
        and bytes of these.
    """
    kinds, lists, values, size = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
    none, zero = np.int64(ABSENT), np.int64(0)
    while p < end:
        tag, inner, stop = read_field(p, end)
        if stop < 0:
            return np.int64(MALFORMED), kinds, lists, values, size
        while tag == VALUE_TAG and inner < stop:
            member, low, high = read_field(inner, stop)
            if high < 0:
                return np.int64(MALFORMED), kinds, lists, values, size
            if member == FEATURE_TAG:
                kind, count, total, _ = measure_members(low, high, none, zero, zero, low)
                if count < 0:
                    return np.int64(MALFORMED), kinds, lists, values, size
                kinds |= np.int64(1) << kind
                lists += 1
                values += count
                size += total
            inner = high
        p = stop
    allowed = (np.int64(1) << np.int64(wanted)) | np.int64(1 << ABSENT)
    if wanted != ABSENT and (kinds & ~allowed) != 0:
        return np.int64(OTHER_KIND), kinds, lists, values, size
    return np.int64(OK), kinds, lists, values, size


@inlined
def _store_list_entry(feature, p, end, row):
    outcome, _, lists, values, size = measure_feature_list(p, end, feature[KIND])
    if outcome == OTHER_KIND:  # unless a later entry of the same key replaces this one
        store_u8(feature[VALID] + row, np.uint8(OTHER_KIND))
    elif outcome == OK:
        store_u8(feature[VALID] + row, np.uint8(1))
        store_u64(feature[STARTS] + 8 * row, np.uint64(p))
        store_u64(feature[ENDS] + 8 * row, np.uint64(end))
        store_u64(feature[OUTER_COUNTS] + 8 * row, np.uint64(lists))
        store_u64(feature[COUNTS] + 8 * row, np.uint64(values))
        store_u64(feature[BYTE_COUNTS] + 8 * row, np.uint64(size))
    return outcome


@inlined
def _scan_entries(features, table, p, end, row):
    """Goes through the entries of one FeatureLists message; returns an outcome and a feature."""
    expected, refused = np.int64(0), False
    while p < end:
        tag, start, stop = read_field(p, end)
        if stop < 0:
            return MALFORMED, np.int64(-1)
        if tag == ENTRY_TAG:
            key, length = read_key(start, stop)
            if key < 0:
                return MALFORMED, np.int64(-1)
            f = find_feature(features, table, expected, key, length)
            if f >= 0:
                expected = f + 1 if f + 1 < len(features) else np.int64(0)
                outcome = _store_list_entry(features[f], start, stop, row)
                if outcome == MALFORMED:
                    return MALFORMED, f
                refused |= outcome != OK
        p = stop
    return REFUSED if refused else OK, np.int64(-1)


@inlined
def _scan_lists(features, table, p, end, row):
    refused = False
    while p < end:
        tag, start, stop = read_field(p, end)
        if stop < 0:
            return MALFORMED, np.int64(-1)
        if tag == FEATURE_LISTS_TAG:
            outcome, f = _scan_entries(features, table, start, stop, row)
            if outcome == MALFORMED:
                return MALFORMED, f
            refused |= outcome == REFUSED
        p = stop
    if refused:
        outcome, f = find_refused(features, row)
        return outcome, np.int64(f)
    return OK, np.int64(-1)


@kernel
def scan_sequences(
    base, index, limit, context, context_table, successors, lists, list_table, outcomes
):
    """Decodes the context and measures the feature lists of records.

    Args:
        base: Address of the buffer.
        index: Start and length of each record, int64 `[rows, 2]`, within the buffer.
        limit: Address past the buffer.
        context: Feature table of the context; may have no rows.
        context_table: Hash table of its keys.
        successors: As for `decode_kernels.scan`.
        lists: Feature table of the feature lists; may have no rows.
        list_table: Hash table of their keys.
        outcomes: As for `decode_kernels.scan`; feature lists are numbered after the context.

    Returns:
        Outcome, record and feature at which the scan ended; (OK, -1, -1) for all records.
    """
    for row in range(len(index)):
        p = base + index[row, 0]
        end = p + index[row, 1]
        outcome, f = OK, np.int64(-1)
        if len(context) > 0:
            outcome, f = scan_record(
                context, context_table, successors, p, end, limit, row, FEATURES_TAG
            )
        if outcome == OK and len(lists) > 0:
            outcome, f = _scan_lists(lists, list_table, p, end, row)
            if f >= 0:
                f += len(context)
        if len(outcomes) > 0:
            outcomes[row, 0], outcomes[row, 1] = outcome, f
        elif outcome != OK:
            return outcome, row, f
    return OK, -1, -1


@outlined
def _fill_feature_list(feature, row, limit, values, byte_offsets, offsets, at, byte_at, list_at):
    """Copies a row's values; the first result is `FAILED` for a malformed varint."""
    kind, none, zero = feature[KIND], np.int64(ABSENT), np.int64(0)
    p, end = load_i64(feature[STARTS] + 8 * row), load_i64(feature[ENDS] + 8 * row)
    while p < end:
        tag, inner, stop = read_field(p, end)
        while tag == VALUE_TAG and inner < stop:
            member, low, high = read_field(inner, stop)
            if member == FEATURE_TAG:
                _, start, last = read_field(low, high)
                if last != high:  # not one list alone: some of them may not count
                    _, _, _, start = measure_members(low, high, none, zero, zero, low)
                at, byte_at = fill_members(
                    kind, low, high, start, limit, values, byte_offsets, at, byte_at
                )
                if at < 0:
                    return at, byte_at, list_at
                list_at += 1
                store_i32(offsets + 4 * list_at, np.int32(at))
            inner = high
        p = stop
    return at, byte_at, list_at


@kernel
def fill_feature_lists(feature, rows, limit, values, byte_offsets, offsets, row_offsets, malformed):
    """Copies the values of one feature list out of all rows that `scan_sequences` has measured.

    Args:
        feature: Row of the feature table, int64 `[FEATURE_FIELDS]`.
        rows: Number of records.
        limit: Address past the input buffer.
        values: Address of the output values.
        byte_offsets: Address of int32 `[values + 1]`, the first one set; bytes only.
        offsets: Address of int32 `[features + 1]`, the first one set: where the values of each
            inner list begin.
        row_offsets: Address of int32 `[rows + 1]`, the first one set: where the inner lists of
            each row begin.
        malformed: As for `decode_kernels.fill`.

    Returns:
        The malformed record that ended the pass, or -1.
    """
    at, byte_at, list_at = np.int64(0), np.int64(0), np.int64(0)
    for row in range(rows):
        if load_u8(feature[VALID] + row) != np.uint8(0):
            after, byte_after, list_after = _fill_feature_list(
                feature, row, limit, values, byte_offsets, offsets, at, byte_at, list_at
            )
            if after >= 0:
                at, byte_at, list_at = after, byte_after, list_after
            elif len(malformed) == 0:
                return row
            else:
                malformed[row] = np.uint8(1)
        store_i32(row_offsets + 4 * (row + 1), np.int32(list_at))
    return -1

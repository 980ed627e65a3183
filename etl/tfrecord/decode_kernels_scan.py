"""Compiled first half of decoding: one pass over the entries of a record.

Every read is checked against the end of the message that holds it. Cells in the form that all
common writers produce take a fast path of a few word loads; anything else that protobuf accepts
(fields in any order, unpacked numbers, repeated keys, unknown fields, lists in several pieces) is
walked field by field, with protobuf's rules: the last entry of a key wins, the last member of a
oneof wins, repeated occurrences of one member are concatenated, and so are the pieces of a
FeatureList.
"""

# mypy: disable-error-code="no-untyped-def"

import numpy as np

from etl.tfrecord.decode_kernels_cells import read_compact, read_simple, store_place
from etl.tfrecord.decode_kernels_keys import (
    DEPTH,
    ENTRY_TAG,
    KIND,
    LIST_COUNT,
    MALFORMED,
    NOT_SCALAR,
    OK,
    OTHER_KIND,
    PLACE_BYTES,
    PLACES,
    REFUSED,
    VALID,
    VALUES,
    find_feature,
    read_key,
)
from etl.tfrecord.kernels import inlined, load_u8, outlined, prefetch, store_u8, store_u64
from etl.tfrecord.walk_kernels import (
    ABSENT,
    BYTES,
    FEATURE_TAG,
    INT,
    VALUE_TAG,
    fill_entry,
    measure_entry,
    measure_members,
    read_field,
)

_RECORDS_AHEAD = 4  # how far ahead memory is asked for


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
def _store_feature_list(feature, p, end, row):
    """As `_store_entry`, for a feature list."""
    outcome, _, lists, values, size = measure_feature_list(p, end, feature[KIND])
    if outcome == OTHER_KIND:  # unless a later entry of the same key replaces this one
        store_u8(feature[VALID] + row, np.uint8(OTHER_KIND))
    elif outcome == OK:
        store_u8(feature[VALID] + row, np.uint8(1))
        store_place(feature, row, p, end, p, values, size)
        store_u64(feature[PLACES] + PLACE_BYTES * row + LIST_COUNT, np.uint64(lists))
    return outcome


@outlined
def _store_entry(feature, p, end, limit, row):
    """Takes over an entry of any form: a scalar's value, or where a list's values lie."""
    if feature[DEPTH] > 1:
        return _store_feature_list(feature, p, end, row)
    kind, count, total, since = measure_entry(p, end)
    is_list = feature[DEPTH] != 0
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
        store_place(feature, row, p, end, since, count, total)
    elif present:
        width = 8 if feature[KIND] == INT else 4
        target = feature[VALUES] + width * row
        zero = np.int64(0)
        at, _ = fill_entry(feature[KIND], p, end, since, limit, target, 0, zero, zero)
        if at < 0:
            return MALFORMED
    return OK


@inlined
def _scan_entries(features, table, successors, p, end, limit, row):
    """Goes through the entries of one map; returns an outcome and a feature."""
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
def _scan_record(features, table, successors, p, end, limit, row, map_tag):
    """Decodes the Features or FeatureLists message that a record holds under a tag.

    Returns:
        Outcome, and the feature that it is about (-1 for none).
    """
    refused = False
    while p < end:
        tag, start, stop = read_field(p, end)
        if stop < 0:
            return MALFORMED, np.int64(-1)
        if tag == map_tag:
            outcome, f = _scan_entries(features, table, successors, start, stop, limit, row)
            if outcome == MALFORMED:
                return MALFORMED, np.int64(f)
            refused |= outcome == REFUSED
        p = stop
    if refused:
        outcome, f = find_refused(features, row)
        return outcome, np.int64(f)
    return OK, np.int64(-1)


@outlined
def scan_rows(
    features, table, successors, number, base, index, limit, map_tag, first, stop, outcomes
):
    """Decodes the numbers and measures the lists and byte strings of a run of records.

    Args:
        features: Feature table, int64 `[features, FEATURE_FIELDS]`; may have no rows.
        table: Hash table of their keys.
        successors: Which feature was last seen to follow which.
        number: Number of the first feature, for outcomes.
        base: Address of the buffer.
        index: Start and length of each record, int64 `[rows, 2]`, within the buffer.
        limit: Address past the buffer.
        map_tag: Tag of the message with the features in a record.
        first: First row.
        stop: Row to stop before.
        outcomes: As for `decode_kernels.decode`; rows that are known to be bad are passed over.

    Returns:
        Outcome, record and feature at which the scan ended; (OK, stop, -1) for all records.
    """
    if len(features) == 0:
        return np.int64(OK), np.int64(stop), np.int64(-1)
    for row in range(first, stop):
        if row + _RECORDS_AHEAD < len(index):
            prefetch(base + index[row + _RECORDS_AHEAD, 0])
        if len(outcomes) > 0 and outcomes[row, 0] != OK:
            continue
        p = base + index[row, 0]
        end = p + index[row, 1]
        outcome, f = _scan_record(features, table, successors, p, end, limit, row, map_tag)
        if outcome != OK:
            f = f + number if f >= 0 else f
            if len(outcomes) == 0:
                return np.int64(outcome), np.int64(row), np.int64(f)
            outcomes[row, 0], outcomes[row, 1] = outcome, f
    return np.int64(OK), np.int64(stop), np.int64(-1)

"""Compiled second half of decoding: what the scan has found is copied into the columns."""

# mypy: disable-error-code="no-untyped-def"

import numpy as np

from etl.tfrecord.decode_kernels_cells import LIST_ALONE, VALUE_ALONE
from etl.tfrecord.decode_kernels_keys import (
    BYTE_COUNT,
    BYTE_OFFSETS,
    COUNT,
    COUNT_NEED,
    COUNT_ROOM,
    DEPTH,
    END,
    KIND,
    LIST_COUNT,
    LIST_NEED,
    LIST_OFFSETS,
    LIST_ROOM,
    LISTS,
    MALFORMED,
    OK,
    PLACE_BYTES,
    PLACES,
    ROW_OFFSETS,
    SINCE,
    SIZE,
    SIZE_NEED,
    SIZE_ROOM,
    START,
    VALID,
    VALUE_COUNT,
    VALUES,
)
from etl.tfrecord.kernels import (
    copy_bytes,
    inlined,
    load_i64,
    load_u8,
    outlined,
    prefetch,
    store_i32,
)
from etl.tfrecord.walk_kernels import (
    ABSENT,
    BYTES,
    FEATURE_TAG,
    VALUE_TAG,
    fill_entry,
    fill_list,
    fill_members,
    fill_numbers,
    measure_members,
    read_field,
)

_ROWS_AHEAD = 6  # how far ahead memory is asked for


@inlined
def is_noted(feature):
    """Whether the scan notes where a feature lies, in place of taking over its value."""
    return feature[DEPTH] != 0 or feature[KIND] == BYTES


@outlined
def has_room(features, first, stop):
    """Adds up what the rows [first, stop) hold; returns whether the outputs have room for it."""
    fits = True
    for f in range(len(features)):
        feature = features[f]
        if not is_noted(feature):
            continue
        count, size, lists = feature[COUNT], feature[SIZE], feature[LISTS]
        for row in range(first, stop):
            if load_u8(feature[VALID] + row) == np.uint8(1):
                place = feature[PLACES] + PLACE_BYTES * row
                if feature[DEPTH] > 0:
                    count += load_i64(place + VALUE_COUNT)
                if feature[KIND] == BYTES:
                    size += load_i64(place + BYTE_COUNT)
                if feature[DEPTH] > 1:
                    lists += load_i64(place + LIST_COUNT)
        features[f, COUNT_NEED], features[f, SIZE_NEED], features[f, LIST_NEED] = count, size, lists
        fits &= count <= feature[COUNT_ROOM]
        fits &= size <= feature[SIZE_ROOM] and lists <= feature[LIST_ROOM]
    return fits


@inlined
def _fill_strings(feature, first, stop, limit):
    """Copies byte strings that are no lists."""
    byte_at, values = feature[SIZE], feature[VALUES]
    for row in range(first, stop):
        if load_u8(feature[VALID] + row) != np.uint8(0):
            place = feature[PLACES] + PLACE_BYTES * row
            start = load_i64(place + START)
            if load_i64(place + SINCE) == VALUE_ALONE:
                size = load_i64(place + BYTE_COUNT)
                copy_bytes(values + byte_at, start, size)
                byte_at += size
            else:
                offsets = feature[ROW_OFFSETS] + 4 * row  # of the one value
                _, byte_at = _fill_row(feature, place, limit, offsets, np.int64(0), byte_at)
        store_i32(feature[ROW_OFFSETS] + 4 * (row + 1), np.int32(byte_at))
    return byte_at


@inlined
def _fill_row(feature, place, limit, offsets, at, byte_at):
    """Copies a list; returns the next positions, the first one `FAILED` if it is malformed."""
    kind, values = feature[KIND], feature[VALUES]
    start, end, since = load_i64(place + START), load_i64(place + END), load_i64(place + SINCE)
    if since == VALUE_ALONE:
        return fill_numbers(kind, start, end, limit, values, at), byte_at
    if since == LIST_ALONE:
        return fill_list(kind, start, end, limit, values, offsets, at, byte_at)
    return fill_entry(kind, start, end, since, limit, values, offsets, at, byte_at)


@outlined
def _fill_feature_list(feature, place, limit, at, byte_at, list_at):
    """Copies a row's feature list; the first result is `FAILED` for a malformed varint."""
    kind, none, zero = feature[KIND], np.int64(ABSENT), np.int64(0)
    values, byte_offsets = feature[VALUES], feature[BYTE_OFFSETS]
    p, end = load_i64(place + START), load_i64(place + END)
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
                store_i32(feature[LIST_OFFSETS] + 4 * list_at, np.int32(at))
            inner = high
        p = stop
    return at, byte_at, list_at


@inlined
def _fetch_ahead(feature, row, stop):
    """Asks for the first bytes of a row that is due soon: long lists lie too far apart for the
    CPU to see a pattern.
    """
    if row + _ROWS_AHEAD < stop:
        start = load_i64(feature[PLACES] + PLACE_BYTES * (row + _ROWS_AHEAD) + START)
        prefetch(start)
        prefetch(start + 64)
        prefetch(start + 128)


@inlined
def _fill_lists(features, f, number, first, stop, limit, outcomes):
    """Copies a column of lists; returns the malformed record that ended it, or -1."""
    feature = features[f]
    at, byte_at, list_at = feature[COUNT], feature[SIZE], feature[LISTS]
    is_nested = feature[DEPTH] > 1
    for row in range(first, stop):
        _fetch_ahead(feature, row, stop)
        if load_u8(feature[VALID] + row) != np.uint8(0):
            place = feature[PLACES] + PLACE_BYTES * row
            after, byte_after, list_after = at, byte_at, list_at
            if is_nested:
                after, byte_after, list_after = _fill_feature_list(
                    feature, place, limit, at, byte_at, list_at
                )
            else:
                after, byte_after = _fill_row(
                    feature, place, limit, feature[BYTE_OFFSETS], at, byte_at
                )
            if after >= 0:
                at, byte_at, list_at = after, byte_after, list_after
            elif len(outcomes) == 0:
                return row
            elif outcomes[row, 0] == OK:
                outcomes[row, 0], outcomes[row, 1] = MALFORMED, number
        end = list_at if is_nested else at
        store_i32(feature[ROW_OFFSETS] + 4 * (row + 1), np.int32(end))
    features[f, COUNT], features[f, SIZE], features[f, LISTS] = at, byte_at, list_at
    return -1


@outlined
def fill_rows(features, number, first, stop, limit, outcomes):
    """Copies the lists and byte strings of the rows [first, stop), for which there is room.

    Args:
        features: Feature table; what has been copied is counted in it.
        number: Number of the first feature, for outcomes.
        first: First row.
        stop: Row to stop before.
        limit: Address past the input buffer.
        outcomes: int64 `[rows, 2]` for outcome and feature of each malformed record, going on
            after it; without rows, to stop at the first.

    Returns:
        Record and feature at which the pass ended, or (-1, -1).
    """
    for f in range(len(features)):
        feature = features[f]
        if feature[DEPTH] != 0:
            bad = _fill_lists(features, f, number + f, first, stop, limit, outcomes)
            if bad >= 0:
                return bad, number + f
        elif feature[KIND] == BYTES:
            features[f, SIZE] = _fill_strings(feature, first, stop, limit)
    return -1, -1

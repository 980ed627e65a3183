"""Compiled decoder of `tf.train.Example` and `SequenceExample`; trusts no byte of its input.

Records go through in runs that stay in the cache: a run is scanned, which measures its lists
and byte strings and notes where they are, then what was found is copied into the columns.
"""

# mypy: disable-error-code="no-untyped-def"

import numpy as np

from etl.tfrecord.codec.kernels import (
    copy_bytes,
    inlined,
    kernel,
    load_i64,
    load_u8,
    outlined,
    prefetch,
    store_i32,
    store_u8,
    store_u64,
)
from etl.tfrecord.codec.message_kernels import (
    ABSENT,
    BYTE_COUNT,
    BYTE_OFFSETS,
    BYTES,
    COUNT,
    COUNT_NEED,
    COUNT_ROOM,
    DEPTH,
    END,
    ENTRY_TAG,
    FEATURE_TAG,
    INT,
    KIND,
    LIST_ALONE,
    LIST_COUNT,
    LIST_NEED,
    LIST_OFFSETS,
    LIST_ROOM,
    LISTS,
    MALFORMED,
    NOT_SCALAR,
    OK,
    OTHER_KIND,
    PLACE_BYTES,
    PLACES,
    REFUSED,
    ROW_OFFSETS,
    SINCE,
    SIZE,
    SIZE_NEED,
    SIZE_ROOM,
    START,
    VALID,
    VALUE_ALONE,
    VALUE_COUNT,
    VALUE_TAG,
    VALUES,
    fill_entry,
    fill_list,
    fill_members,
    fill_numbers,
    find_feature,
    measure_entry,
    measure_members,
    read_compact,
    read_field,
    read_key,
    read_simple,
    store_place,
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


NO_ROOM = 9  # an outcome of its own

FEATURES_TAG, FEATURE_LISTS_TAG = 0x0A, 0x12


@kernel
def gather(base, index, target):
    """Copies whole records, int64 `[rows, 2]` start and length from `base`, one after another."""
    for row in range(len(index)):
        copy_bytes(target, base + index[row, 0], index[row, 1])
        target += index[row, 1]


@inlined
def _leave_out(features, first, outcomes):
    """Takes back what has been stored of bad rows, which may not be whole."""
    for i in range(len(outcomes)):
        if outcomes[i, 0] != OK:
            for f in range(len(features)):
                store_u8(features[f, VALID] + first + i, np.uint8(0))


@inlined
def _advance(features, rows):
    """Lets the places be those of the next rows."""
    for f in range(len(features)):
        features[f, PLACES] -= PLACE_BYTES * rows


@kernel
def decode(base, index, limit, features, table, successors, lists, list_table, list_successors,
           first, run_rows, outcomes):  # fmt: skip
    """Decodes records into the outputs of two feature tables, as far as these have room.

    Args:
        base: Address of the buffer.
        index: Start and length of each record, int64 `[rows, 2]`, within the buffer.
        limit: Address past the buffer.
        features: Feature table of an Example's features or a SequenceExample's context, int64
            `[features, FEATURE_FIELDS]`; may have no rows. What has been copied is counted in it.
        table: Hash table of their keys.
        successors: Which feature was last seen to follow which, int64 `[features + 1]`; kept
            between calls, it makes the order of a file's features known after its first record.
        lists: Likewise of a SequenceExample's feature lists; may have no rows.
        list_table: As `table`.
        list_successors: As `successors`.
        first: Row to begin with, all before it having been decoded.
        run_rows: Rows per run, for which the feature tables hold places.
        outcomes: int64 `[rows, 2]`, zeroed, for outcome and feature of each bad record, going on
            after it; without rows, to stop at the first.

    Returns:
        Outcome, record and feature at which the pass ended; (OK, -1, -1) for all records. After
        `NO_ROOM` it goes on at that record, once there is room for what the tables say.
    """
    for low in range(first, len(index), run_rows):
        high = min(low + run_rows, len(index))
        outcome, row, f = scan_rows(
            features, table, successors, 0, base, index, limit, FEATURES_TAG, low, high, outcomes
        )
        # No further than to a bad record, so that the first one is reported.
        list_outcome, list_row, list_f = scan_rows(
            lists, list_table, list_successors, len(features), base, index, limit,
            FEATURE_LISTS_TAG, low, row, outcomes,
        )  # fmt: skip
        if list_outcome != OK:
            return list_outcome, list_row, list_f
        if outcome != OK:
            return outcome, row, f
        _leave_out(features, low, outcomes[low:high])
        _leave_out(lists, low, outcomes[low:high])
        fits = has_room(features, low, high)
        if not (has_room(lists, low, high) and fits):
            return NO_ROOM, low, -1
        row, f = fill_rows(features, 0, low, high, limit, outcomes)
        if row < 0:
            row, f = fill_rows(lists, len(features), low, high, limit, outcomes)
        if row >= 0:
            return MALFORMED, row, f
        _advance(features, high - low)
        _advance(lists, high - low)
    return OK, -1, -1

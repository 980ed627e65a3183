"""Compiled decoder of `tf.train.Example` and `SequenceExample`; trusts no byte of its input.

Records go through in runs that stay in the cache: a run is scanned, which measures its lists
and byte strings and notes where they are, then what was found is copied into the columns.
Entries in the form that all common writers produce are read in a few word loads.
"""

# mypy: disable-error-code="no-untyped-def"

import numpy as np

from etl.tfrecord.codec.kernels import (
    copy_bytes,
    inlined,
    kernel,
    load_i64,
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
from etl.tfrecord.codec.messages import (
    ABSENT,
    BYTES,
    BYTES_TAIL,
    ENTRY_TAG,
    FEATURE_LISTS_TAG,
    FEATURES_TAG,
    FLOAT,
    FLOAT_TAIL,
    HEAD,
    INT,
    INT_TAIL,
    KEY_BYTES,
    KEY_TAG,
    TAIL_STEP,
    VALUE_TAG,
    VALUES_TAG,
    count_numbers,
    fill_list,
    fill_nested,
    fill_numbers,
    fill_value,
    find_key,
    measure_list,
    measure_value,
    read_field,
    read_key,
)
from etl.tfrecord.codec.varint import CONTINUATION, FAILED, gather_groups

# Outcomes.
OK, MALFORMED, OTHER_KIND, NOT_SCALAR, REFUSED, NO_ROOM = range(6)

# Fields of a row of the feature table, after those of its key.
(
    KIND,
    DEPTH,  # 0 for one value, 1 for a list, 2 for a feature list
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
) = range(2, 19)
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
# In place of an address to count from: what is stored is no entry, but a list message, or the
# packed numbers or the byte string themselves.
_LIST_ALONE, _VALUE_ALONE = 0, 1


@inlined
def _store_place(feature, row, start, end, since, count, total):
    """Notes where a list or byte string lies and what it holds."""
    place = feature[PLACES] + PLACE_BYTES * row
    store_u64(place + START, np.uint64(start))
    store_u64(place + END, np.uint64(end))
    store_u64(place + SINCE, np.uint64(since))
    store_u64(place + VALUE_COUNT, np.uint64(count))
    store_u64(place + BYTE_COUNT, np.uint64(total))


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
    form = INT_TAIL if kind == INT else FLOAT_TAIL if kind == FLOAT else BYTES_TAIL
    pattern = np.uint64(form) + n * np.uint64(TAIL_STEP)
    if (load_u64(tail) & np.uint64(_TAIL_MASK)) != pattern:
        return np.int64(FAILED)
    if kind == BYTES:
        place = feature[PLACES] + PLACE_BYTES * row
        store_u64(place + START, np.uint64(tail + 6))
        store_u64(place + SINCE, np.uint64(_VALUE_ALONE))
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
    count = count_numbers(feature[KIND], start, stop)
    if count < 0:
        return False
    store_u8(feature[VALID] + row, np.uint8(1))
    _store_place(feature, row, start, stop, _VALUE_ALONE, count, 0)
    return True


@inlined
def _read_simple(feature, p, end, row):
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
    if kind != BYTES and low < high and load_u8(low) == np.uint8(VALUES_TAG):
        packed, last = _read_short_length(low + 1, high)
        if last == high:
            return stop if _store_numbers(feature, row, packed, last) else failed
    count, total = measure_list(kind, low, high)
    if count < 0 or (not is_list and count > 1):
        return failed
    _store_place(feature, row, low, high, _LIST_ALONE, count, total)
    store_u8(feature[VALID] + row, np.uint8(is_list or count > 0))
    return stop


@outlined
def _store_entry(feature, p, end, limit, row):
    """Takes over an entry of any form: a scalar's value, or where a list's values lie."""
    kind, is_list, is_nested = feature[KIND], feature[DEPTH] != 0, feature[DEPTH] > 1
    kinds, lists, count, total, since = measure_value(p, end, is_nested)
    if kinds < 0:
        return MALFORMED
    outcome = OK
    if (kinds & ~((np.int64(1) << kind) | np.int64(1 << ABSENT))) != 0:
        outcome = OTHER_KIND
    elif not is_list and count > 1:
        outcome = NOT_SCALAR
    if outcome != OK:  # unless a later entry of the same key replaces this one
        store_u8(feature[VALID] + row, np.uint8(outcome))
        return outcome
    present = is_nested or (kinds >> kind != 0 and (is_list or count > 0))
    store_u8(feature[VALID] + row, np.uint8(present))
    if is_list or kind == BYTES:
        _store_place(feature, row, p, end, since, count, total)
        store_u64(feature[PLACES] + PLACE_BYTES * row + LIST_COUNT, np.uint64(lists))
    elif present:
        target, zero = feature[VALUES] + (8 if kind == INT else 4) * row, np.int64(0)
        at, _ = fill_value(kind, p, end, since, limit, target, 0, zero, zero)
        if at < 0:
            return MALFORMED
    return OK


@inlined
def _scan_entries(features, table, successors, is_nested, p, end, limit, row):
    """Goes through the entries of one map; returns an outcome and a feature."""
    previous, refused = len(features) + np.int64(is_nested), False
    while p < end:
        expected = successors[previous]
        stop = _read_compact(features[expected], p, end, limit, row)
        if stop < 0:
            stop = _read_simple(features[expected], p, end, row)
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
            if f >= 0 and (features[f, DEPTH] > 1) == is_nested:
                successors[previous] = f
                previous = f
                outcome = _store_entry(features[f], start, stop, limit, row)
                if outcome == MALFORMED:
                    return MALFORMED, f
                refused |= outcome != OK
        p = stop
    return REFUSED if refused else OK, np.int64(-1)


@inlined
def _find_refused(features, row):
    """Outcome and number of the first feature whose last entry was refused; (OK, -1) if none."""
    for f in range(len(features)):
        outcome = load_u8(features[f, VALID] + row)
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


@outlined
def _scan_rows(features, table, successors, base, index, limit, first, stop, outcomes):
    """Decodes the numbers and measures the lists and byte strings of the rows [first, stop).

    Returns:
        Outcome, record and feature at which the scan ended; (OK, stop, -1) for all records.
    """
    for row in range(first, stop):
        if row + _RECORDS_AHEAD < len(index):
            prefetch(base + index[row + _RECORDS_AHEAD, 0])
        p = base + index[row, 0]
        end = p + index[row, 1]
        outcome, f = _scan_record(features, table, successors, p, end, limit, row)
        if outcome != OK:
            if len(outcomes) == 0:
                return outcome, np.int64(row), f
            outcomes[row, 0], outcomes[row, 1] = outcome, f
    return np.int64(OK), np.int64(stop), np.int64(-1)


@inlined
def _leave_out(features, first, outcomes):
    """Takes back what has been stored of bad rows, which may not be whole."""
    for i in range(len(outcomes)):
        if outcomes[i, 0] != OK:
            for f in range(len(features)):
                store_u8(features[f, VALID] + first + i, np.uint8(0))


@outlined
def _has_room(features, first, stop):
    """Adds up what the rows [first, stop) hold; returns whether the outputs have room for it."""
    fits = True
    for f in range(len(features)):
        feature = features[f]
        if feature[DEPTH] == 0 and feature[KIND] != BYTES:
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
def _fill_row(feature, place, limit, offsets, at, byte_at):
    """Copies a list; returns the next positions, the first one `FAILED` if it is malformed."""
    kind, values = feature[KIND], feature[VALUES]
    start, end, since = load_i64(place + START), load_i64(place + END), load_i64(place + SINCE)
    if since == _VALUE_ALONE:
        return fill_numbers(kind, start, end, limit, values, at), byte_at
    if since == _LIST_ALONE:
        return fill_list(kind, start, end, limit, values, offsets, at, byte_at)
    return fill_value(kind, start, end, since, limit, values, offsets, at, byte_at)


@inlined
def _fill_strings(feature, first, stop, limit):
    """Copies byte strings that are no lists; returns where the next one goes."""
    byte_at, values = feature[SIZE], feature[VALUES]
    for row in range(first, stop):
        if load_u8(feature[VALID] + row) != np.uint8(0):
            place = feature[PLACES] + PLACE_BYTES * row
            if load_i64(place + SINCE) == _VALUE_ALONE:
                size = load_i64(place + BYTE_COUNT)
                copy_bytes(values + byte_at, load_i64(place + START), size)
                byte_at += size
            else:
                offsets = feature[ROW_OFFSETS] + 4 * row  # of the one value
                _, byte_at = _fill_row(feature, place, limit, offsets, np.int64(0), byte_at)
        store_i32(feature[ROW_OFFSETS] + 4 * (row + 1), np.int32(byte_at))
    return byte_at


_ROWS_AHEAD = 6  # how far ahead memory is asked for


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
def _fill_lists(features, f, first, stop, limit, outcomes):
    """Copies a column of lists; returns the malformed record that ended it, or -1."""
    feature = features[f]
    at, byte_at, list_at = feature[COUNT], feature[SIZE], feature[LISTS]
    kind, values, offsets = feature[KIND], feature[VALUES], feature[BYTE_OFFSETS]
    is_nested = feature[DEPTH] > 1
    for row in range(first, stop):
        _fetch_ahead(feature, row, stop)
        if load_u8(feature[VALID] + row) != np.uint8(0):
            place = feature[PLACES] + PLACE_BYTES * row
            after, byte_after, list_after = at, byte_at, list_at
            if is_nested:
                after, byte_after, list_after = fill_nested(
                    kind, load_i64(place + START), load_i64(place + END), limit, values, offsets,
                    feature[LIST_OFFSETS], at, byte_at, list_at,
                )  # fmt: skip
            else:
                after, byte_after = _fill_row(feature, place, limit, offsets, at, byte_at)
            if after >= 0:
                at, byte_at, list_at = after, byte_after, list_after
            elif len(outcomes) == 0:
                return row
            elif outcomes[row, 0] == OK:
                outcomes[row, 0], outcomes[row, 1] = MALFORMED, f
        end = list_at if is_nested else at
        store_i32(feature[ROW_OFFSETS] + 4 * (row + 1), np.int32(end))
    features[f, COUNT], features[f, SIZE], features[f, LISTS] = at, byte_at, list_at
    return -1


@outlined
def _fill_rows(features, first, stop, limit, outcomes):
    """Copies the lists and byte strings of the rows [first, stop), for which there is room.

    Returns:
        Record and feature at which the pass ended, or (-1, -1).
    """
    for f in range(len(features)):
        feature = features[f]
        if feature[DEPTH] != 0:
            bad = _fill_lists(features, f, first, stop, limit, outcomes)
            if bad >= 0:
                return bad, f
        elif feature[KIND] == BYTES:
            features[f, SIZE] = _fill_strings(feature, first, stop, limit)
    return -1, -1


@kernel
def decode(base, index, limit, features, table, successors, first, run_rows, outcomes):
    """Decodes records into the outputs of a feature table, as far as these have room.

    Args:
        base: Address of the buffer.
        index: Start and length of each record, int64 `[rows, 2]`, within the buffer.
        limit: Address past the buffer.
        features: Feature table, int64 `[features, FEATURE_FIELDS]`, of one row at least: an
            Example's features, or those of a SequenceExample's context and its feature lists.
            What has been copied is counted in it.
        table: Hash table of their keys.
        successors: Which feature was last seen to follow which, int64 `[features + 2]`; the last
            two are the first of the context and of the feature lists, -1 where there is none.
            Kept between calls, it makes the order of a file's features known.
        first: Row to begin with, all before it having been decoded.
        run_rows: Rows per run, for which the feature table holds places.
        outcomes: int64 `[rows, 2]`, zeroed, for outcome and feature of each bad record, going on
            after it; without rows, to stop at the first.

    Returns:
        Outcome, record and feature at which the pass ended; (OK, -1, -1) for all records. After
        `NO_ROOM` it goes on at that record, once there is room for what the table says.
    """
    for low in range(first, len(index), run_rows):
        high = min(low + run_rows, len(index))
        outcome, row, f = _scan_rows(
            features, table, successors, base, index, limit, low, high, outcomes
        )
        if outcome != OK:
            return outcome, row, f
        _leave_out(features, low, outcomes[low:high])
        if not _has_room(features, low, high):
            return NO_ROOM, low, -1
        row, f = _fill_rows(features, low, high, limit, outcomes)
        if row >= 0:
            return MALFORMED, row, f
        for f in range(len(features)):
            features[f, PLACES] -= PLACE_BYTES * (high - low)  # those of the next rows
    return OK, -1, -1


@kernel
def gather(base, index, target):
    """Copies whole records, int64 `[rows, 2]` start and length from `base`, one after another."""
    for row in range(len(index)):
        copy_bytes(target, base + index[row, 0], index[row, 1])
        target += index[row, 1]

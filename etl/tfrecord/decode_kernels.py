"""Compiled decoder of `tf.train.Example` and `SequenceExample`; trusts no byte of its input.

Records go through in runs that stay in the cache: a run is scanned, which measures its lists and
byte strings, and these are copied while they are near.
"""

# mypy: disable-error-code="no-untyped-def"

import numpy as np

from etl.tfrecord.decode_kernels_fill import fill_rows, has_room
from etl.tfrecord.decode_kernels_keys import MALFORMED, OK, PLACE_BYTES, PLACES, VALID
from etl.tfrecord.decode_kernels_scan import scan_record
from etl.tfrecord.kernels import copy_bytes, inlined, kernel, prefetch, store_u8

NO_ROOM = 9  # an outcome of its own

FEATURES_TAG, FEATURE_LISTS_TAG = 0x0A, 0x12

_RECORDS_AHEAD = 4  # how far ahead memory is asked for


@kernel
def gather(base, index, target):
    """Copies whole records, int64 `[rows, 2]` start and length from `base`, one after another."""
    for row in range(len(index)):
        copy_bytes(target, base + index[row, 0], index[row, 1])
        target += index[row, 1]


@inlined
def _scan_row(base, index, limit, features, table, successors, lists, list_table,
              list_successors, row):  # fmt: skip
    """Outcome of a record and the feature that it is about, feature lists numbered last."""
    p = base + index[row, 0]
    end = p + index[row, 1]
    outcome, f = np.int64(OK), np.int64(-1)
    if len(features) > 0:
        outcome, f = scan_record(features, table, successors, p, end, limit, row, FEATURES_TAG)
    if outcome == OK and len(lists) > 0:
        outcome, f = scan_record(
            lists, list_table, list_successors, p, end, limit, row, FEATURE_LISTS_TAG
        )
        if f >= 0:
            f += len(features)
    return outcome, f


@inlined
def _set_absent(features, row):
    for f in range(len(features)):
        store_u8(features[f, VALID] + row, np.uint8(0))


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
        for row in range(low, high):
            if row + _RECORDS_AHEAD < len(index):
                prefetch(base + index[row + _RECORDS_AHEAD, 0])
            outcome, f = _scan_row(
                base, index, limit, features, table, successors, lists, list_table,
                list_successors, row,
            )  # fmt: skip
            if outcome != OK:
                if len(outcomes) == 0:
                    return outcome, row, f
                outcomes[row, 0], outcomes[row, 1] = outcome, f
                _set_absent(features, row)
                _set_absent(lists, row)
        fits = has_room(features, low, high)
        if not (has_room(lists, low, high) and fits):
            return NO_ROOM, low, -1
        row, f = fill_rows(features, 0, low, high, limit, outcomes)
        if row < 0:
            row, f = fill_rows(lists, len(features), low, high, limit, outcomes)
        if row >= 0:
            return MALFORMED, row, f
        for f in range(len(features)):
            features[f, PLACES] -= PLACE_BYTES * (high - low)
        for f in range(len(lists)):
            lists[f, PLACES] -= PLACE_BYTES * (high - low)
    return OK, -1, -1

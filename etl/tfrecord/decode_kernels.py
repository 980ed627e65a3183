"""Compiled decoder of `tf.train.Example` and `SequenceExample`; trusts no byte of its input.

Records go through in runs that stay in the cache: a run is scanned, which measures its lists and
byte strings, and these are copied while they are near.
"""

# mypy: disable-error-code="no-untyped-def"

import numpy as np

from etl.tfrecord.decode_kernels_fill import fill_rows, has_room
from etl.tfrecord.decode_kernels_keys import MALFORMED, OK, PLACE_BYTES, PLACES, VALID
from etl.tfrecord.decode_kernels_scan import scan_rows
from etl.tfrecord.kernels import copy_bytes, inlined, kernel, store_u8

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
        # No further than to a bad record, so that the first one is told.
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

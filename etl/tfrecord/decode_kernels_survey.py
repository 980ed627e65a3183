"""Compiled survey of what records hold, for inferring features."""

# mypy: disable-error-code="no-untyped-def"

import numpy as np

from etl.tfrecord.decode_kernels_keys import ENTRY_TAG, MALFORMED, OK, find_feature, read_key
from etl.tfrecord.decode_kernels_scan import measure_feature_list
from etl.tfrecord.kernels import inlined, kernel
from etl.tfrecord.walk_kernels import ABSENT, measure_entry, read_field

NO_ROOM = 9  # an outcome of its own

# Fields of a row about a key that is not known.
KEY, KEY_LENGTH, KINDS, LENGTH = range(4)
UNKNOWN_FIELDS = 4


@inlined
def _measure(start, stop, is_sequence):
    """Kinds (as bits; negative if malformed) and number of values of an entry."""
    if is_sequence:
        outcome, kinds, lists, _, _ = measure_feature_list(start, stop, ABSENT)
        return np.int64(-1) if outcome == MALFORMED else kinds, lists
    kind, count, _, _ = measure_entry(start, stop)
    return np.int64(-1) if count < 0 else np.int64(1) << kind, count


@inlined
def _survey_entries(base, p, end, is_sequence, features, table, kinds, lengths, unknown, found):
    """Goes through one Features or FeatureLists message; returns outcome and unknown keys."""
    expected = np.int64(0)
    while p < end:
        tag, start, stop = read_field(p, end)
        if stop < 0:
            return MALFORMED, found
        if tag == ENTRY_TAG:
            key, length = read_key(start, stop)
            present, count = _measure(start, stop, is_sequence)
            if key < 0 or present < 0:
                return MALFORMED, found
            f = find_feature(features, table, expected, key, length)
            if f >= 0:
                kinds[f] |= np.uint8(present)
                lengths[f] = max(lengths[f], count)
                expected = f + 1 if f + 1 < len(features) else np.int64(0)
            elif found == len(unknown):
                return NO_ROOM, found
            else:
                unknown[found, KEY], unknown[found, KEY_LENGTH] = key - base, length
                unknown[found, KINDS], unknown[found, LENGTH] = present, count
                found += 1
        p = stop
    return OK, found


@kernel
def survey(base, index, first, is_sequence, message_tag, features, table, kinds, lengths, unknown):
    """Notes what records hold: bit k of `kinds[f]` for kind k, and the longest list of each.

    Args:
        base: Address of the buffer.
        index: Start and length of each record, int64 `[rows, 2]`.
        first: Record to begin with.
        is_sequence: Whether map values are FeatureLists, else Features.
        message_tag: Tag of the message with the map in a record.
        features: Keys known so far; the other fields are not used.
        table: Hash table of their keys.
        kinds: uint8 `[features]`, updated.
        lengths: int64 `[features]`, updated.
        unknown: Output, int64 `[room, UNKNOWN_FIELDS]`: where entries with other keys lie, and
            what they hold; a key may occur in it several times.

    Returns:
        Outcome (`NO_ROOM` where the last record must be gone through again, after what `unknown`
        holds has been taken over), the record at which the survey ended, and rows of `unknown`.
    """
    found = np.int64(0)
    for row in range(first, len(index)):
        p = base + index[row, 0]
        end = p + index[row, 1]
        while p < end:
            tag, start, stop = read_field(p, end)
            if stop < 0:
                return MALFORMED, row, found
            if tag == message_tag:
                outcome, found = _survey_entries(
                    base, start, stop, is_sequence, features, table, kinds, lengths, unknown, found
                )
                if outcome != OK:
                    return outcome, row, found
            p = stop
    return OK, len(index), found

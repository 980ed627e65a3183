"""The table of wanted features, and how the decoder finds a key in it."""

# mypy: disable-error-code="no-untyped-def"

import numpy as np

from etl.tfrecord.kernels import inlined, kernel, load_u8, load_u64, same_bytes
from etl.tfrecord.varint import FAILED
from etl.tfrecord.walk_kernels import read_field

# Outcomes.
OK, MALFORMED, OTHER_KIND, NOT_SCALAR, REFUSED = 0, 1, 2, 3, 4

# Fields of a row of the feature table.
(
    KIND,
    DEPTH,  # 0 for one value, 1 for a list, 2 for a feature list
    HEAD,  # address of `0A 00 0A <key length> key`, padded to whole words with zeros
    KEY_BYTES,
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
) = range(19)
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

ENTRY_TAG, KEY_TAG = 0x0A, 0x0A


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
def find_feature(features, table, expected, key, length):
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
def read_key(p, end):
    """Start and length of an entry's key (empty if it has none), or `FAILED`."""
    key, length = np.int64(p), np.int64(0)
    while p < end:
        tag, start, stop = read_field(p, end)
        if stop < 0:
            return np.int64(FAILED), length
        if tag == KEY_TAG:
            key, length = start, stop - start
        p = stop
    return key, length

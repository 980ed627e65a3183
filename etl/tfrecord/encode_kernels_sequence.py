"""Compiled passes for `tf.train.SequenceExample`: `0A <context> 12 <feature lists>`.

The context is what an Example's features are. A feature list is a map entry
`0A <entry> 0A <key length> key 12 <FeatureList>` with a FeatureList of `0A <Feature>` per inner
list (tensorflow/core/example/example.proto, feature.proto). Both parts are always written, an
empty one as an empty message.
"""

# mypy: disable-error-code="no-untyped-def"

import numpy as np

from etl.tfrecord.encode_kernels_bytes import (
    FOOTER_BYTES,
    HEADER_BYTES,
    block_rows,
    frame,
    write_entries,
    write_entry_head,
    write_feature,
)
from etl.tfrecord.encode_kernels_sizes import (
    BYTE_OFFSETS,
    FRAME_BYTES,
    KEY_BYTES,
    KIND,
    OUTER_OFFSETS,
    OUTER_SIZES,
    ROW_OFFSETS,
    SIZES,
    VALIDITY,
    VALIDITY_BIT,
    VALUES,
    entry_bytes,
    feature_bytes,
    measure_entries,
    payload_bytes,
)
from etl.tfrecord.kernels import inlined, is_valid, kernel, load_i64, store_u8, store_u64
from etl.tfrecord.varint import store_exact_varint, varint_bytes

_CONTEXT_TAG, _FEATURE_LISTS_TAG, _FEATURE_TAG = 0x0A, 0x12, 0x0A


@inlined
def _measure_feature_list(column, row):
    """Size of a row's FeatureList; notes the payload of each of its features."""
    kind, size = column[KIND], 0
    first = load_i64(column[OUTER_OFFSETS] + 8 * row)
    last = load_i64(column[OUTER_OFFSETS] + 8 * (row + 1))
    for j in range(first, last):
        start = load_i64(column[ROW_OFFSETS] + 8 * j)
        end = load_i64(column[ROW_OFFSETS] + 8 * (j + 1))
        payload = payload_bytes(kind, column[VALUES], column[BYTE_OFFSETS], start, end)
        store_u64(column[SIZES] + 8 * j, np.uint64(payload))
        feature = feature_bytes(kind, payload)
        size += 1 + varint_bytes(feature) + feature
    return size


@inlined
def _section_bytes(body):
    return 1 + varint_bytes(body) + body


@kernel
def measure_sequences(context, lists, first, context_sizes, list_sizes):
    """Computes the bytes of each row's context and of its feature lists.

    Args:
        context: Column table of the context.
        lists: Column table of the feature lists.
        first: First row.
        context_sizes: Output, int64 `[rows]`: bytes of the context's map entries.
        list_sizes: Output, int64 `[rows]`: bytes of the feature lists' map entries.

    Returns:
        Bytes of all framed records, and of the largest record.
    """
    measure_entries(context, first, context_sizes)
    list_sizes[:] = 0
    for c in range(len(lists)):
        column = lists[c]
        for i in range(len(list_sizes)):
            row = first + i
            if is_valid(column[VALIDITY], column[VALIDITY_BIT] + row):
                size = _measure_feature_list(column, row)
                store_u64(column[OUTER_SIZES] + 8 * row, np.uint64(size))
                list_sizes[i] += _section_bytes(entry_bytes(column[KEY_BYTES], size))
    total, largest = 0, 0
    for i in range(len(list_sizes)):
        record = _section_bytes(context_sizes[i]) + _section_bytes(list_sizes[i])
        total += FRAME_BYTES + record
        largest = max(largest, record)
    return total, largest


@inlined
def _write_feature_list(column, row, p):
    """Writes a row's map entry; returns the address past it, or -1 if a value is refused."""
    kind = column[KIND]
    p = write_entry_head(column, p, load_i64(column[OUTER_SIZES] + 8 * row))
    first = load_i64(column[OUTER_OFFSETS] + 8 * row)
    last = load_i64(column[OUTER_OFFSETS] + 8 * (row + 1))
    for j in range(first, last):
        payload = load_i64(column[SIZES] + 8 * j)
        store_u8(p, np.uint8(_FEATURE_TAG))
        p = store_exact_varint(p + 1, feature_bytes(kind, payload))
        start = load_i64(column[ROW_OFFSETS] + 8 * j)
        end = load_i64(column[ROW_OFFSETS] + 8 * (j + 1))
        p = write_feature(kind, column, p, payload, start, end)
        if p < 0:
            return p
    return p


@inlined
def _write_lists(lists, row, cursors):
    """Writes the feature lists at the cursors; returns the bad column and row, or (-1, -1)."""
    for c in range(len(lists)):
        column = lists[c]
        for i in range(len(cursors)):
            if is_valid(column[VALIDITY], column[VALIDITY_BIT] + row + i):
                p = _write_feature_list(column, row + i, cursors[i])
                if p < 0:
                    return c, row + i
                cursors[i] = p
    return -1, -1


@inlined
def _frame_sequences(start, context_sizes, list_sizes):
    for i in range(len(context_sizes)):
        payload = start + HEADER_BYTES
        store_u8(payload, np.uint8(_CONTEXT_TAG))
        store_exact_varint(payload + 1, context_sizes[i])
        record = _section_bytes(context_sizes[i]) + _section_bytes(list_sizes[i])
        start = frame(start, record)
    return start


@kernel
def write_sequences(context, lists, first, context_sizes, list_sizes, cursors, start):
    """Writes framed SequenceExample records.

    Args:
        context: Column table of the context.
        lists: Column table of the feature lists.
        first: First row.
        context_sizes: As `measure_sequences` computed them.
        list_sizes: Likewise.
        cursors: Scratch, int64 `[rows]`.
        start: Address of the output, with `SLACK_BYTES` past the last record.

    Returns:
        Number of the table (0 context, 1 lists), column and row of the first value that float32
        cannot stand for, or (-1, -1, -1).
    """
    total = np.sum(context_sizes) + np.sum(list_sizes)
    rows = block_rows(total, len(cursors))
    for low in range(0, len(cursors), rows):
        high = min(low + rows, len(cursors))
        address = start
        for i in range(low, high):
            cursors[i] = address + HEADER_BYTES + 1 + varint_bytes(context_sizes[i])
            rest = context_sizes[i] + _section_bytes(list_sizes[i])
            address = cursors[i] + rest + FOOTER_BYTES
        column, row = write_entries(context, first + low, cursors[low:high])
        if column >= 0:
            return 0, column, row
        # What the context's last cells overshot is written over from here on.
        for i in range(low, high):
            store_u8(cursors[i], np.uint8(_FEATURE_LISTS_TAG))
            cursors[i] = store_exact_varint(cursors[i] + 1, list_sizes[i])
        column, row = _write_lists(lists, first + low, cursors[low:high])
        if column >= 0:
            return 1, column, row
        start = _frame_sequences(start, context_sizes[low:high], list_sizes[low:high])
    return -1, -1, -1

"""First compiled pass of the column-wise encoder: how many bytes every record takes.

Columns come as a table of addresses, so that one call serves a whole batch whatever its width.
"""

# mypy: disable-error-code="no-untyped-def"

import numpy as np

from etl.tfrecord.kernels import inlined, is_valid, kernel, load_i64, outlined, store_u64
from etl.tfrecord.packed import load_int, packed_bytes
from etl.tfrecord.varint import varint_bytes

# Kinds of values.
INT32, INT64, FLOAT32, FLOAT64, BINARY = 0, 1, 2, 3, 4

# Fields of a row of the column table.
(
    KIND,
    IS_LIST,
    VALUES,  # address of the first value
    VALIDITY,  # address of the validity bitmap of the rows, 0 where all are valid
    VALIDITY_BIT,  # bit of the bitmap that belongs to row 0
    ROW_OFFSETS,  # address of int64 [lists + 1], lists only
    BYTE_OFFSETS,  # address of int64 [values + 1], binary only
    HEAD,  # address of the cell's first bytes, with the lengths of a zero-byte payload
    KEY_BYTES,
    SIZES,  # address of int64 [lists] of payload sizes, or 0 where a cell knows its own
    OUTER_OFFSETS,  # address of int64 [rows + 1] into the lists, feature lists only
    OUTER_SIZES,  # address of int64 [rows] of FeatureList sizes, feature lists only
) = range(12)
COLUMN_FIELDS = 12

# Up to this key length every length in a cell that holds one number takes one byte.
COMPACT_KEY_BYTES = 100

FRAME_BYTES = 16  # header and footer of a TFRecord


@inlined
def list_bytes(kind, payload):
    """Size of the Int64List, FloatList or BytesList message around a payload."""
    if kind == BINARY or payload == 0:
        return payload
    return 1 + varint_bytes(payload) + payload


@inlined
def feature_bytes(kind, payload):
    """Size of the Feature message around a payload."""
    inner = list_bytes(kind, payload)
    return 1 + varint_bytes(inner) + inner


@inlined
def entry_bytes(key_bytes, value):
    """Size of a map entry with a message of `value` bytes."""
    return 1 + varint_bytes(key_bytes) + key_bytes + 1 + varint_bytes(value) + value


@inlined
def payload_bytes(kind, values, byte_offsets, first, last):
    """Bytes of the values [first, last) on the wire."""
    if FLOAT32 <= kind <= FLOAT64:
        return 4 * (last - first)
    size = 0
    if kind == BINARY:
        start = load_i64(byte_offsets + 8 * first)
        for i in range(first, last):
            end = load_i64(byte_offsets + 8 * (i + 1))
            size += 1 + varint_bytes(end - start) + end - start
            start = end
    else:
        size += packed_bytes(kind == INT64, values, first, last)
    return size


@inlined
def _measure_compact(column, first, sizes):
    """Adds the cells of a column of single numbers under a short key."""
    kind, values, bitmap = column[KIND], column[VALUES], column[VALIDITY]
    fixed = column[KEY_BYTES] + 10
    if bitmap == 0 and FLOAT32 <= kind <= FLOAT64:
        for i in range(len(sizes)):
            sizes[i] += fixed + 4
    elif bitmap == 0:
        for i in range(len(sizes)):
            sizes[i] += fixed + varint_bytes(load_int(kind == INT64, values, first + i))
    else:
        for i in range(len(sizes)):
            row = first + i
            if is_valid(bitmap, column[VALIDITY_BIT] + row):
                sizes[i] += fixed + payload_bytes(kind, values, 0, row, row + 1)


@inlined
def _measure_general(column, first, sizes):
    kind, payloads = column[KIND], column[SIZES]
    for i in range(len(sizes)):
        row = first + i
        if not is_valid(column[VALIDITY], column[VALIDITY_BIT] + row):
            continue
        start, end = row, row + 1
        if column[IS_LIST] != 0:
            start = load_i64(column[ROW_OFFSETS] + 8 * row)
            end = load_i64(column[ROW_OFFSETS] + 8 * (row + 1))
        payload = payload_bytes(kind, column[VALUES], column[BYTE_OFFSETS], start, end)
        store_u64(payloads + 8 * row, np.uint64(payload))
        entry = entry_bytes(column[KEY_BYTES], feature_bytes(kind, payload))
        sizes[i] += 1 + varint_bytes(entry) + entry


@outlined
def measure_entries(columns, first, sizes):
    """Computes the bytes of the map entries of single features; see `measure`."""
    sizes[:] = 0
    for c in range(len(columns)):
        column = columns[c]
        if column[SIZES] == 0:
            _measure_compact(column, first, sizes)
        else:
            _measure_general(column, first, sizes)


@kernel
def measure(columns, first, sizes):
    """Computes the bytes of all map entries of each row from `first` on, into int64 `sizes`.

    Returns:
        Bytes of all framed records, and of the largest record.
    """
    measure_entries(columns, first, sizes)
    total, largest = 0, 0
    for i in range(len(sizes)):
        record = 1 + varint_bytes(sizes[i]) + sizes[i]
        total += FRAME_BYTES + record
        largest = max(largest, record)
    return total, largest

"""Compiled passes of the column-wise encoder: sizes first, then the bytes.

A record is one `tf.train.Example`: `0A <features>`, and per present column a map entry
`0A <entry> 0A <key length> key 12 <feature> <kind tag> <list> payload` (tensorflow/core/example/
feature.proto; numeric payloads are packed: `0A <bytes> values`, and absent when empty).

Columns come as a table of addresses, so that one call serves a whole batch whatever its width.
Words are stored eight bytes at a time and may overshoot a cell's end by at most seven. What lies
there is always written later: the next column's cell, or the footer and header between records
(18 bytes), and the caller leaves `SLACK_BYTES` past the last record.
"""

# mypy: disable-error-code="no-untyped-def"

import numpy as np

from etl.tfrecord.crc32c import masked_crc
from etl.tfrecord.kernels import (
    copy_bytes,
    float_bits,
    inlined,
    is_valid,
    kernel,
    load_f32,
    load_f64,
    load_i32,
    load_i64,
    load_u64,
    store_u8,
    store_u32,
    store_u64,
)
from etl.tfrecord.varint import store_exact_varint, store_varint, varint_bytes

SLACK_BYTES = 16

# Kinds of values.
INT32, INT64, FLOAT32, FLOAT64, BINARY = 0, 1, 2, 3, 4

# Fields of a row of the column table.
(
    KIND,
    IS_LIST,
    VALUES,  # address of the first value
    VALIDITY,  # address of the validity bitmap of the rows, 0 where all are valid
    VALIDITY_BIT,  # bit of the bitmap that belongs to row 0
    ROW_OFFSETS,  # address of int64 [rows + 1], lists only
    BYTE_OFFSETS,  # address of int64 [values + 1], binary only
    HEAD,  # address of the cell's first bytes, with the lengths of a zero-byte payload
    KEY_BYTES,
    SIZES,  # address of int64 [rows] of payload sizes, or 0 where a cell knows its own
) = range(10)
COLUMN_FIELDS = 10

# Up to this key length every length in a cell that holds one number takes one byte.
COMPACT_KEY_BYTES = 100

# Records are laid out in blocks of about this size, so that all columns' visits hit the cache.
_BLOCK_BYTES = 24 << 10

_HEADER_BYTES, _FOOTER_BYTES = 12, 4  # of a TFRecord
_PACKED_TAG, _ENTRY_TAG, _KEY_TAG, _VALUE_TAG = 0x0A, 0x0A, 0x0A, 0x12


@inlined
def _list_bytes(kind, payload):
    """Size of the Int64List, FloatList or BytesList message around a payload."""
    if kind == BINARY or payload == 0:
        return payload
    return 1 + varint_bytes(payload) + payload


@inlined
def _feature_bytes(kind, payload):
    inner = _list_bytes(kind, payload)
    return 1 + varint_bytes(inner) + inner


@inlined
def _entry_bytes(key_bytes, feature):
    return 1 + varint_bytes(key_bytes) + key_bytes + 1 + varint_bytes(feature) + feature


@inlined
def _load_int(wide, values, i):
    if wide:
        return np.uint64(load_i64(values + 8 * i))
    return np.uint64(np.int64(load_i32(values + 4 * i)))


@inlined
def _payload_bytes(kind, values, byte_offsets, first, last):
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
    elif kind == INT64:
        for i in range(first, last):
            size += varint_bytes(load_i64(values + 8 * i))
    else:
        for i in range(first, last):
            size += varint_bytes(np.int64(load_i32(values + 4 * i)))
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
            sizes[i] += fixed + varint_bytes(_load_int(kind == INT64, values, first + i))
    else:
        for i in range(len(sizes)):
            row = first + i
            if is_valid(bitmap, column[VALIDITY_BIT] + row):
                sizes[i] += fixed + _payload_bytes(kind, values, 0, row, row + 1)


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
        payload = _payload_bytes(kind, column[VALUES], column[BYTE_OFFSETS], start, end)
        store_u64(payloads + 8 * row, np.uint64(payload))
        entry = _entry_bytes(column[KEY_BYTES], _feature_bytes(kind, payload))
        sizes[i] += 1 + varint_bytes(entry) + entry


@kernel
def measure(columns, first, sizes):
    """Computes the bytes of all map entries of each row from `first` on, into int64 `sizes`.

    Returns:
        Bytes of all framed records, and of the largest record.
    """
    sizes[:] = 0
    for c in range(len(columns)):
        column = columns[c]
        if column[SIZES] == 0:
            _measure_compact(column, first, sizes)
        else:
            _measure_general(column, first, sizes)
    total, largest = 0, 0
    for i in range(len(sizes)):
        record = 1 + varint_bytes(sizes[i]) + sizes[i]
        total += _HEADER_BYTES + record + _FOOTER_BYTES
        largest = max(largest, record)
    return total, largest


@inlined
def _store_head(head, size, address, grown):
    """Copies `0A <entry> 0A <key length> key`, adding `grown` to the entry's length."""
    store_u64(address, load_u64(head) + (np.uint64(grown) << np.uint64(8)))
    for i in range(8, size, 8):
        store_u64(address + i, load_u64(head + i))
    return address + size


@inlined
def _write_compact_ints(column, row, cursors):
    # 12 <n + 4> 1A <n + 2> 0A <n> in one word, n being the bytes of the value.
    tail = np.uint64(0x0000_000A_021A_0412)
    wide, values = column[KIND] == INT64, column[VALUES]
    head, head_bytes = column[HEAD], column[KEY_BYTES] + 4
    bitmap, bit = column[VALIDITY], column[VALIDITY_BIT]
    for i in range(len(cursors)):
        if is_valid(bitmap, bit + row + i):
            value = _load_int(wide, values, row + i)
            size = varint_bytes(value)
            address = _store_head(head, head_bytes, cursors[i], size)
            store_u64(address, tail + np.uint64(size) * np.uint64(0x0000_0100_0100_0100))
            cursors[i] = store_varint(address + 6, value)


@inlined
def _to_float32(value):
    """The float32 nearest to a float64, and whether a finite value left its range."""
    narrow = np.float32(value)
    return narrow, np.isinf(narrow) and not np.isinf(value)


@inlined
def _write_compact_floats(column, row, cursors):
    """Returns the first row out of range, or -1."""
    tail = np.uint64(0x0000_040A_0612_0812)
    wide, values = column[KIND] == FLOAT64, column[VALUES]
    head, head_bytes = column[HEAD], column[KEY_BYTES] + 4
    bitmap, bit = column[VALIDITY], column[VALIDITY_BIT]
    for i in range(len(cursors)):
        if is_valid(bitmap, bit + row + i):
            if wide:
                value, overflow = _to_float32(load_f64(values + 8 * (row + i)))
                if overflow:
                    return row + i
            else:
                value = load_f32(values + 4 * (row + i))
            address = _store_head(head, head_bytes, cursors[i], 4)
            store_u64(address, tail)
            store_u32(address + 6, float_bits(value))
            cursors[i] = address + 10
    return -1


@inlined
def _write_values(column, address, first, last):
    """Writes the values [first, last); returns the address past them, or -1 on overflow."""
    kind, values = column[KIND], column[VALUES]
    if kind == BINARY:
        offsets = column[BYTE_OFFSETS]
        for i in range(first, last):
            start = load_i64(offsets + 8 * i)
            length = load_i64(offsets + 8 * (i + 1)) - start
            store_u8(address, np.uint8(0x0A))
            address = store_exact_varint(address + 1, length)
            copy_bytes(address, values + start, length)
            address += length
    elif kind == FLOAT32:
        size = 4 * (last - first)
        copy_bytes(address, values + 4 * first, size)
        address += size
    elif kind == FLOAT64:
        for i in range(first, last):
            value, overflow = _to_float32(load_f64(values + 8 * i))
            if overflow:
                return -1
            store_u32(address, float_bits(value))
            address += 4
    else:
        for i in range(first, last):
            address = store_varint(address, _load_int(kind == INT64, values, i))
    return address


@inlined
def _write_general(column, row, cursors):
    """Returns the first row out of range, or -1."""
    kind, key_bytes = column[KIND], column[KEY_BYTES]
    kind_tag = np.uint8(0x0A if kind == BINARY else 0x12 if kind >= FLOAT32 else 0x1A)
    for i in range(len(cursors)):
        if not is_valid(column[VALIDITY], column[VALIDITY_BIT] + row + i):
            continue
        payload = load_i64(column[SIZES] + 8 * (row + i))
        inner, feature = _list_bytes(kind, payload), _feature_bytes(kind, payload)
        p = cursors[i]
        store_u8(p, np.uint8(_ENTRY_TAG))
        p = store_exact_varint(p + 1, _entry_bytes(key_bytes, feature))
        store_u8(p, np.uint8(_KEY_TAG))
        p = store_exact_varint(p + 1, key_bytes)
        copy_bytes(p, column[HEAD] + 4, key_bytes)
        p += key_bytes
        store_u8(p, np.uint8(_VALUE_TAG))
        p = store_exact_varint(p + 1, feature)
        store_u8(p, kind_tag)
        p = store_exact_varint(p + 1, inner)
        if kind != BINARY and payload > 0:
            store_u8(p, np.uint8(_PACKED_TAG))
            p = store_exact_varint(p + 1, payload)
        start, end = row + i, row + i + 1
        if column[IS_LIST] != 0:
            start = load_i64(column[ROW_OFFSETS] + 8 * (row + i))
            end = load_i64(column[ROW_OFFSETS] + 8 * (row + i + 1))
        p = _write_values(column, p, start, end)
        if p < 0:
            return row + i
        cursors[i] = p
    return -1


@inlined
def _frame(start, sizes):
    """Writes length, checksums and the outermost tag of the records whose entries stand."""
    for i in range(len(sizes)):
        body = sizes[i]
        record = 1 + varint_bytes(body) + body
        store_u64(start, np.uint64(record))
        store_u32(start + 8, masked_crc(start, 8))
        payload = start + _HEADER_BYTES
        store_u8(payload, np.uint8(0x0A))
        store_exact_varint(payload + 1, body)
        store_u32(payload + record, masked_crc(payload, record))
        start = payload + record + _FOOTER_BYTES
    return start


@inlined
def _write_block(columns, row, sizes, cursors, start):
    """Writes the records of one block; returns the bad column and row, or (-1, -1)."""
    address = start
    for i in range(len(sizes)):
        cursors[i] = address + _HEADER_BYTES + 1 + varint_bytes(sizes[i])
        address = cursors[i] + sizes[i] + _FOOTER_BYTES
    for c in range(len(columns)):
        column = columns[c]
        bad = -1
        if column[SIZES] != 0:
            bad = _write_general(column, row, cursors)
        elif column[KIND] <= INT64:
            _write_compact_ints(column, row, cursors)
        else:
            bad = _write_compact_floats(column, row, cursors)
        if bad >= 0:
            return c, bad
    return -1, -1


@kernel
def write(columns, first, sizes, cursors, start):
    """Writes framed Example records.

    Args:
        columns: Column table, int64 `[columns, COLUMN_FIELDS]`.
        first: First row.
        sizes: Bytes of each row's map entries, as `measure` computed them.
        cursors: Scratch, int64, as long as `sizes`.
        start: Address of the output, with `SLACK_BYTES` past the last record.

    Returns:
        Column and row of the first value outside the float32 range, or (-1, -1).
    """
    total = 0
    for i in range(len(sizes)):
        total += sizes[i]
    rows = max(8, min(1024, _BLOCK_BYTES * len(sizes) // max(1, total)))
    for low in range(0, len(sizes), rows):
        high = min(low + rows, len(sizes))
        block = sizes[low:high]
        bad = _write_block(columns, first + low, block, cursors[low:high], start)
        if bad[0] >= 0:
            return bad
        start = _frame(start, block)
    return -1, -1


@kernel
def write_raw(values, byte_offsets, start):
    """Writes binary values as framed payloads.

    Args:
        values: Address of the data buffer.
        byte_offsets: Offsets into it, int64 `[rows + 1]`.
        start: Address of the output.
    """
    for row in range(len(byte_offsets) - 1):
        length = byte_offsets[row + 1] - byte_offsets[row]
        payload = start + _HEADER_BYTES
        store_u64(start, np.uint64(length))
        store_u32(start + 8, masked_crc(start, 8))
        copy_bytes(payload, values + byte_offsets[row], length)
        store_u32(payload + length, masked_crc(payload, length))
        start = payload + length + _FOOTER_BYTES

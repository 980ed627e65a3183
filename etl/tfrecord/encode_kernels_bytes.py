"""Second compiled pass of the column-wise encoder: the bytes, sizes being known.

A record is one `tf.train.Example`: `0A <features>`, and per present column a map entry
`0A <entry> 0A <key length> key 12 <feature> <kind tag> <list> payload` (tensorflow/core/example/
feature.proto; numeric payloads are packed: `0A <bytes> values`, and absent when empty).

Words are stored eight bytes at a time and may overshoot a cell's end by at most seven. What lies
there is always written later: the next column's cell, or the footer and header between records
(18 bytes), and the caller leaves `SLACK_BYTES` past the last record.
"""

# mypy: disable-error-code="no-untyped-def"

import numpy as np

from etl.tfrecord.crc32c import masked_crc
from etl.tfrecord.encode_kernels_sizes import (
    BINARY,
    BYTE_OFFSETS,
    FLOAT32,
    FLOAT64,
    HEAD,
    INT64,
    IS_LIST,
    KEY_BYTES,
    KIND,
    ROW_OFFSETS,
    SIZES,
    VALIDITY,
    VALIDITY_BIT,
    VALUES,
    entry_bytes,
    feature_bytes,
    list_bytes,
)
from etl.tfrecord.kernels import (
    copy_bytes,
    float_bits,
    inlined,
    is_valid,
    kernel,
    load_f32,
    load_f64,
    load_i64,
    load_u64,
    outlined,
    store_u8,
    store_u32,
    store_u64,
)
from etl.tfrecord.packed import load_int, write_packed
from etl.tfrecord.varint import store_exact_varint, store_varint, varint_bytes

SLACK_BYTES = 16

# Records are laid out in blocks of about this size, so that all columns' visits hit the cache.
_BLOCK_BYTES = 24 << 10

HEADER_BYTES, FOOTER_BYTES = 12, 4  # of a TFRecord
_PACKED_TAG, _ENTRY_TAG, _KEY_TAG, _VALUE_TAG = 0x0A, 0x0A, 0x0A, 0x12


# 12 <n + 4> <kind tag> <n + 2> 0A <n> in one word, n being the bytes of the value.
_INT_TAIL, _FLOAT_TAIL = 0x0000_000A_021A_0412, 0x0000_000A_0212_0412
_BYTES_TAIL, _TAIL_STEP = 0x0000_000A_020A_0412, 0x0000_0100_0100_0100


@inlined
def _store_cell_head(head, head_bytes, p, tail, size):
    """Writes a cell up to a value of `size` bytes, all lengths taking a byte; returns the end."""
    store_u64(p, load_u64(head) + (np.uint64(size) << np.uint64(8)))
    for i in range(8, head_bytes, 8):
        store_u64(p + i, load_u64(head + i))
    store_u64(p + head_bytes, np.uint64(tail) + np.uint64(size) * np.uint64(_TAIL_STEP))
    return p + head_bytes + 6


@inlined
def _narrow(value):
    """The float32 nearest to a float64, and whether the step from one to the other is refused.

    Refused: a whole number that becomes another one (every float64 from 2**52 on is whole, so
    this covers what float32 cannot hold at all), and a value that becomes zero.
    """
    narrow = np.float32(value)
    changed = np.float64(narrow) != value
    # NaN is neither whole nor zero, and an infinity does not change.
    return narrow, changed and (np.floor(value) == value or narrow == np.float32(0))


@inlined
def _write_compact(column, row, cursors):
    """Writes single numbers under a short key; returns the first refused row, or -1."""
    kind, values = column[KIND], column[VALUES]
    is_int = kind <= INT64
    tail = np.uint64(_INT_TAIL if is_int else _FLOAT_TAIL)
    head, head_bytes = column[HEAD], column[KEY_BYTES] + 4
    bitmap, bit = column[VALIDITY], column[VALIDITY_BIT]
    for i in range(len(cursors)):
        if not is_valid(bitmap, bit + row + i):
            continue
        if is_int:
            integer = load_int(kind == INT64, values, row + i)
            size = varint_bytes(integer)
            p = _store_cell_head(head, head_bytes, cursors[i], tail, size)
            cursors[i] = store_varint(p, integer)
        else:
            if kind == FLOAT64:
                number, refused = _narrow(load_f64(values + 8 * (row + i)))
                if refused:
                    return row + i
            else:
                number = load_f32(values + 4 * (row + i))
            p = _store_cell_head(head, head_bytes, cursors[i], tail, 4)
            store_u32(p, float_bits(number))
            cursors[i] = p + 4
    return -1


@inlined
def _write_values(column, address, first, last):
    """Writes the values [first, last); returns the address past them, or -1 if one is refused."""
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
        any_refused = False
        for i in range(first, last):
            value, refused = _narrow(load_f64(values + 8 * i))
            any_refused |= refused
            store_u32(address + 4 * (i - first), float_bits(value))
        if any_refused:
            return -1
        address += 4 * (last - first)
    else:
        address = write_packed(kind == INT64, values, first, last, address)
    return address


@inlined
def write_feature(kind, column, p, payload, first, last):
    """Writes a Feature, its own tag and length left out; returns the end, or -1 if refused."""
    store_u8(p, np.uint8(0x0A if kind == BINARY else 0x12 if kind >= FLOAT32 else 0x1A))
    p = store_exact_varint(p + 1, list_bytes(kind, payload))
    if kind != BINARY and payload > 0:
        store_u8(p, np.uint8(_PACKED_TAG))
        p = store_exact_varint(p + 1, payload)
    return _write_values(column, p, first, last)


@inlined
def write_entry_head(column, p, value_size):
    """Writes a map entry up to its value's first byte; returns the address there."""
    key_bytes = column[KEY_BYTES]
    store_u8(p, np.uint8(_ENTRY_TAG))
    p = store_exact_varint(p + 1, entry_bytes(key_bytes, value_size))
    store_u8(p, np.uint8(_KEY_TAG))
    p = store_exact_varint(p + 1, key_bytes)
    copy_bytes(p, column[HEAD] + 4, key_bytes)
    p += key_bytes
    store_u8(p, np.uint8(_VALUE_TAG))
    return store_exact_varint(p + 1, value_size)


@inlined
def _write_short_string(column, row, p):
    """Writes the cell of a byte string whose lengths take a byte each; returns the end."""
    start = load_i64(column[BYTE_OFFSETS] + 8 * row)
    size = load_i64(column[BYTE_OFFSETS] + 8 * (row + 1)) - start
    p = _store_cell_head(column[HEAD], column[KEY_BYTES] + 4, p, _BYTES_TAIL, size)
    copy_bytes(p, column[VALUES] + start, size)
    return p + size


@inlined
def _write_general(column, row, cursors):
    """Returns the first row with a refused value, or -1."""
    kind = column[KIND]
    for i in range(len(cursors)):
        if not is_valid(column[VALIDITY], column[VALIDITY_BIT] + row + i):
            continue
        payload = load_i64(column[SIZES] + 8 * (row + i))
        if column[IS_LIST] == 0 and kind == BINARY and payload + column[KEY_BYTES] < 120:
            cursors[i] = _write_short_string(column, row + i, cursors[i])
            continue
        p = write_entry_head(column, cursors[i], feature_bytes(kind, payload))
        start, end = row + i, row + i + 1
        if column[IS_LIST] != 0:
            start = load_i64(column[ROW_OFFSETS] + 8 * (row + i))
            end = load_i64(column[ROW_OFFSETS] + 8 * (row + i + 1))
        p = write_feature(kind, column, p, payload, start, end)
        if p < 0:
            return row + i
        cursors[i] = p
    return -1


@outlined
def write_entries(columns, row, cursors):
    """Writes the map entries of single features at the cursors, and moves those past them.

    Returns:
        Column and row of the first refused value, or (-1, -1).
    """
    for c in range(len(columns)):
        column = columns[c]
        if column[SIZES] != 0:
            bad = _write_general(column, row, cursors)
        else:
            bad = _write_compact(column, row, cursors)
        if bad >= 0:
            return c, bad
    return -1, -1


@inlined
def frame(start, record):
    """Writes length and checksums around a record that stands; returns the end of the frame."""
    store_u64(start, np.uint64(record))
    store_u32(start + 8, masked_crc(start, 8))
    payload = start + HEADER_BYTES
    store_u32(payload + record, masked_crc(payload, record))
    return payload + record + FOOTER_BYTES


@inlined
def _frame_examples(start, sizes):
    """Writes the outermost tag and the frame of the records whose entries stand."""
    for i in range(len(sizes)):
        body = sizes[i]
        store_u8(start + HEADER_BYTES, np.uint8(0x0A))
        store_exact_varint(start + HEADER_BYTES + 1, body)
        start = frame(start, 1 + varint_bytes(body) + body)
    return start


@inlined
def block_rows(total, rows):
    """Rows per block, for `total` bytes in `rows` records."""
    return max(8, min(1024, _BLOCK_BYTES * rows // max(1, total)))


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
        Column and row of the first value that float32 cannot stand for, or (-1, -1).
    """
    total = 0
    for i in range(len(sizes)):
        total += sizes[i]
    rows = block_rows(total, len(sizes))
    for low in range(0, len(sizes), rows):
        high = min(low + rows, len(sizes))
        address = start
        for i in range(low, high):
            cursors[i] = address + HEADER_BYTES + 1 + varint_bytes(sizes[i])
            address = cursors[i] + sizes[i] + FOOTER_BYTES
        bad = write_entries(columns, first + low, cursors[low:high])
        if bad[0] >= 0:
            return bad
        start = _frame_examples(start, sizes[low:high])
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
        copy_bytes(start + HEADER_BYTES, values + byte_offsets[row], length)
        start = frame(start, length)

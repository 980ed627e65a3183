"""Compiled passes of the column-wise encoder: first the sizes of all records, then their bytes.

A record is one `tf.train.Example`, a `SequenceExample`, or the bytes as they are, with its length
and checksums around it. Columns come as tables of addresses, so that one call serves a whole
batch whatever its width: one of the context (an Example's features), one of the feature lists.
"""

# mypy: disable-error-code="no-untyped-def"

from typing import Any

import numpy as np
from numba.np.unsafe.ndarray import to_fixed_tuple

from etl.tfrecord.codec.crc32c import masked_crc
from etl.tfrecord.codec.decode_kernels import (
    BYTES_TAIL,
    ENTRY_TAG,
    FEATURE_LISTS_TAG,
    FEATURE_TAG,
    FEATURES_TAG,
    FLOAT_TAIL,
    INT_TAIL,
    KEY_TAG,
    TAIL_STEP,
    VALUE_TAG,
    VALUES_TAG,
)
from etl.tfrecord.codec.framing import FOOTER_BYTES, HEADER_BYTES
from etl.tfrecord.codec.kernels import (
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
from etl.tfrecord.codec.varint import (
    load_int,
    packed_bytes,
    store_exact_varint,
    store_varint,
    varint_bytes,
    write_packed,
)

# Kinds of values.
INT32, INT64, FLOAT32, FLOAT64, BINARY = 0, 1, 2, 3, 4

# Fields of a row of a column table.
(
    KIND,
    DEPTH,  # 0 for one value, 1 for a list, 2 for a feature list
    VALUES,  # address of the first value
    VALIDITY,  # address of the validity bitmap of the rows, 0 where all are valid
    VALIDITY_BIT,  # bit of the bitmap that belongs to row 0
    ROW_OFFSETS,  # address of int64 [lists + 1], lists only
    BYTE_OFFSETS,  # address of int64 [values + 1], binary only
    HEAD,  # address of the entry's first bytes, with the lengths of a zero-byte payload
    KEY_BYTES,
    SIZES,  # address of int64 [lists] of payload sizes, or 0 where an entry knows its own
    OUTER_OFFSETS,  # address of int64 [rows + 1] into the lists, feature lists only
    OUTER_SIZES,  # address of int64 [rows] of FeatureList sizes, feature lists only
) = range(12)
COLUMN_FIELDS = 12

# Kernels read a row into a tuple first: for all LLVM knows, what they store changes the table.
_as_tuple: Any = to_fixed_tuple

# Up to this key length every length in an entry that holds one number takes one byte.
COMPACT_KEY_BYTES = 100
# What may be written past the last record.
SLACK_BYTES = 16
# Records are laid out in blocks of about this size, so that all columns' visits hit the cache.
_BLOCK_BYTES = 24 << 10


@inlined
def _field_bytes(size):
    """Size of a field of so many bytes whose tag takes one."""
    return 1 + varint_bytes(size) + size


@inlined
def _list_bytes(kind, payload):
    """Size of the Int64List, FloatList or BytesList message around a payload."""
    return payload if kind == BINARY or payload == 0 else _field_bytes(payload)


@inlined
def _feature_bytes(kind, payload):
    """Size of the Feature message around a payload."""
    return _field_bytes(_list_bytes(kind, payload))


@inlined
def _entry_bytes(key_bytes, value):
    """Size of a map entry with a message of `value` bytes."""
    return _field_bytes(key_bytes) + _field_bytes(value)


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
            size += _field_bytes(end - start)
            start = end
    else:
        size += packed_bytes(kind == INT64, values, first, last)
    return size


@inlined
def _span(column, depth, offsets, i):
    """Elements [first, last) of element `i` of a column, which stands for itself at depth 0."""
    if column[DEPTH] <= depth:
        return i, i + 1
    return load_i64(column[offsets] + 8 * i), load_i64(column[offsets] + 8 * (i + 1))


@inlined
def _measure_compact(column, first, sizes):
    """Adds the entries of a column of single numbers under a short key."""
    kind, values, bitmap = column[KIND], column[VALUES], column[VALIDITY]
    fixed = column[KEY_BYTES] + 10
    for i in range(len(sizes)):
        row = first + i
        if bitmap == 0 or is_valid(bitmap, column[VALIDITY_BIT] + row):
            integer = load_int(kind == INT64, values, row) if kind <= INT64 else np.uint64(0)
            sizes[i] += fixed + (varint_bytes(integer) if kind <= INT64 else 4)


@inlined
def _measure_feature(column, i):
    """Size of the Feature of list or value `i`; notes its payload."""
    start, end = _span(column, 0, ROW_OFFSETS, i)
    payload = _payload_bytes(column[KIND], column[VALUES], column[BYTE_OFFSETS], start, end)
    store_u64(column[SIZES] + 8 * i, np.uint64(payload))
    return _feature_bytes(column[KIND], payload)


@inlined
def _measure_general(column, first, sizes):
    """Adds the entries of a column of any form."""
    for i in range(len(sizes)):
        row = first + i
        if not is_valid(column[VALIDITY], column[VALIDITY_BIT] + row):
            continue
        if column[DEPTH] < 2:
            value = _measure_feature(column, row)
        else:
            value = 0
            low, high = _span(column, 1, OUTER_OFFSETS, row)
            for j in range(low, high):
                value += _field_bytes(_measure_feature(column, j))
            store_u64(column[OUTER_SIZES] + 8 * row, np.uint64(value))
        sizes[i] += _field_bytes(_entry_bytes(column[KEY_BYTES], value))


@outlined
def _measure_entries(columns, first, sizes):
    """Computes the bytes of the map entries of each row."""
    sizes[:] = 0
    for c in range(len(columns)):
        column = _as_tuple(columns[c], COLUMN_FIELDS)
        if column[SIZES] == 0:
            _measure_compact(column, first, sizes)
        else:
            _measure_general(column, first, sizes)


@kernel
def measure(context, lists, first, sizes):
    """Computes the bytes of each row's map entries; returns those of all frames, and the most.

    Args:
        context: Column table of an Example or a context, int64 `[columns, COLUMN_FIELDS]`.
        lists: Column table of the feature lists.
        first: First row.
        sizes: Output, int64 `[sections + 1, rows]`: the entries of each section, and the records.
            An Example has one section, a SequenceExample two.
    """
    own, nested, records = sizes[0], sizes[1], sizes[-1]
    is_sequence = len(sizes) > 2
    _measure_entries(context, first, own)
    if is_sequence:
        _measure_entries(lists, first, nested)
    total, largest = 0, 0
    for i in range(len(records)):
        record = _field_bytes(own[i])
        if is_sequence:
            record += _field_bytes(nested[i])
        records[i] = record
        total += HEADER_BYTES + record + FOOTER_BYTES
        largest = max(largest, record)
    return total, largest


@inlined
def _store_cell_head(head, head_bytes, p, tail, size):
    """Writes an entry up to a value of `size` bytes, all lengths taking a byte; returns the end."""
    store_u64(p, load_u64(head) + (np.uint64(size) << np.uint64(8)))
    for i in range(8, head_bytes, 8):
        store_u64(p + i, load_u64(head + i))
    store_u64(p + head_bytes, np.uint64(tail) + np.uint64(size) * np.uint64(TAIL_STEP))
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
    tail = np.uint64(INT_TAIL if is_int else FLOAT_TAIL)
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
def _open_field(p, tag, size):
    """Writes tag and length of a field; returns the address of its content."""
    store_u8(p, np.uint8(tag))
    return store_exact_varint(p + 1, size)


@inlined
def _write_strings(column, address, first, last):
    values, offsets = column[VALUES], column[BYTE_OFFSETS]
    for i in range(first, last):
        start = load_i64(offsets + 8 * i)
        length = load_i64(offsets + 8 * (i + 1)) - start
        address = _open_field(address, VALUES_TAG, length)
        copy_bytes(address, values + start, length)
        address += length
    return address


@inlined
def _write_doubles(values, address, first, last):
    any_refused = False
    for i in range(first, last):
        value, refused = _narrow(load_f64(values + 8 * i))
        any_refused |= refused
        store_u32(address + 4 * (i - first), float_bits(value))
    return -1 if any_refused else address + 4 * (last - first)


@inlined
def _write_feature(column, i, p):
    """Writes the Feature of list or value `i`; returns the end, or -1 if a value is refused."""
    kind, payload = column[KIND], load_i64(column[SIZES] + 8 * i)
    first, last = _span(column, 0, ROW_OFFSETS, i)
    p = _open_field(
        p, 0x0A if kind == BINARY else 0x12 if kind >= FLOAT32 else 0x1A, _list_bytes(kind, payload)
    )
    if kind == BINARY:
        return _write_strings(column, p, first, last)
    if payload > 0:
        p = _open_field(p, VALUES_TAG, payload)
    if kind == FLOAT32:
        copy_bytes(p, column[VALUES] + 4 * first, payload)
        return p + payload
    if kind == FLOAT64:
        return _write_doubles(column[VALUES], p, first, last)
    return write_packed(kind == INT64, column[VALUES], first, last, p)


@inlined
def _write_entry_head(column, p, value_size):
    """Writes a map entry up to its value's first byte; returns the address there."""
    key_bytes = column[KEY_BYTES]
    p = _open_field(p, ENTRY_TAG, _entry_bytes(key_bytes, value_size))
    p = _open_field(p, KEY_TAG, key_bytes)
    copy_bytes(p, column[HEAD] + 4, key_bytes)
    return _open_field(p + key_bytes, VALUE_TAG, value_size)


@inlined
def _write_nested(column, row, p):
    """Writes the entry of a row's FeatureList; returns the end, or -1 if a value is refused."""
    p = _write_entry_head(column, p, load_i64(column[OUTER_SIZES] + 8 * row))
    low, high = _span(column, 1, OUTER_OFFSETS, row)
    for j in range(low, high):
        size = _feature_bytes(column[KIND], load_i64(column[SIZES] + 8 * j))
        p = _write_feature(column, j, _open_field(p, FEATURE_TAG, size))
        if p < 0:
            break
    return p


@inlined
def _write_short_string(column, row, p):
    """Writes the entry of a byte string whose lengths take a byte each; returns the end."""
    start = load_i64(column[BYTE_OFFSETS] + 8 * row)
    size = load_i64(column[BYTE_OFFSETS] + 8 * (row + 1)) - start
    p = _store_cell_head(column[HEAD], column[KEY_BYTES] + 4, p, BYTES_TAIL, size)
    copy_bytes(p, column[VALUES] + start, size)
    return p + size


@inlined
def _write_general(column, row, cursors):
    """Writes entries of any form; returns the first row with a refused value, or -1."""
    kind, depth = column[KIND], column[DEPTH]
    for i in range(len(cursors)):
        if not is_valid(column[VALIDITY], column[VALIDITY_BIT] + row + i):
            continue
        if depth == 2:
            p = _write_nested(column, row + i, cursors[i])
        else:
            payload = load_i64(column[SIZES] + 8 * (row + i))
            if depth == 0 and kind == BINARY and payload + column[KEY_BYTES] < 120:
                p = _write_short_string(column, row + i, cursors[i])
            else:
                p = _write_entry_head(column, cursors[i], _feature_bytes(kind, payload))
                p = _write_feature(column, row + i, p)
        if p < 0:
            return row + i
        cursors[i] = p
    return -1


@outlined
def _write_entries(columns, row, cursors):
    """Writes map entries at the cursors, which move; returns a refused column and row, or -1s."""
    for c in range(len(columns)):
        column = _as_tuple(columns[c], COLUMN_FIELDS)
        if column[SIZES] != 0:
            bad = _write_general(column, row, cursors)
        else:
            bad = _write_compact(column, row, cursors)
        if bad >= 0:
            return c, bad
    return -1, -1


@inlined
def _frame(start, record):
    """Writes length and checksums around a record that stands; returns the end of the frame."""
    store_u64(start, np.uint64(record))
    store_u32(start + 8, masked_crc(start, 8))
    payload = start + HEADER_BYTES
    store_u32(payload + record, masked_crc(payload, record))
    return payload + record + FOOTER_BYTES


@inlined
def _write_block(context, lists, row, sizes, cursors, start):
    """Writes a block of records; returns table, column and row of a refused value, and the end."""
    own, nested, records = sizes[0], sizes[1], sizes[-1]
    address = start
    for i in range(len(cursors)):
        cursors[i] = address + HEADER_BYTES + 1 + varint_bytes(own[i])
        address += HEADER_BYTES + records[i] + FOOTER_BYTES
    column, bad = _write_entries(context, row, cursors)
    if column >= 0:
        return 0, column, bad, start
    if len(sizes) > 2:
        # What the context's last entries overshot is written over from here on.
        for i in range(len(cursors)):
            cursors[i] = _open_field(cursors[i], FEATURE_LISTS_TAG, nested[i])
        column, bad = _write_entries(lists, row, cursors)
        if column >= 0:
            return 1, column, bad, start
    for i in range(len(cursors)):
        _open_field(start + HEADER_BYTES, FEATURES_TAG, own[i])
        start = _frame(start, records[i])
    return -1, -1, -1, start


@kernel
def write(context, lists, first, sizes, total, cursors, start):
    """Writes framed records at an address, with `SLACK_BYTES` past the last one.

    Sizes and their total are those of `measure`; cursors are scratch, int64 `[rows]`. Returns
    number of the table (0 context, 1 lists), column and row of the first value that float32 cannot
    stand for, or (-1, -1, -1).
    """
    rows = max(8, min(1024, _BLOCK_BYTES * len(cursors) // max(1, total)))
    for low in range(0, len(cursors), rows):
        high = min(low + rows, len(cursors))
        table, column, row, start = _write_block(
            context, lists, first + low, sizes[:, low:high], cursors[low:high], start
        )
        if column >= 0:
            return table, column, row
    return -1, -1, -1


@kernel
def write_raw(values, byte_offsets, start):
    """Writes binary values as framed payloads; offsets into their buffer are int64 `[rows + 1]`."""
    for row in range(len(byte_offsets) - 1):
        length = byte_offsets[row + 1] - byte_offsets[row]
        copy_bytes(start + HEADER_BYTES, values + byte_offsets[row], length)
        start = _frame(start, length)

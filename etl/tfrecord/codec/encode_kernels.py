"""Compiled passes of the column-wise encoder: first the sizes of all records, then their bytes.

A record is one `tf.train.Example`, a `SequenceExample`, or the bytes as they are, with its length
and checksums around it (`frame`). Columns come
as a table of addresses, so that one call serves a whole batch whatever its width.
"""

# mypy: disable-error-code="no-untyped-def"

import numpy as np

from etl.tfrecord.codec.crc32c import masked_crc
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

# Fields of a row of the column table.
(
    KIND,
    IS_LIST,
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

# Up to this key length every length in an entry that holds one number takes one byte.
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
    """Adds the entries of a column of single numbers under a short key."""
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
    """Writes an entry up to a value of `size` bytes, all lengths taking a byte; returns the end."""
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
    """Writes the entry of a byte string whose lengths take a byte each; returns the end."""
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
        # What the context's last entries overshot is written over from here on.
        for i in range(low, high):
            store_u8(cursors[i], np.uint8(_FEATURE_LISTS_TAG))
            cursors[i] = store_exact_varint(cursors[i] + 1, list_sizes[i])
        column, row = _write_lists(lists, first + low, cursors[low:high])
        if column >= 0:
            return 1, column, row
        start = _frame_sequences(start, context_sizes[low:high], list_sizes[low:high])
    return -1, -1, -1

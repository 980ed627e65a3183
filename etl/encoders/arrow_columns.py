"""Raw Arrow columns as encoders read them: checked casts, flattened lists, buffer addresses.

An address is good for as long as the array lives: keep the array as long as its address.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from etl.tfrecord.codec.kernels import inlined, is_valid, load_i32, load_i64
from etl.tfrecord.types.features import buffer_address
from etl.tfrecord.types.parts import ListRows, offsets_of, split_lists

RAW_TYPES: Mapping[str, pa.DataType] = {
    "int64": pa.int64(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "string": pa.string(),
    "bytes": pa.binary(),
}
WIDE_TYPES = (pa.large_string(), pa.large_binary())
BYTES_TYPES = (pa.string(), pa.binary(), *WIDE_TYPES)
MAX_VALUES = 2**31 - 1
"""What the 32-bit offsets of a list column can address."""


class ArrayBuffers(NamedTuple):
    """Where the values of an array lie; the array must outlive it."""

    validity: int  # address of the bitmap, 0 where all are valid
    offsets: int  # address of the offsets of strings and binaries, else 0
    data: int  # address of the values or bytes
    first: int  # position of the first row in all three
    wide: bool  # whether the offsets have 64 bits


def array_buffers(values: pa.Array) -> ArrayBuffers:
    """Returns the buffers of integers of 64 bits, strings or binaries, possibly sliced."""
    validity, *offsets, data = values.buffers()
    return ArrayBuffers(
        buffer_address(validity) if values.null_count else 0,
        buffer_address(offsets[0]) if offsets else 0,
        buffer_address(data),
        values.offset,
        values.type in WIDE_TYPES,
    )


@inlined
def has_value(buffers, row):  # type: ignore[no-untyped-def]
    """Whether a row is not null."""
    return is_valid(buffers[0], buffers[3] + row)


@inlined
def load_span(buffers, row):  # type: ignore[no-untyped-def]
    """Address and length of the bytes of a row."""
    position = buffers[3] + row
    if buffers[4]:
        start = load_i64(buffers[1] + 8 * position)
        length = load_i64(buffers[1] + 8 * position + 8) - start
    else:
        start = np.int64(load_i32(buffers[1] + 4 * position))
        length = np.int64(load_i32(buffers[1] + 4 * position + 4)) - start
    return buffers[2] + start, length


def to_arrow(values: np.ndarray) -> pa.Array:
    """Returns an array without nulls that shares the memory of a NumPy one `[rows]`."""
    data_type = pa.from_numpy_dtype(values.dtype)
    return pa.Array.from_buffers(data_type, len(values), [None, pa.py_buffer(values)], null_count=0)


def valid_mask(values: pa.Array) -> np.ndarray:
    """Returns which rows are not null, bool `[rows]`."""
    return values.is_valid().to_numpy(zero_copy_only=False)


def cast_values(values: pa.Array, target: pa.DataType) -> pa.Array:
    """Casts values to int64, float32, float64, string or binary without losing them.

    Numbers are rounded to the nearest float32, as anywhere in training; nothing else is lost:
    an integer out of range, a fraction, a finite number beyond float32, text that is no number
    and bytes that are no UTF-8 are refused by an error of Arrow. Null stays null.
    """
    source = values.type
    if source == target:
        return values
    if pt.is_dictionary(source):
        return cast_values(values.dictionary_decode(), target)
    # A fraction has no text that every engine agrees on, a time no unit.
    has_no_text = pt.is_floating(source) or pt.is_decimal(source)
    if pt.is_temporal(source) or (target == pa.string() and has_no_text):
        raise pa.ArrowInvalid(f"values of type {source} cannot become {target}")
    if target == pa.float32():
        return _cast_to_float32(values)
    # An integer beyond 2**53 becomes the nearest float64, as one beyond 2**24 the nearest float32.
    return pc.cast(values, target, safe=not (target == pa.float64() and pt.is_integer(source)))


def _cast_to_float32(values: pa.Array) -> pa.Array:
    # A safe cast would refuse integers above 2**24, which rounding serves well.
    result = pc.cast(values, pa.float32(), safe=not pt.is_integer(values.type))
    infinite = pc.is_inf(result)
    if pc.any(infinite, min_count=0).as_py():
        if pt.is_floating(values.type) or pt.is_decimal(values.type):
            meant = pc.is_inf(pc.cast(values, pa.float64()))
        else:
            meant = pc.match_substring(pc.cast(values, pa.string()), "inf", ignore_case=True)
        overflowed = values.filter(pc.and_not(infinite, meant))
        if len(overflowed):
            raise pa.ArrowInvalid(f"{overflowed[0].as_py()!r} is beyond the range of float32")
    return result


def as_text(values: pa.Array) -> pa.Array:
    """Strings or binaries as they are; integers stand for their decimal text."""
    return values if values.type in BYTES_TYPES else cast_values(values, pa.string())


def build_lists(rows: ListRows, values: pa.Array) -> pa.Array:
    """Puts values `[values]` into the lists of rows; refuses a batch that is too large."""
    if rows.offsets[-1] > MAX_VALUES:
        raise pa.ArrowInvalid(f"{rows.offsets[-1]} values in one batch; at most {MAX_VALUES} fit")
    return rows.build(values, pa.list_(values.type))


def flatten_lists(lists: pa.Array, max_len: int | None = None) -> tuple[pa.Array, ListRows]:
    """Takes lists `[rows]` of any layout apart, and keeps the first `max_len` values of each."""
    return cut_lists(*split_lists(lists), max_len)


def cut_lists(values: pa.Array, rows: ListRows, max_len: int | None) -> tuple[pa.Array, ListRows]:
    """Keeps the first `max_len` values of each list, or all."""
    lengths = rows.lengths
    if max_len is None or lengths.max(initial=0) <= max_len:
        return values, rows
    kept = np.arange(len(values)) - np.repeat(rows.offsets[:-1], lengths) < max_len
    return values.filter(pa.array(kept)), rows.keep(kept)


def check_lengths(rows: ListRows, length: int) -> None:
    """Refuses lists of any other length; null is none."""
    wrong = rows.lengths != length
    if rows.is_null is not None:
        wrong &= ~rows.is_null
    if wrong.any():
        row = int(wrong.argmax())
        received = f"the list of row {row} has {rows.lengths[row]} values"
        raise pa.ArrowInvalid(f"{received}, not {length}")


def multiply_lists(
    lists: Sequence[ListRows], max_len: int | None
) -> tuple[ListRows, np.ndarray, list[np.ndarray]]:
    """Combines the values of lists, the last list's varying fastest (as `itertools.product`).

    Keeps the first `max_len` combinations of each row. Returns where those of each row lie; the row
    of each, int64 `[combinations]`; and by list the position of its value among all of its values.
    """
    lengths = [part.lengths for part in lists]
    limit = np.int64(MAX_VALUES if max_len is None else max_len)
    # How many combinations of the later lists one value stands in. Beyond the limit it makes no
    # difference, and a product of three lengths might not fit.
    strides = [np.ones_like(lengths[0])]
    for length in reversed(lengths):
        strides.append(np.minimum(strides[-1] * length, limit))
    counts, strides = strides[-1], strides[-2::-1]
    offsets = offsets_of(counts)
    if offsets[-1] >= MAX_VALUES:  # What was bounded by the limit may be more.
        raise pa.ArrowInvalid(f"{offsets[-1]} values in one batch; less than {MAX_VALUES} fit")
    rows = np.repeat(np.arange(len(counts)), counts)
    place = np.arange(offsets[-1]) - offsets[rows]
    positions = [
        part.offsets[rows] + place // stride[rows] % length[rows]
        for part, stride, length in zip(lists, strides, lengths, strict=True)
    ]
    nulls = [part.is_null for part in lists if part.is_null is not None]
    is_null = np.logical_or.reduce(nulls) if nulls else None
    return ListRows(offsets, is_null), rows, positions

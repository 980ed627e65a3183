"""Raw Arrow columns as encoders read them: checked casts, flattened lists, buffer addresses.

An address is good for as long as the array lives: keep the array as long as its address.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from etl.tfrecord.codec.kernels import inlined, is_valid, load_i32, load_i64
from etl.tfrecord.types.features import buffer_address

WIDE_TYPES = (pa.large_string(), pa.large_binary())
BYTES_TYPES = (pa.string(), pa.binary(), *WIDE_TYPES)


class ArrayBuffers(NamedTuple):
    """Where the values of an array lie; the array must outlive it.

    Attributes:
        validity: Address of the bitmap, 0 where all are valid.
        offsets: Address of the offsets of strings and binaries, else 0.
        data: Address of the values or bytes.
        first: Position of the first row in all three.
        wide: Whether the offsets have 64 bits.
    """

    validity: int
    offsets: int
    data: int
    first: int
    wide: bool


def int64_buffers(values: pa.Array) -> ArrayBuffers:
    """Returns the buffers of an int64 array, possibly sliced."""
    validity, data = values.buffers()
    return ArrayBuffers(_validity(values, validity), 0, buffer_address(data), values.offset, False)


def bytes_buffers(values: pa.Array) -> ArrayBuffers:
    """Returns the buffers of a string or binary array, possibly sliced."""
    validity, offsets, data = values.buffers()
    wide = values.type in WIDE_TYPES
    addresses = buffer_address(offsets), buffer_address(data)
    return ArrayBuffers(_validity(values, validity), *addresses, values.offset, wide)


def to_arrow(values: np.ndarray) -> pa.Array:
    """Returns an array without nulls that shares the memory of a NumPy one `[rows]`."""
    data_type = pa.from_numpy_dtype(values.dtype)
    return pa.Array.from_buffers(data_type, len(values), [None, pa.py_buffer(values)], null_count=0)


def valid_mask(values: pa.Array) -> np.ndarray:
    """Returns which rows are not null, bool `[rows]`."""
    if not values.null_count:
        return np.ones(len(values), np.bool_)
    return values.is_valid().to_numpy(zero_copy_only=False)


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


def _validity(values: pa.Array, buffer: pa.Buffer | None) -> int:
    return buffer_address(buffer) if values.null_count else 0


_INFINITY_TEXT = r"^[+-]?(?i:inf|infinity)$"


def cast_values(values: pa.Array, target: pa.DataType) -> pa.Array:
    """Casts values without losing them.

    Numbers are rounded to the nearest float32, as anywhere in training; nothing else is lost:
    an integer out of range, a fraction, a finite number beyond float32, text that is no number
    and bytes that are no UTF-8 are refused. Null stays null.

    Args:
        values: Integers, booleans, floats, decimals, strings or binaries `[rows]`.
        target: int64, float32, float64, string or binary.

    Returns:
        The values as `target`, `[rows]`.

    Raises:
        pa.ArrowInvalid: A value would be lost, or no value of that type has a meaning there.
    """
    source = values.type
    if source == target:
        return values
    if pt.is_dictionary(source):
        return cast_values(values.dictionary_decode(), target)
    if not _is_allowed(source, target):
        raise pa.ArrowInvalid(f"values of type {source} cannot become {target}")
    if target == pa.float32():
        return _cast_to_float32(values)
    # An integer beyond 2**53 becomes the nearest float64, as one beyond 2**24 the nearest float32.
    return pc.cast(values, target, safe=not (target == pa.float64() and pt.is_integer(source)))


def _is_text(source: pa.DataType) -> bool:
    return pt.is_string(source) or pt.is_large_string(source) or pt.is_string_view(source)


def _is_bytes(source: pa.DataType) -> bool:
    return (
        pt.is_binary(source)
        or pt.is_large_binary(source)
        or pt.is_binary_view(source)
        or pt.is_fixed_size_binary(source)
    )


def _is_allowed(source: pa.DataType, target: pa.DataType) -> bool:
    exact = pt.is_null(source) or pt.is_integer(source) or pt.is_boolean(source)
    if target in (pa.int64(), pa.float32(), pa.float64()):
        return exact or pt.is_floating(source) or pt.is_decimal(source) or _is_text(source)
    if target == pa.string():  # a float has no text that every engine agrees on
        return exact or _is_text(source) or _is_bytes(source)
    return target == pa.binary() and (pt.is_null(source) or _is_text(source) or _is_bytes(source))


def _cast_to_float32(values: pa.Array) -> pa.Array:
    # A safe cast would refuse integers above 2**24, which rounding serves well.
    result = pc.cast(values, pa.float32(), safe=not pt.is_integer(values.type))
    infinite = pc.is_inf(result)
    if not pc.any(infinite, min_count=0).as_py():
        return result
    if pt.is_floating(values.type):
        meant = pc.is_inf(pc.cast(values, pa.float64()))
    elif _is_text(values.type):
        meant = pc.match_substring_regex(values, _INFINITY_TEXT)
    else:
        meant = pa.array([False] * len(values))
    overflowed = values.filter(pc.and_not(infinite, meant))
    if len(overflowed):
        raise pa.ArrowInvalid(f"{overflowed[0].as_py()!r} is beyond the range of float32")
    return result


MAX_VALUES = 2**31 - 1
"""What the 32-bit offsets of a list column can address."""


@dataclass(frozen=True)
class FlatLists:
    """A list column as one run of values.

    Attributes:
        values: The values of all lists, one list after the other `[values]`.
        offsets: Where each list starts, and the last one ends, int32 `[rows + 1]`.
        missing: Which rows are null, bool `[rows]`, or None where no row is.
    """

    values: pa.Array
    offsets: np.ndarray
    missing: pa.Array | None

    def rebuild(self, values: pa.Array) -> pa.Array:
        """Returns the column with other values in the same places.

        Args:
            values: `[values]`.
        """
        return pa.ListArray.from_arrays(pa.array(self.offsets), values, mask=self.missing)


def flatten_lists(
    lists: pa.Array, max_len: int | None = None, exact_len: int | None = None
) -> FlatLists:
    """Takes a list column apart.

    Args:
        lists: list, large_list or fixed_size_list `[rows]`, possibly sliced.
        max_len: How many values of each list are kept, from its start; None keeps all.
        exact_len: Length that each list must have, or None.

    Returns:
        Values and offsets; null rows are empty and marked as missing.

    Raises:
        pa.ArrowInvalid: A list has not `exact_len` values, or the batch too many.
    """
    missing = pc.is_null(lists) if lists.null_count else None
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy().astype(np.int64)
    if exact_len is not None:
        _check_lengths(lengths, missing, exact_len)
    values = lists.flatten()
    kept = lengths if max_len is None else np.minimum(lengths, max_len)
    offsets = _offsets(kept)
    if offsets[-1] != len(values):
        # Position of each kept value: its place in the result plus what was cut before its list.
        cut_before = _offsets(lengths)[:-1] - offsets[:-1]
        positions = np.arange(offsets[-1]) + np.repeat(cut_before, kept)
        values = values.take(pa.array(positions))
    if offsets[-1] > MAX_VALUES:
        raise pa.ArrowInvalid(f"{offsets[-1]} values in one batch; at most {MAX_VALUES} fit")
    return FlatLists(values, offsets.astype(np.int32), missing)


def _offsets(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(lengths)))


def _check_lengths(lengths: np.ndarray, missing: pa.Array | None, exact_len: int) -> None:
    wrong = lengths != exact_len
    if missing is not None:
        wrong &= ~missing.to_numpy(zero_copy_only=False)
    if wrong.any():
        row = int(wrong.argmax())
        raise pa.ArrowInvalid(f"the list of row {row} has {lengths[row]} values, not {exact_len}")


@dataclass(frozen=True)
class ListProduct:
    """The combinations of each row, one row after the other, as positions in what they are made of.

    Attributes:
        offsets: Where each row's combinations start, and the last ones end, int32 `[rows + 1]`.
        rows: Row of each combination, int64 `[combinations]`.
        positions: By list, the position of its value among all of its values, int64
            `[combinations]`.
        missing: Rows in which a list is null, bool `[rows]`, or None where there is none.
    """

    offsets: np.ndarray
    rows: np.ndarray
    positions: tuple[np.ndarray, ...]
    missing: pa.Array | None

    def rebuild(self, values: pa.Array) -> pa.Array:
        """Returns the lists `[rows]` of one value per combination `[combinations]`."""
        return pa.ListArray.from_arrays(pa.array(self.offsets), values, mask=self.missing)


def multiply_lists(lists: Sequence[FlatLists], max_len: int | None) -> ListProduct:
    """Combines the values of lists, the last list's varying fastest (as `itertools.product`).

    Args:
        lists: One or more list columns of the same rows.
        max_len: Combinations kept of each row, the first ones; None keeps all.

    Raises:
        pa.ArrowInvalid: A batch has more combinations than a list column can hold.
    """
    lengths = [np.diff(part.offsets).astype(np.int64) for part in lists]
    limit = np.int64(MAX_VALUES if max_len is None else max_len)
    # How many combinations of the later lists one value stands in. Beyond the limit it makes no
    # difference, and a product of three lengths might not fit.
    strides = [np.ones_like(lengths[0])]
    for length in reversed(lengths):
        strides.append(np.minimum(strides[-1] * length, limit))
    counts, strides = strides[-1], strides[-2::-1]
    offsets = np.concatenate(([0], np.cumsum(counts)))
    if offsets[-1] >= MAX_VALUES:
        raise pa.ArrowInvalid(f"{offsets[-1]} values in one batch; less than {MAX_VALUES} fit")
    rows = np.repeat(np.arange(len(counts)), counts)
    place = np.arange(offsets[-1]) - offsets[rows]
    positions = tuple(
        part.offsets[rows] + place // stride[rows] % length[rows]
        for part, stride, length in zip(lists, strides, lengths, strict=True)
    )
    return ListProduct(offsets.astype(np.int32), rows, positions, _any_missing(lists))


def _any_missing(lists: Sequence[FlatLists]) -> pa.Array | None:
    missing = None
    for part in lists:
        if part.missing is not None:
            missing = part.missing if missing is None else pc.or_(missing, part.missing)
    return missing

"""Taking list columns apart and putting them together again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

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


def is_list_type(data_type: pa.DataType) -> bool:
    """Whether a column of that type holds lists."""
    return pt.is_list(data_type) or pt.is_large_list(data_type) or pt.is_fixed_size_list(data_type)


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

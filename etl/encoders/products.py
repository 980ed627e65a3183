"""All combinations of the values of several lists, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etl.encoders.lists import MAX_VALUES, FlatLists


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

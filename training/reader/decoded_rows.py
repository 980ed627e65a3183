"""Decoded rows in memory: slices, copies, runs of whole batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from etl.tfrecord.reading import allocate

LENGTH_COLUMN = "\0length"
"""Column that holds the length of a row's longest list, where batches of like length are made."""


class RaggedList(NamedTuple):
    """Lists of any length: row `i` holds `values[offsets[i]:offsets[i + 1]]`.

    Attributes:
        values: All values, row after row: int64, float32, or byte strings as objects, `[values]`.
        offsets: Where each row begins, and the end: int64 `[rows + 1]`.
    """

    values: np.ndarray
    offsets: np.ndarray

    def pad(self, length: int | None = None, value: Any = None) -> np.ndarray:
        """Pads the lists, and cuts longer ones.

        Args:
            length: Values per row; None: of the longest list.
            value: What fills a row; None: 0, or an empty byte string. Text counts as its bytes.

        Returns:
            `[rows, length]`, of the type of the values.
        """
        lengths = np.diff(self.offsets)
        if length is None:
            length = int(lengths.max(initial=0))
        filler = value.encode() if isinstance(value, str) else value
        if filler is None:
            filler = b"" if self.values.dtype == object else 0
        padded = np.full((len(lengths), length), filler, self.values.dtype)
        column = np.arange(length)
        there = column < lengths[:, None]
        padded[there] = self.values[(self.offsets[:-1, None] + column)[there]]
        return padded


@dataclass(frozen=True)
class DecodedRows:
    """Some rows, column by column.

    Attributes:
        count: How many rows.
        dense: Numbers, `[rows]` or `[rows, length]`.
        lists: Lists of any length, and byte strings, `[rows]`.
    """

    count: int
    dense: dict[str, np.ndarray]
    lists: dict[str, pa.Array]

    def slice(self, first: int, last: int) -> DecodedRows:
        """Rows `[first, last)`, without a copy."""
        return DecodedRows(
            last - first,
            {name: values[first:last] for name, values in self.dense.items()},
            {name: values.slice(first, last - first) for name, values in self.lists.items()},
        )

    def array(self, name: str) -> np.ndarray | RaggedList:
        """A column as arrays.

        Returns:
            Numbers `[rows]` or `[rows, length]`, byte strings as objects `[rows]`, or lists of any
            length; no copy of numbers.
        """
        if name in self.dense:
            return self.dense[name]
        column = self.lists[name]
        if not pa.types.is_list(column.type):
            return column.to_numpy(zero_copy_only=False)
        offsets = np.frombuffer(column.buffers()[1], np.int32)
        offsets = offsets[column.offset : column.offset + len(column) + 1].astype(np.int64)
        return RaggedList(column.flatten().to_numpy(zero_copy_only=False), offsets - offsets[0])

    def take(self, rows: np.ndarray) -> DecodedRows:
        """The rows of these numbers, copied."""
        indices = pa.array(rows) if self.lists else None
        dense = allocate(
            {name: ((len(rows), *v.shape[1:]), v.dtype) for name, v in self.dense.items()}
        )
        for name, out in dense.items():
            np.take(self.dense[name], rows, axis=0, out=out, mode="clip")
        return DecodedRows(
            len(rows),
            dense,
            {name: values.take(indices) for name, values in self.lists.items()},
        )


def concat_rows(parts: Sequence[DecodedRows]) -> DecodedRows:
    """Rows one after another, copied."""
    if len(parts) == 1:
        return parts[0]
    return DecodedRows(
        sum(part.count for part in parts),
        {name: np.concatenate([part.dense[name] for part in parts]) for name in parts[0].dense},
        {name: pa.concat_arrays([part.lists[name] for part in parts]) for name in parts[0].lists},
    )


def regroup(
    parts: Iterator[DecodedRows], batch_size: int, most: int, drop_remainder: bool
) -> Iterator[DecodedRows]:
    """Cuts rows into runs of whole batches, copying where a batch lies across two parts.

    Args:
        parts: Rows, in parts of any size.
        batch_size: Rows per batch.
        most: Rows per run at most; a multiple of `batch_size`.
        drop_remainder: Whether to drop rows at the end that fill no batch.

    Yields:
        Runs of a multiple of `batch_size` rows, but the last where nothing is dropped.
    """
    rest: DecodedRows | None = None
    for part in parts:
        first = 0
        if rest is not None and rest.count:
            first = min(batch_size - rest.count, part.count)
            rest = concat_rows([rest, part.slice(0, first)])
            if rest.count == batch_size:
                yield rest
                rest = None
            else:
                continue
        whole = part.count - (part.count - first) % batch_size
        for start in range(first, whole, most):
            yield part.slice(start, min(start + most, whole))
        rest = part.slice(whole, part.count)
    if rest is not None and rest.count and not drop_remainder:
        yield rest

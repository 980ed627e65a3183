"""Decoded rows in memory, and the batches that are made of them: whole, balanced, alike, mixed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from conf.errors import InputDataError
from etl.tfrecord.codec.kernels import allocate

LENGTH_COLUMN = "\0length"
"""Column that holds the length of a row's longest list, where batches of like length are made."""
_MIX, _BALANCE, _BUCKETS = 2, 3, 4  # streams of random numbers


class RaggedList(NamedTuple):
    """Lists of any length: row `i` holds `values[offsets[i]:offsets[i + 1]]`."""

    values: np.ndarray  # `[values]`: int64, float32, or byte strings as objects
    offsets: np.ndarray  # `[rows + 1]`, int64

    def pad(self, length: int | None = None, value: Any = None) -> np.ndarray:
        """Pads the lists, and cuts longer ones, to a length; None: of the longest list.

        A row is filled with `value` (text counts as its bytes); None: 0, or an empty byte string.
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
    """Some rows, column by column."""

    count: int
    dense: dict[str, np.ndarray]  # numbers, `[rows]` or `[rows, length]`
    lists: dict[str, pa.Array]  # lists of any length, and byte strings, `[rows]`

    def slice(self, first: int, last: int) -> DecodedRows:
        """Rows `[first, last)`, without a copy."""
        return DecodedRows(
            last - first,
            {name: values[first:last] for name, values in self.dense.items()},
            {name: values.slice(first, last - first) for name, values in self.lists.items()},
        )

    def array(self, name: str) -> np.ndarray | RaggedList:
        """A column: numbers (no copy), byte strings as objects `[rows]`, or lists."""
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
        lists = {name: values.take(indices) for name, values in self.lists.items()}
        return DecodedRows(len(rows), dense, lists)


def concat_rows(parts: Sequence[DecodedRows]) -> DecodedRows:
    """Rows one after another, copied where there are several parts."""
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
    """Cuts rows into runs of whole batches of at most `most` rows; the last run may have any."""
    rest: DecodedRows | None = None
    for part in parts:
        first = 0
        if rest is not None and rest.count:
            first = min(batch_size - rest.count, part.count)
            rest = concat_rows([rest, part.slice(0, first)])
            if rest.count < batch_size:
                continue
            yield rest
        whole = part.count - (part.count - first) % batch_size
        for start in range(first, whole, most):
            yield part.slice(start, min(start + most, whole))
        rest = part.slice(whole, part.count)
    if rest is not None and rest.count and not drop_remainder:
        yield rest


def balance_classes(
    rows: DecodedRows, feature: str, shares: Mapping[int, float], seed: Sequence[int]
) -> DecodedRows:
    """Draws the rows of a shuffle buffer anew, as many, so that classes have given shares.

    A class with more rows than its share gives a random part of them; one with fewer repeats its
    rows evenly; one that the buffer does not hold leaves its share to the others.
    """
    if not rows.count:
        return rows
    rng = np.random.default_rng([*seed, _BALANCE])
    classes = rows.dense[feature]
    found = {label: np.flatnonzero(classes == label) for label in shares}
    if sum(map(len, found.values())) < rows.count:
        raise InputDataError(
            f"input.class_balance: feature {feature!r} holds a class without a share",
            received=classes[int((~np.isin(classes, list(shares))).argmax())],
            allowed=", ".join(map(str, shares)),
            fix="give it a share (0 leaves its rows out), or filter its rows out",
        )
    weights = [shares[label] if len(members) else 0 for label, members in found.items()]
    if not any(weights):
        raise InputDataError(
            f"input.class_balance: none of {rows.count} rows that are shuffled together is of a "
            "class with a share above 0",
            received=classes[0],
            allowed=", ".join(str(label) for label, share in shares.items() if share),
            fix="raise input.shuffle_buffer or input.interleave_shards, or leave the other classes "
            "out by input.filter",
        )
    # Whole numbers that add up to the rows, as near to the weights as they get.
    edges = np.rint(np.cumsum(weights) / sum(weights) * rows.count).astype(int)
    counts = np.diff(np.concatenate(([0], edges))).tolist()
    drawn = [_draw(*pair, rng) for pair in zip(found.values(), counts, strict=True)]
    return rows.take(rng.permutation(np.concatenate(drawn)))


def _draw(rows: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    if not count:
        return rows[:0]
    times, rest = divmod(count, len(rows))
    return np.concatenate([np.tile(rows, times), rng.permutation(rows)[:rest]])


def bucket_batches(
    buffers: Iterator[DecodedRows],
    boundaries: Sequence[int],
    lists: Mapping[str, int],
    batch_size: int,
    seed: Sequence[int],
) -> Iterator[DecodedRows]:
    """Makes batches of rows of like length; their lists are cut to the bucket's boundary.

    Rows that fill no batch of their bucket wait for the next buffer; those that are left at the end
    of the epoch make batches together.
    """
    rest: DecodedRows | None = None
    for number, shuffled in enumerate(buffers):
        rows = shuffled if rest is None else concat_rows([rest, shuffled])
        bucket = np.searchsorted(boundaries, rows.dense[LENGTH_COLUMN], side="left")
        batches, left = [], []
        for value in range(len(boundaries) + 1):
            members = np.flatnonzero(bucket == value)
            whole = len(members) - len(members) % batch_size
            batches += list(members[:whole].reshape(-1, batch_size))
            left.append(members[whole:])
        rng = np.random.default_rng([*seed, _BUCKETS, number])
        for position in rng.permutation(len(batches)):
            yield _cut(rows.take(batches[position]), boundaries, lists)
        rest = rows.take(np.sort(np.concatenate(left)))
    if rest is not None:
        for first in range(0, rest.count - batch_size + 1, batch_size):
            yield _cut(rest.slice(first, first + batch_size), boundaries, lists)


def _cut(batch: DecodedRows, boundaries: Sequence[int], lists: Mapping[str, int]) -> DecodedRows:
    longest = int(batch.dense[LENGTH_COLUMN].max())
    bound = next((edge for edge in boundaries if edge >= longest), max(lists.values()))
    cut = {
        name: np.ascontiguousarray(batch.dense[name][:, : min(bound, length)])
        for name, length in lists.items()
    }
    return DecodedRows(batch.count, {**batch.dense, **cut}, batch.lists)


def mix_rows(
    sources: Sequence[Callable[[int], Iterator[DecodedRows]]],
    weights: Sequence[float],
    batches: int,
    batch_size: int,
    seed: Sequence[int],
) -> Iterator[DecodedRows]:
    """Draws batches from several sources: functions of the number of a pass to its rows.

    How many rows come from which is drawn from a multinomial distribution.
    """
    taps = [_Tap(source) for source in sources]
    for number in range(batches):
        rng = np.random.default_rng([*seed, _MIX, number])
        counts = rng.multinomial(batch_size, weights).tolist()
        parts = [p for tap, count in zip(taps, counts, strict=True) for p in tap.take(count)]
        yield concat_rows(parts).take(rng.permutation(batch_size))


class _Tap:
    """Rows of a source without end."""

    def __init__(self, source: Callable[[int], Iterator[DecodedRows]]) -> None:
        self._parts = _repeat(source)
        self._rest = DecodedRows(0, {}, {})

    def take(self, count: int) -> Iterator[DecodedRows]:
        """The next rows, in one part or more."""
        while count:
            if not self._rest.count:
                self._rest = next(self._parts)
            part = self._rest.slice(0, min(count, self._rest.count))
            self._rest = self._rest.slice(part.count, self._rest.count)
            count -= part.count
            yield part


def _repeat(source: Callable[[int], Iterator[DecodedRows]]) -> Iterator[DecodedRows]:
    number, has_rows = 0, True
    while has_rows:
        has_rows = False
        for part in source(number):
            if part.count:
                has_rows = True
                yield part
        number += 1
    raise InputDataError("a dataset of input.mix has no rows", fix="leave it out of the mix")

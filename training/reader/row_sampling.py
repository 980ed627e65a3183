"""Sampling of decoded rows: class balance, batches of like length, weighted mixes of datasets."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from conf.errors import InputDataError
from training.reader.decoded_rows import LENGTH_COLUMN, DecodedRows, concat_rows

_MIX, _BALANCE, _BUCKETS = 2, 3, 4  # streams of random numbers


def balance_classes(
    rows: DecodedRows, feature: str, shares: Mapping[int, float], seed: Sequence[int]
) -> DecodedRows:
    """Draws the rows of a shuffle buffer anew so that classes have given shares.

    A class with more rows than its share gives a random part of them, each once; one with fewer
    repeats its rows, each as often as any other but for the rest. The number of
    rows stays; a class that the buffer does not hold leaves its share to the others.

    Args:
        rows: Rows that were shuffled together.
        feature: Scalar that holds the class.
        shares: Share of the rows by class.
        seed: Of the draws.

    Raises:
        InputDataError: A row is of a class that is not named, or no row of one with a share.
    """
    if not rows.count:
        return rows
    rng = np.random.default_rng([*seed, _BALANCE])
    found = {label: np.flatnonzero(rows.dense[feature] == label) for label in shares}
    if sum(len(members) for members in found.values()) < rows.count:
        known = np.isin(rows.dense[feature], list(shares))
        raise InputDataError(
            f"input.class_balance: feature {feature!r} holds a class without a share",
            received=rows.dense[feature][int((~known).argmax())],
            allowed=", ".join(map(str, shares)),
            fix="give it a share (0 leaves its rows out), or filter its rows out",
        )
    weights = [shares[label] if len(members) else 0 for label, members in found.items()]
    if not any(weights):
        raise InputDataError(
            f"input.class_balance: none of {rows.count} rows that are shuffled together is of a "
            "class with a share above 0",
            received=rows.dense[feature][0],
            allowed=", ".join(str(label) for label, share in shares.items() if share),
            fix="raise input.shuffle_buffer or input.interleave_shards, or leave the other classes "
            "out by input.filter",
        )
    counts = _share_out(rows.count, weights)
    drawn = [
        _draw(members, count, rng) for members, count in zip(found.values(), counts, strict=True)
    ]
    return rows.take(rng.permutation(np.concatenate(drawn)))


def _share_out(total: int, weights: Sequence[float]) -> list[int]:
    """Whole numbers that add up to `total`, as near to the weights as they get."""
    edges = np.rint(np.cumsum(weights) / sum(weights) * total).astype(int)
    return np.diff(np.concatenate(([0], edges))).tolist()


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

    Rows that fill no batch of their bucket wait for the next buffer; those that are left at the
    end of the epoch make batches together. Only rows that fill no batch at all are dropped.

    Args:
        buffers: Shuffled rows with their `LENGTH_COLUMN`.
        boundaries: Greatest lengths of the buckets, rising; longer rows make one more.
        lists: Padded lists and their lengths.
        batch_size: Rows per batch.
        seed: Of the order of the batches within a buffer.

    Yields:
        Batches, each padded to the least boundary that holds its rows.
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
    dense = {
        name: np.ascontiguousarray(values[:, : min(bound, lists[name])])
        if name in lists
        else values
        for name, values in batch.dense.items()
    }
    return DecodedRows(batch.count, dense, batch.lists)


def mix_rows(
    sources: Sequence[Callable[[int], Iterator[DecodedRows]]],
    weights: Sequence[float],
    batches: int,
    batch_size: int,
    seed: Sequence[int],
) -> Iterator[DecodedRows]:
    """Draws each batch from several sources.

    How many rows of a batch come from which source is drawn from a multinomial distribution, and
    their order within the batch is random. A source that ends begins anew, in another order.

    Args:
        sources: Functions of the number of the pass to its shuffled rows.
        weights: Share of each source; they add up to 1.
        batches: Batches to draw.
        batch_size: Rows per batch.
        seed: Of the draws.

    Raises:
        InputDataError: A source has no rows.
    """
    taps = [_Tap(source) for source in sources]
    for number in range(batches):
        rng = np.random.default_rng([*seed, _MIX, number])
        counts = rng.multinomial(batch_size, weights)
        parts = [
            part
            for tap, count in zip(taps, counts.tolist(), strict=True)
            for part in tap.take(count)
        ]
        yield concat_rows(parts).take(rng.permutation(batch_size))


class _Tap:
    """Rows of a source without end."""

    def __init__(self, source: Callable[[int], Iterator[DecodedRows]]) -> None:
        self._source, self._pass = source, 0
        self._parts, self._rest = iter(source(0)), None  # type: Iterator[DecodedRows], DecodedRows | None

    def take(self, count: int) -> Iterator[DecodedRows]:
        """The next rows, in one part or more."""
        is_fresh = False
        while count:
            if self._rest is None or not self._rest.count:
                self._rest = next(self._parts, None)
                if self._rest is None:
                    if is_fresh:
                        raise InputDataError(
                            "a dataset of input.mix has no rows", fix="leave it out of the mix"
                        )
                    self._pass, is_fresh = self._pass + 1, True
                    self._parts = iter(self._source(self._pass))
                continue
            part = self._rest.slice(0, min(count, self._rest.count))
            self._rest = self._rest.slice(part.count, self._rest.count)
            count, is_fresh = count - part.count, False
            yield part


def skip_batches(batches: Iterator[DecodedRows], count: int) -> Iterator[DecodedRows]:
    """The batches from number `count` on."""
    return itertools.islice(batches, count, None)

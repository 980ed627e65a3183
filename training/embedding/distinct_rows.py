"""Rows of a batch that are gathered once, for the forward pass and for the update.

Histories repeat ids: of 100,000 lookups of a batch a third may be distinct. Finding these while the
step before is computed, and gathering their rows once, reads less of a table than gathering each
lookup's row and, in the update, the distinct rows again; and the gradients then name no id twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import tensorflow as tf

from conf.schema import PAD_ID
from training.distribution.strategy import has_gpu

DISTINCT = "distinct rows"
"""Key of a batch that holds them; no feature is named so."""

_ReadRows = Callable[[tf.Variable, tf.Tensor], tf.Tensor]


@dataclass(frozen=True)
class Lookups:
    """Features of ids, and the tables that each of them is looked up in, and no other feature."""

    features: tuple[str, ...]
    tables: tuple[tf.Variable, ...]


class FoundRows(NamedTuple):
    """Rows `[distinct, dim]` of a feature, and each id's, int32 `[batch]` or `[tokens]`.

    Of a list padding is left out, and `segments` are the rows of the batch, int32 `[tokens]`.
    """

    rows: tf.Tensor
    positions: tf.Tensor
    segments: tf.Tensor | None


def plan_lookups(pairs: Sequence[tuple[str, tf.Variable]]) -> tuple[Lookups, ...]:
    """Puts together the features of each table, and the tables of the same features."""
    tables: dict[Any, list[str]] = {}
    for feature, table in pairs:
        names = tables.setdefault(table.ref(), [])
        if feature not in names:
            names.append(feature)
    groups: dict[tuple[str, ...], list[tf.Variable]] = {}
    for ref, names in tables.items():
        groups.setdefault(tuple(names), []).append(ref.deref())
    return tuple(Lookups(names, tuple(found)) for names, found in groups.items())


def add_distinct_ids(dataset: tf.data.Dataset, lookups: Sequence[Lookups]) -> tf.data.Dataset:
    """Adds their distinct ids to the batches of one replica, ahead of the step that needs them.

    Lists that are not padded are left to the step.
    """
    specs = dataset.element_spec
    known = [
        tuple(name for name in lookup.features if isinstance(specs[name], tf.TensorSpec))
        for lookup in lookups
    ]

    def add(batch: dict[str, tf.Tensor]) -> dict[str, Any]:
        distinct = {
            str(number): _find_distinct({name: batch[name] for name in names})
            for number, names in enumerate(known)
            if names
        }
        return {**batch, DISTINCT: distinct}

    return dataset.map(tf.autograph.experimental.do_not_convert(add)).prefetch(2)


class BatchRows:
    """The rows that a step looks up, whose batches hold rows in the place of keys.

    Those of `add_distinct_ids` are gathered where they are first asked for; without lookups each
    feature gathers its own.
    """

    def __init__(self, batch: Mapping[str, Any], lookups: Sequence[Lookups] | None = None) -> None:
        self._ids: dict[Any, tf.Tensor] = {}
        self._positions: dict[tuple[Any, int], tuple[tf.Tensor, tf.Tensor | None]] = {}
        self._rows: dict[Any, tf.Tensor] = {}
        self._others: set[Any] = set()
        for number, found in ({} if lookups is None else batch[DISTINCT]).items():
            for table in (lookups or ())[int(number)].tables:
                self._ids[table.ref()] = found["ids"]
                for name, positions in found["positions"].items():
                    known = positions, found["segments"].get(name)
                    self._positions[table.ref(), id(batch[name])] = known

    def find(self, table: tf.Variable, ids: tf.Tensor, read: _ReadRows) -> FoundRows | None:
        """Returns the rows of a feature's ids, a tensor of the batch; None: they are not known."""
        known = self._positions.get((table.ref(), id(ids)))
        if known is None:
            return None
        if table.ref() not in self._rows:
            self._rows[table.ref()] = read(table, self._ids[table.ref()])
        return FoundRows(self._rows[table.ref()], *known)

    def note_others(self, table: tf.Variable) -> None:
        self._others.add(table.ref())

    def rows_of(self, table: tf.Variable) -> tf.Tensor | None:
        """Returns the rows that a gradient names, in its order; None: it may name ids twice."""
        return None if table.ref() in self._others else self._rows.get(table.ref())


@tf.custom_gradient
def spread_rows(
    rows: tf.Tensor, positions: tf.Tensor
) -> tuple[tf.Tensor, Callable[[tf.Tensor], tuple[tf.Tensor, None]]]:
    """Returns the rows at positions, `[n, dim]`; its gradient sums what comes from equal ones."""

    def gradient(upstream: tf.Tensor) -> tuple[tf.Tensor, None]:
        return sum_rows(upstream, positions, tf.shape(rows)[0]), None

    return tf.gather(rows, positions), gradient


def sum_rows(values: tf.Tensor, positions: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
    """Sums the values `[n, dim]` of equal positions, int32 `[n]` below `count`: `[count, dim]`."""
    if has_gpu():
        return tf.math.unsorted_segment_sum(values, positions, count)
    # The gradient of a sum over segments of gathered rows is the same sum, and its CPU kernel
    # takes half the time of unsorted_segment_sum's.
    return tf.raw_ops.SparseSegmentSumGrad(
        grad=values,
        indices=positions,
        segment_ids=tf.range(tf.size(positions)),
        output_dim0=count,
    )


def _find_distinct(columns: Mapping[str, tf.Tensor]) -> dict[str, Any]:
    pieces, segments = {}, {}
    for name, ids in columns.items():
        pieces[name] = tf.cast(ids, tf.int64)
        if ids.shape.rank == 2:
            tokens = tf.where(tf.not_equal(ids, PAD_ID))
            pieces[name] = tf.gather_nd(pieces[name], tokens)
            segments[name] = tf.cast(tokens[:, 0], tf.int32)
    distinct, positions = tf.unique(tf.concat(list(pieces.values()), axis=0))
    parts = tf.split(positions, [tf.size(piece) for piece in pieces.values()])
    return {
        "ids": distinct,
        "positions": dict(zip(pieces, parts, strict=True)),
        "segments": segments,
    }

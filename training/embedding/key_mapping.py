"""From the keys of a batch to rows: numbered in the input, given memory and values in the step.

    input   keys of the batch -> rows, in order of arrival; first values of rows that are new;
            of a table in two tiers, places on the device in place of rows
    step    memory for these rows, their first values, and only then the lookups

The input runs ahead of the steps. What it numbers becomes part of the table by the step that
trains on the batch, so the state between two steps is that of the batches up to there. A recycled
row belongs to its old key until a step initialises it again: the batches before it train what they
have looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from conf.errors import ConfigError, did_you_mean
from conf.manifest import Manifest
from conf.schema import PAD_ID
from training.distribution.strategy import on_host
from training.embedding.device_tier import PLACE, PlacedBatch
from training.embedding.dynamic_table import (
    DynamicTable,
    GrowingRows,
    ShardedRows,
    read_length,
)
from training.embedding.key_rules import RuledIndex
from training.embedding.key_space import KeySpace
from training.embedding.static_table import EmbeddingTable
from training.embedding.worker_rows import RowExchange
from training.input.batches import ARRIVALS, SWAPS, carry, close_iterators_at_exit

_ROWS, _BATCHES, _DISTINCT = "rows", "batches", "distinct"
_NEW_ROWS, _OWN, _DRAWN = "new rows", "own rows", "drawn"
_SHAPES: dict[str, list[int | None]] = {
    _ROWS: [], _BATCHES: [], _DISTINCT: [], _NEW_ROWS: [None], SWAPS: [None, 4], _OWN: [None]
}  # fmt: skip
"""What a mapper returns beside the rows, int64, ahead of the draws of each table."""
_KEPT = "keys of {}"
_GROWTH = (3, 2)
"""Memory grows by half."""


@dataclass(frozen=True)
class KeyedFeatures:
    """Features whose keys are of one key space, in the order in which a batch's are numbered.

    `drawn` are tables of these keys whose rows start at draws. Of `kept` features batches hold keys
    beside the rows: see `read_keys`.
    """

    space: KeySpace
    features: tuple[str, ...]
    drawn: tuple[DynamicTable, ...]
    kept: tuple[str, ...] = ()

    @property
    def timestamp(self) -> str | None:
        return self.space.index.timestamp if isinstance(self.space.index, RuledIndex) else None


def plan_keyed_features(
    features: Mapping[str, EmbeddingTable],
    tables: Mapping[str, EmbeddingTable],
    kept: Collection[str] = (),
) -> tuple[KeyedFeatures, ...]:
    """Puts together the features of each key space, given the table of each and all tables."""
    names: dict[KeySpace, list[str]] = {}
    for feature, table in features.items():
        if isinstance(table, DynamicTable):
            names.setdefault(table.keys, []).append(feature)
    own = [table for _, table in sorted(tables.items()) if isinstance(table, DynamicTable)]
    return tuple(
        KeyedFeatures(
            space,
            tuple(found),
            tuple(table for table in own if table.keys is space and table.is_drawn),
            tuple(name for name in found if name in kept),
        )
        for space, found in names.items()
    )


def prepare_rules(keyed: Sequence[KeyedFeatures], manifest: Manifest) -> tuple[str, ...]:
    """Reads what the rules of tables need before training, and returns the features of times."""
    found = []
    for part in keyed:
        if isinstance(part.space.index, RuledIndex):
            part.space.index.prepare()
        if part.timestamp is not None:
            _check_timestamp(part.space.label, part.timestamp, manifest)
            found.append(part.timestamp)
    return tuple(found)


def _check_timestamp(table: str, feature: str, manifest: Manifest) -> None:
    times = [
        spec.name
        for spec in manifest.schema.features
        if spec.dtype == "int64" and not spec.is_list and spec.vocabulary_size is None
        if not spec.encoding.startswith("hash:")
    ]
    if feature not in times:
        raise ConfigError(
            f"model.embeddings.{table}.eviction.timestamp names no feature that holds times",
            received=feature,
            allowed=", ".join(times) or "the dataset has no whole number in each row",
            fix=did_you_mean(feature, times)
            if times
            else "keep the time of the event as a feature of role id in the build",
        )


def map_keys(
    dataset: tf.data.Dataset,
    keyed: Sequence[KeyedFeatures],
    batches: int | None = None,
    *,
    is_new_epoch: bool = True,
) -> tf.data.Dataset:
    """Replaces the keys of batches by rows, ahead of the steps that train on them.

    A dataset, of global batches where there are replicas, is to be read once. `batches` of it are
    trained on, None: all; the keys of further ones get no row.
    """
    close_iterators_at_exit()
    mappers = [_build_mapper(part, batches, is_new_epoch=is_new_epoch) for part in keyed]
    specs = dataset.element_spec

    def map_batch(batch: dict[str, Any]) -> dict[str, Any]:
        mapped, arrivals = dict(batch), {}
        for number, (part, mapper) in enumerate(zip(keyed, mappers, strict=True)):
            columns = [_flatten(batch[name]) for name in part.features]
            times = [] if part.timestamp is None else [_spread_times(batch, part.timestamp, part)]
            types = [tf.int64] * (1 + len(_SHAPES)) + [tf.float32] * len(part.drawn)
            rows, *others = tf.numpy_function(mapper, [tf.concat(columns, axis=0), *times], types)
            pieces = tf.split(tf.reshape(rows, [-1]), [tf.size(column) for column in columns])
            mapped |= {_KEPT.format(name): batch[name] for name in part.kept}
            for name, piece in zip(part.features, pieces, strict=True):
                mapped[name] = _restore_shape(piece, batch[name], specs[name])
            arrivals[str(number)] = _name_arrivals(part, others)
        return {**mapped, ARRIVALS: arrivals}

    return dataset.map(tf.autograph.experimental.do_not_convert(map_batch)).prefetch(2)


def _name_arrivals(part: KeyedFeatures, values: Sequence[tf.Tensor]) -> dict[str, Any]:
    drawn = zip(values[len(_SHAPES) :], part.drawn, strict=True)
    return {
        **{n: tf.ensure_shape(v, _SHAPES[n]) for n, v in zip(_SHAPES, values, strict=False)},
        # No list: tf.data would make one tensor of it.
        _DRAWN: tuple(tf.ensure_shape(rows, [None, table.dim]) for rows, table in drawn),
    }


def _spread_times(batch: Mapping[str, Any], timestamp: str, part: KeyedFeatures) -> tf.Tensor:
    """Returns the time of each key of a batch: that of its row, int64 `[keys]`."""
    times, pieces = batch[timestamp], []
    for name in part.features:
        values = batch[name]
        if isinstance(values, tf.RaggedTensor):
            pieces.append(tf.gather(times, values.value_rowids()))
        else:
            pieces.append(tf.repeat(times, tf.size(values) // tf.size(times)))
    return tf.concat(pieces, axis=0)


def read_keys(batch: Mapping[str, Any], feature: str) -> Any:
    """Returns a feature as the dataset holds it, whether or not a batch has rows in its place."""
    return batch.get(_KEPT.format(feature), batch[feature])


def admit_arrivals(arrivals: Mapping[str, Any], keyed: Sequence[KeyedFeatures]) -> None:
    """Gives the new rows of a batch memory and their first values, in a replica context.

    Rows of two tiers are brought to the device before; those that other workers own, after that.
    """
    for number, found in arrivals.items():
        part = keyed[int(number)]
        if part.space.tier is not None:
            _swap_rows(part.space, part.space.tier.exchange, found)
        tf.cond(tf.size(found[_NEW_ROWS]) > 0, _build_admission(part, found), tf.no_op)
        if part.space.exchange is not None:
            _gather_rows(part.space, part.space.exchange, found)
        if part.space.is_ruled:
            batches = part.space.known_batches.handle
            tf.raw_ops.AssignVariableOp(resource=batches, value=found[_BATCHES])


def _gather_rows(space: KeySpace, exchange: RowExchange, found: Mapping[str, Any]) -> None:
    """Puts the rows of a batch together from all workers, for its lookups."""
    # Rows may be new at other workers alone.
    tf.raw_ops.AssignVariableOp(resource=space.known_rows.handle, value=found[_ROWS])
    exchange.begin(found[_OWN])
    pairs = [
        (matrix.variable, matrix.batch_rows)
        for matrix in space.matrices
        if isinstance(matrix, ShardedRows) and matrix.batch_rows is not None
    ]
    blocks = [
        tf.ensure_shape(
            tf.raw_ops.ResourceGather(resource=own.handle, indices=exchange.own, dtype=own.dtype),
            [None, own.shape[1]],
        )
        for own, _ in pairs
    ]
    for (_, of_batch), rows in zip(pairs, exchange.gather(blocks), strict=True):
        tf.raw_ops.AssignVariableOp(resource=of_batch.handle, value=rows, validate_shape=False)


def _swap_rows(
    space: KeySpace, exchange: Callable[..., list[np.ndarray]], found: Mapping[str, Any]
) -> None:
    """Writes rows that leave the device to host memory, and brings those in that come."""
    context = tf.distribute.get_replica_context()
    places, matrices = found[SWAPS][:, PLACE], space.matrices
    leaving = [
        tf.raw_ops.ResourceGather(resource=m.variable.handle, indices=places, dtype=m.dtype)
        for m in matrices
    ]
    told = [context.replica_id_in_sync_group, found[_ROWS], found[_DISTINCT], found[SWAPS]]
    coming = tf.numpy_function(exchange, [*told, *leaving], [m.dtype for m in matrices])
    for matrix, rows in zip(matrices, coming, strict=True):
        tf.raw_ops.ResourceScatterUpdate(
            resource=matrix.variable.handle,
            indices=places,
            updates=tf.ensure_shape(rows, [None, matrix.dim]),
        )


def _build_admission(part: KeyedFeatures, found: Mapping[str, Any]) -> Callable[[], tf.Operation]:
    new, count, space = found[_NEW_ROWS], found[_ROWS], part.space
    drawn = {id(table.rows): rows for table, rows in zip(part.drawn, found[_DRAWN], strict=True)}
    # Memory that is ahead of the keys holds first values; a row that another key had does not.
    sets_all = space.is_ruled or space.tier is not None
    lacking = [m for m in space.matrices if sets_all or id(m) in drawn]

    def admit() -> tf.Operation:
        done: list[tf.Operation] = []
        for matrix in space.matrices if space.tier is None else []:
            # One after the other: memory for two copies of one of them, not of all.
            with tf.control_dependencies(done):
                done = [_reserve(matrix, matrix.count_held(count))]
        with tf.control_dependencies(done):
            done = [
                tf.raw_ops.ResourceScatterUpdate(
                    resource=m.variable.handle,
                    indices=new,
                    updates=drawn.get(id(m), tf.fill([tf.size(new), m.dim], m.fill)),
                )
                for m in lacking
            ]
        with tf.control_dependencies(done):
            tf.raw_ops.AssignVariableOp(resource=space.known_rows.handle, value=count)
        return tf.no_op()

    return admit


def _reserve(matrix: GrowingRows, rows: tf.Tensor) -> tf.Operation:
    def grow() -> tf.Operation:
        with tf.control_dependencies(reserve_rows(matrix, rows)):
            return tf.no_op()

    held = read_length(matrix.variable)
    with on_host():
        is_short = rows > held
    found = tf.cond(is_short, grow, tf.no_op)
    return found if isinstance(found, tf.Operation) else tf.no_op()


def reserve_rows(matrix: GrowingRows, count: tf.Tensor) -> list[tf.Operation]:
    """Gives this replica's copy of a matrix memory for `count` rows, more than it has, in a graph.

    The old memory is given back before the new one is handed over: a variable that rows have been
    scattered into copies what it is assigned.
    """
    handle, dtype = matrix.variable.handle, matrix.dtype
    held = read_length(matrix.variable)
    with on_host():
        ahead = count // _GROWTH[1] * _GROWTH[0]
        if matrix.most_rows is not None:
            ahead = tf.minimum(ahead, matrix.most_rows)
        length = tf.maximum(ahead, count)
    rows = tf.range(length)
    # New rows are copies of that of padding, which holds the first value.
    grown = tf.raw_ops.ResourceGather(
        resource=handle, indices=tf.where(rows < held, rows, PAD_ID), dtype=dtype
    )
    with tf.control_dependencies([grown]):
        emptied = tf.raw_ops.AssignVariableOp(
            resource=handle, value=tf.zeros([0, matrix.dim], dtype), validate_shape=False
        )
    with tf.control_dependencies([emptied]):
        return [tf.raw_ops.AssignVariableOp(resource=handle, value=grown, validate_shape=False)]


def _build_mapper(
    part: KeyedFeatures, batches: int | None, *, is_new_epoch: bool
) -> Callable[..., list[np.ndarray]]:
    map_to_rows = part.space.begin_batches(is_new_epoch=is_new_epoch)
    elsewhere = part.space.exchange or part.space.tier
    place = None if elsewhere is None else elsewhere.begin_batches(is_new_epoch=is_new_epoch)
    left = batches

    def map_batch(keys: np.ndarray, times: np.ndarray | None = None) -> list[np.ndarray]:
        nonlocal left
        is_trained = left != 0
        found = map_to_rows(keys, times, left == 1) if is_trained else part.space.find_ahead(keys)
        placed = PlacedBatch(found.rows, found.new_rows)
        try:
            placed = placed if place is None else place(found, is_trained)
        except ConfigError as error:
            raise carry(error) from error
        left = None if left is None else max(0, left - 1)
        numbers = (found.row_count, found.batches, placed.distinct)
        new_keys = found.new_keys
        if placed.is_own is not None:
            new_keys = new_keys[placed.is_own]
        drawn = [table.draw_rows(new_keys) for table in part.drawn]
        return [
            placed.places,
            *(np.array(number, np.int64) for number in numbers),
            placed.new_places,
            placed.swaps,
            placed.own,
            *drawn,
        ]

    return map_batch


def _flatten(values: tf.Tensor | tf.RaggedTensor) -> tf.Tensor:
    flat = values.flat_values if isinstance(values, tf.RaggedTensor) else tf.reshape(values, [-1])
    return tf.cast(flat, tf.int64)


def _restore_shape(
    rows: tf.Tensor, keys: tf.Tensor | tf.RaggedTensor, spec: tf.TypeSpec
) -> tf.Tensor | tf.RaggedTensor:
    if isinstance(keys, tf.RaggedTensor):
        return keys.with_flat_values(rows)
    return tf.ensure_shape(tf.reshape(rows, tf.shape(keys)), spec.shape)

"""From the keys of a batch to rows: numbered in the input, given memory and values in the step.

    input   keys of the batch -> rows, in order of arrival; first values of rows that are new;
            of a table in two tiers, places on the device in place of rows
    step    memory for these rows, their first values, and only then the lookups

The input runs ahead of the steps. What it numbers becomes part of the table by the step that
trains on the batch, so the state between two steps is that of the batches up to there. A row that
the rules of a table take from one key and give to another is the first key's up to the step that
gives it first values again: the batches before it train what they have looked up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from conf.dates import PER_SECOND, PERIOD_SECONDS, UNIT_WORDS, find_date_unit
from conf.errors import ConfigError, InputDataError, did_you_mean
from conf.manifest import Manifest
from conf.schema import PAD_ID
from conf.training.tables import EvictionConfig
from training.embedding.dynamic_table import DynamicTable
from training.embedding.growing_rows import GrowingRows, ShardedRows, read_length
from training.embedding.key_rules import MappedBatch
from training.embedding.key_space import KeySpace
from training.embedding.placement.device_tier import PLACE, PlacedBatch, place_nowhere
from training.embedding.placement.row_exchange import RowExchange
from training.embedding.ruled_key_space import RuledKeySpace
from training.embedding.static_table import EmbeddingTable
from training.input.batches import ARRIVALS, carry, close_iterators_at_exit

_log = logging.getLogger("sluice.training.embedding")

_NUMBERS = _ROWS, _BATCHES, _DISTINCT = "rows", "batches", "distinct"
_NEW_ROWS, _SWAPS, _OWN, _DRAWN = "new rows", "swaps", "own rows", "drawn"
_KEPT = "keys of {}"
_GROWTH = (3, 2)
"""Memory grows by half."""


@dataclass(frozen=True)
class KeyedFeatures:
    """Features whose keys are of one key space.

    Attributes:
        space: The key space.
        features: Their names, in the order in which keys of a batch are numbered.
        drawn: Tables of these keys whose rows start at draws.
        kept: Those of the features whose keys batches hold beside the rows: see `read_keys`.
    """

    space: KeySpace
    features: tuple[str, ...]
    drawn: tuple[DynamicTable, ...]
    kept: tuple[str, ...] = ()

    @property
    def timestamp(self) -> str | None:
        """Feature that holds the time of a row of a batch, or None."""
        return self.space.rules.timestamp if isinstance(self.space, RuledKeySpace) else None

    @property
    def mapped_types(self) -> list[tf.DType]:
        """Types of what a mapper returns."""
        return [tf.int64] * (1 + len(_NUMBERS) + 3) + [tf.float32] * len(self.drawn)


def plan_keyed_features(
    features: Mapping[str, EmbeddingTable],
    tables: Mapping[str, EmbeddingTable],
    kept: Collection[str] = (),
) -> tuple[KeyedFeatures, ...]:
    """Puts together the features of each key space.

    Args:
        features: Table of each feature.
        tables: All tables by name.
        kept: Features whose keys are read as well.
    """
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
    """Reads what the rules of tables need before training, and returns the features of times.

    Args:
        keyed: Features that hold keys.
        manifest: The dataset version.

    Raises:
        ConfigError: The dataset has no such feature, or it holds no times.
        InputDataError: A list of keys cannot be read, or times are of two units.
    """
    found = []
    for part in keyed:
        if isinstance(part.space, RuledKeySpace):
            part.space.ruled.prepare()
        if part.timestamp is not None:
            _check_timestamp(part.space.label, part.timestamp, manifest)
            times = manifest.statistics.get("train", {}).get(part.timestamp, {})
            check_clock(part.space.label, part.space.rules.eviction, times)
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


_UNUSUAL_S = (3600, 2 * PERIOD_SECONDS["year"])
"""Spans without an occurrence beyond which the unit is more likely wrong than the span meant."""


def check_clock(table: str, rules: EvictionConfig | None, times: Mapping[str, Any]) -> None:
    """Checks the times by which keys are forgotten: the latest one is the present of all.

    Args:
        table: Name of the table.
        rules: When a key is forgotten.
        times: Statistics of the feature that holds the times, in the train split.

    Raises:
        InputDataError: The latest time is not a date in the unit of the earliest.
    """
    low, high = times.get("min"), times.get("max")
    if rules is None or low is None or high is None:
        return
    unit = find_date_unit(high)
    is_dated = find_date_unit(low) is not None
    if is_dated and unit != find_date_unit(low):
        raise InputDataError(
            f"the times of feature {rules.timestamp!r} are of several units",
            received=f"{low:.0f} to {high:.0f}",
            allowed=f"times of one unit: by the latest one table {table!r} would forget all keys",
            fix="build the dataset anew: a build makes times of another unit bad rows",
        )
    if rules.unused_time is None or unit is None:
        return
    span_s = rules.unused_time / PER_SECOND[unit]
    text = (
        f"table {table}: keys are forgotten after {span_s / 3600:,.1f} hours without an occurrence"
    )
    shown = f"{rules.unused_time:,} {UNIT_WORDS[unit]} of {rules.timestamp}"
    is_usual = _UNUSUAL_S[0] <= span_s <= _UNUSUAL_S[1]
    _log.log(
        logging.INFO if is_usual else logging.WARNING,
        "%s (%s)%s", text, shown, "" if is_usual else "; is `unused_time` in the feature's unit?",
    )  # fmt: skip


def map_keys(
    dataset: tf.data.Dataset,
    keyed: Sequence[KeyedFeatures],
    batches: int | None = None,
    *,
    is_new_epoch: bool = True,
) -> tf.data.Dataset:
    """Replaces the keys of batches by rows, ahead of the steps that train on them.

    Args:
        dataset: Batches, global ones where there are replicas; to be read once.
        keyed: Features that hold keys.
        batches: How many are trained on; the keys of further ones get no row. None: all.
        is_new_epoch: Whether the first batch is the first of its epoch.

    Returns:
        Batches with rows in place of keys, and the rows that are new in them.
    """
    close_iterators_at_exit()
    mappers = [_build_mapper(part, batches, is_new_epoch=is_new_epoch) for part in keyed]
    specs = dataset.element_spec

    def map_batch(batch: dict[str, Any]) -> dict[str, Any]:
        mapped, arrivals = dict(batch), {}
        for number, (part, mapper) in enumerate(zip(keyed, mappers, strict=True)):
            columns = [_flatten(batch[name]) for name in part.features]
            times = [] if part.timestamp is None else [_spread_times(batch, part.timestamp, part)]
            rows, *others = tf.numpy_function(
                mapper, [tf.concat(columns, axis=0), *times], part.mapped_types
            )
            pieces = tf.split(tf.reshape(rows, [-1]), [tf.size(column) for column in columns])
            mapped |= {_KEPT.format(name): batch[name] for name in part.kept}
            for name, piece in zip(part.features, pieces, strict=True):
                mapped[name] = _restore_shape(piece, batch[name], specs[name])
            arrivals[str(number)] = _name_arrivals(part, others)
        return {**mapped, ARRIVALS: arrivals}

    return dataset.map(tf.autograph.experimental.do_not_convert(map_batch)).prefetch(2)


def _name_arrivals(part: KeyedFeatures, values: Sequence[tf.Tensor]) -> dict[str, Any]:
    """Returns what a mapper says beside the rows, by name and with its shape."""
    *numbers, new, swaps, own = values[: len(_NUMBERS) + 3]
    drawn = values[len(_NUMBERS) + 3 :]
    return {
        **{name: tf.reshape(n, []) for name, n in zip(_NUMBERS, numbers, strict=True)},
        _NEW_ROWS: tf.ensure_shape(new, [None]),
        _SWAPS: tf.ensure_shape(swaps, [None, 4]),
        _OWN: tf.ensure_shape(own, [None]),
        # No list: tf.data would make one tensor of it.
        _DRAWN: tuple(
            tf.ensure_shape(rows, [None, table.dim])
            for rows, table in zip(drawn, part.drawn, strict=True)
        ),
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

    Args:
        arrivals: The rows that `map_keys` added to the batch.
        keyed: As there.
    """
    for number, found in arrivals.items():
        part = keyed[int(number)]
        if part.space.tier is not None:
            _swap_rows(part.space, part.space.tier.exchange, found)
        new = found[_NEW_ROWS]
        admit = _build_admission(part, new, found[_ROWS], _first_values(part, new, found[_DRAWN]))
        tf.cond(tf.size(new) > 0, admit, tf.no_op)
        if part.space.exchange is not None:
            _gather_rows(part.space, part.space.exchange, found)
        if isinstance(part.space, RuledKeySpace):
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
    places, matrices = found[_SWAPS][:, PLACE], space.matrices
    leaving = [
        tf.raw_ops.ResourceGather(resource=m.variable.handle, indices=places, dtype=m.dtype)
        for m in matrices
    ]
    told = [context.replica_id_in_sync_group, found[_ROWS], found[_DISTINCT], found[_SWAPS]]
    coming = tf.numpy_function(exchange, [*told, *leaving], [m.dtype for m in matrices])
    for matrix, rows in zip(matrices, coming, strict=True):
        tf.raw_ops.ResourceScatterUpdate(
            resource=matrix.variable.handle,
            indices=places,
            updates=tf.ensure_shape(rows, [None, matrix.dim]),
        )


def _first_values(
    part: KeyedFeatures, new: tf.Tensor, drawn: Sequence[tf.Tensor]
) -> list[tuple[GrowingRows, tf.Tensor]]:
    """Returns the first values of new rows in the matrices that do not hold them yet."""
    values = {id(table.rows): rows for table, rows in zip(part.drawn, drawn, strict=True)}
    return [
        (matrix, values.get(id(matrix), tf.fill([tf.size(new), matrix.dim], matrix.fill)))
        for matrix in part.space.matrices
        if part.space.sets_all_rows or id(matrix) in values
    ]


def _build_admission(
    part: KeyedFeatures,
    new: tf.Tensor,
    count: tf.Tensor,
    first: Sequence[tuple[GrowingRows, tf.Tensor]],
) -> Callable[[], tf.Operation]:
    """Returns the branch of a step that meets new keys."""

    def admit() -> tf.Operation:
        done: list[tf.Operation] = []
        grown = part.space.matrices if part.space.tier is None else []
        for matrix in grown:
            # One after the other: memory for two copies of one of them, not of all.
            with tf.control_dependencies(done):
                done = [_reserve(matrix, matrix.count_held(count))]
        with tf.control_dependencies(done):
            done = [
                tf.raw_ops.ResourceScatterUpdate(
                    resource=matrix.variable.handle, indices=new, updates=values
                )
                for matrix, values in first
            ]
        with tf.control_dependencies(done):
            tf.raw_ops.AssignVariableOp(resource=part.space.known_rows.handle, value=count)
        return tf.no_op()

    return admit


def _reserve(matrix: GrowingRows, rows: tf.Tensor) -> tf.Operation:
    def grow() -> tf.Operation:
        with tf.control_dependencies(reserve_rows(matrix, rows)):
            return tf.no_op()

    found = tf.cond(rows > read_capacity(matrix), grow, tf.no_op)
    return found if isinstance(found, tf.Operation) else tf.no_op()


def read_capacity(matrix: GrowingRows) -> tf.Tensor:
    """Returns the rows that this replica's copy has memory for, int64 scalar."""
    return read_length(matrix.variable)


def reserve_rows(matrix: GrowingRows, count: tf.Tensor) -> list[tf.Operation]:
    """Gives this replica's copy of a matrix memory for more rows than it has, in a graph.

    The old memory is given back before the new one is handed over: a variable that rows have been
    scattered into copies what it is assigned.

    Args:
        matrix: The matrix.
        count: Rows that it must have, int64 scalar.
    """
    handle, dtype = matrix.variable.handle, matrix.dtype
    held = read_capacity(matrix)
    ahead = count // _GROWTH[1] * _GROWTH[0]
    if matrix.most_rows is not None:
        ahead = tf.minimum(ahead, matrix.most_rows)
    rows = tf.range(tf.maximum(ahead, count))
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
    """Returns the function of keys to their rows, and what the step has to know of them."""
    map_to_rows = part.space.begin_batches(is_new_epoch=is_new_epoch)
    place = _build_placer(part.space, is_new_epoch=is_new_epoch)
    left = batches

    def map_batch(keys: np.ndarray, times: np.ndarray | None = None) -> list[np.ndarray]:
        nonlocal left
        is_trained = left != 0
        found = map_to_rows(keys, times, left == 1) if is_trained else part.space.find_ahead(keys)
        placed = place(found, is_trained)
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


def _build_placer(
    space: KeySpace, *, is_new_epoch: bool
) -> Callable[[MappedBatch, bool], PlacedBatch]:
    """Returns the function of a batch's rows to where its step finds them.

    These are places of a tier, or of the matrix that workers put together for a batch.
    """
    if space.exchange is not None:
        exchange = space.exchange
        exchange.begin_plans(is_new_epoch=is_new_epoch)
        return lambda found, is_trained: exchange.plan(
            found.rows, found.new_rows, is_counted=is_trained
        )
    if space.tier is None:
        return lambda found, is_trained: PlacedBatch(found.rows, found.new_rows)
    place = space.tier.begin(is_new_epoch=is_new_epoch)

    def place_batch(found: MappedBatch, is_trained: bool) -> PlacedBatch:
        if not is_trained:
            return place_nowhere(found.rows)
        try:
            return place(found.rows, found.new_rows)
        except ConfigError as error:
            raise carry(error) from error

    return place_batch


def _flatten(values: tf.Tensor | tf.RaggedTensor) -> tf.Tensor:
    flat = values.flat_values if isinstance(values, tf.RaggedTensor) else tf.reshape(values, [-1])
    return tf.cast(flat, tf.int64)


def _restore_shape(
    rows: tf.Tensor, keys: tf.Tensor | tf.RaggedTensor, spec: tf.TypeSpec
) -> tf.Tensor | tf.RaggedTensor:
    if isinstance(keys, tf.RaggedTensor):
        return keys.with_flat_values(rows)
    return tf.ensure_shape(tf.reshape(rows, tf.shape(keys)), spec.shape)

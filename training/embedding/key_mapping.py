"""From the keys of a batch to rows: numbered in the input, given memory and values in the step.

    input   keys of the batch -> rows, in order of arrival; first values of rows that are new
    step    memory for these rows, their first values, and only then the lookups

The input runs ahead of the steps. What it numbers becomes part of the table by the step that
trains on the batch, so the state between two steps is that of the batches up to there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from training.embedding.dynamic_table import DynamicTable
from training.embedding.key_space import GrowingRows, KeySpace, read_capacity, reserve_rows
from training.embedding.static_table import EmbeddingTable
from training.input.batches import ARRIVALS
from training.tensorflow_runtime import close_iterators_at_exit

_ROWS, _DRAWN = "rows", "drawn"
_KEPT = "keys of {}"


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


def map_keys(
    dataset: tf.data.Dataset, keyed: Sequence[KeyedFeatures], batches: int | None = None
) -> tf.data.Dataset:
    """Replaces the keys of batches by rows, ahead of the steps that train on them.

    Args:
        dataset: Batches, global ones where there are replicas; to be read once.
        keyed: Features that hold keys.
        batches: How many are trained on; the keys of further ones get no row. None: all.

    Returns:
        Batches with rows in place of keys, and the rows that are new in them.
    """
    close_iterators_at_exit()
    mappers = [_build_mapper(part, batches) for part in keyed]
    specs = dataset.element_spec

    def map_batch(batch: dict[str, Any]) -> dict[str, Any]:
        mapped, arrivals = dict(batch), {}
        for number, (part, mapper) in enumerate(zip(keyed, mappers, strict=True)):
            columns = [_flatten(batch[name]) for name in part.features]
            rows, count, *drawn = tf.numpy_function(
                mapper,
                [tf.concat(columns, axis=0)],
                [tf.int64, tf.int64, *[tf.float32] * len(part.drawn)],
            )
            pieces = tf.split(tf.reshape(rows, [-1]), [tf.size(column) for column in columns])
            mapped |= {_KEPT.format(name): batch[name] for name in part.kept}
            for name, piece in zip(part.features, pieces, strict=True):
                mapped[name] = _restore_shape(piece, batch[name], specs[name])
            arrivals[str(number)] = {
                _ROWS: tf.reshape(count, []),
                # No list: tf.data would make one tensor of it.
                _DRAWN: tuple(
                    tf.ensure_shape(values, [None, table.dim])
                    for values, table in zip(drawn, part.drawn, strict=True)
                ),
            }
        return {**mapped, ARRIVALS: arrivals}

    return dataset.map(tf.autograph.experimental.do_not_convert(map_batch)).prefetch(2)


def read_keys(batch: Mapping[str, Any], feature: str) -> Any:
    """Returns a feature as the dataset holds it, whether or not a batch has rows in its place."""
    return batch.get(_KEPT.format(feature), batch[feature])


def admit_arrivals(arrivals: Mapping[str, Any], keyed: Sequence[KeyedFeatures]) -> None:
    """Gives the new rows of a batch memory and their first values, in a replica context.

    Args:
        arrivals: The rows that `map_keys` added to the batch.
        keyed: As there.
    """
    for number, found in arrivals.items():
        part = keyed[int(number)]
        count, handle = found[_ROWS], part.space.known_rows.handle
        known = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.int64)
        admit = _build_admission(part, known, count, found[_DRAWN])
        tf.cond(count > known, admit, tf.no_op)


def _build_admission(
    part: KeyedFeatures, known: tf.Tensor, count: tf.Tensor, drawn: Sequence[tf.Tensor]
) -> Callable[[], tf.Operation]:
    """Returns the branch of a step that meets new keys."""

    def admit() -> tf.Operation:
        done: list[tf.Operation] = []
        for matrix in part.space.matrices:
            # One after the other: memory for two copies of one of them, not of all.
            with tf.control_dependencies(done):
                done = [_reserve(matrix, count)]
        with tf.control_dependencies(done):
            new = tf.range(known, count)
            done = [
                tf.raw_ops.ResourceScatterUpdate(
                    resource=table.variable.handle, indices=new, updates=values
                )
                for table, values in zip(part.drawn, drawn, strict=True)
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


def _build_mapper(
    part: KeyedFeatures, batches: int | None
) -> Callable[[np.ndarray], list[np.ndarray]]:
    """Returns the function of keys to their rows, the number of rows, and the new ones' values."""
    map_to_rows, index = part.space.begin(), part.space.index
    known, left = len(index), batches

    def map_batch(keys: np.ndarray) -> list[np.ndarray]:
        nonlocal known, left
        if left == 0:
            rows, count = index.find(keys), known
        else:
            rows, count = map_to_rows(keys)
            left = None if left is None else left - 1
        new = index.read_keys(known, count)
        known = count
        drawn = [table.draw_rows(new) for table in part.drawn]
        return [rows, np.array(count, np.int64), *drawn]

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

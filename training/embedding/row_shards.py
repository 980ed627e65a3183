"""Tables whose rows lie on several parameter servers."""

from __future__ import annotations

import functools
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from training.embedding.growing_rows import GrowingRows
from training.parameter_server.strategy import ParameterServers

MIN_SHARD_BYTES = 256 << 10
"""A table is split where each server gets so much of it, as TensorFlow's partitioner does."""


class RowShards(tf.Module):
    """A matrix `[rows, dim]` in several variables: row `i` is in variable `i % shards`.

    Ids are numbered by falling frequency: of contiguous shards the first would get nearly all
    the work. What a checkpoint holds is the whole matrix, whatever the number of shards.

    Args:
        shards: The variables; the first ones have one row more where rows do not divide evenly.
    """

    def __init__(self, shards: list[tf.Variable]) -> None:
        super().__init__(name="row_shards")
        self.shards = shards

    @property
    def shape(self) -> tf.TensorShape:
        """Shape of the matrix."""
        rows = sum(int(shard.shape[0]) for shard in self.shards)
        return tf.TensorShape([rows, self.shards[0].shape[1]])

    @property
    def dtype(self) -> tf.DType:
        """Type of a number."""
        return self.shards[0].dtype

    def lookup(self, ids: tf.Tensor) -> tf.Tensor:
        """Returns rows, `ids.shape + [dim]`; each is read once, however often its id occurs.

        Args:
            ids: int32 or int64, any shape.
        """
        unique, position = tf.unique(tf.reshape(ids, [-1]))
        rows = tf.compat.v1.nn.embedding_lookup(self.shards, unique, partition_strategy="mod")
        return tf.gather(rows, tf.reshape(position, tf.shape(ids)))

    def scatter_update(self, slices: tf.IndexedSlices) -> None:
        """Sets rows."""
        count = len(self.shards)
        for number, shard in enumerate(self.shards):
            own = tf.where(slices.indices % count == number)[:, 0]
            ids = tf.gather(slices.indices, own) // count
            shard.scatter_update(tf.IndexedSlices(tf.gather(slices.values, own), ids))

    def read_value(self) -> tf.Tensor:
        """Returns the matrix."""
        count, rows = len(self.shards), self.shape[0]
        ids = [tf.range(number, rows, count) for number in range(count)]
        return tf.dynamic_stitch(ids, [shard.read_value() for shard in self.shards])

    def numpy(self) -> np.ndarray:
        """Returns the matrix."""
        return np.asarray(self.read_value())

    def assign(self, values: tf.Tensor | np.ndarray) -> None:
        """Sets the matrix."""
        for number, shard in enumerate(self.shards):
            shard.assign(values[number :: len(self.shards)])

    def fill_like(self, value: float, name: str) -> RowShards:
        """Returns another matrix of this shape, each shard beside the one of this matrix."""
        extended = tf.distribute.get_strategy().extended
        shards = []
        for shard in self.shards:
            with extended.colocate_vars_with(shard):
                fill = functools.partial(tf.fill, shard.shape, value)
                shards.append(tf.Variable(fill, trainable=False, name=name))
        return RowShards(shards)


Rows: TypeAlias = tf.Variable | RowShards | GrowingRows


def build_rows(rows: int, dim: int, name: str) -> Rows:
    """Returns a matrix of zeros; call it under the strategy's scope.

    Args:
        rows: Its rows.
        dim: Length of a row.
        name: Name of the variable.
    """
    strategy = tf.distribute.get_strategy()
    if not isinstance(strategy, ParameterServers):
        return tf.Variable(tf.zeros([rows, dim]), name=name)
    return build_row_shards(rows, dim, name, count_shards(rows, dim, strategy))


def build_row_shards(rows: int, dim: int, name: str, count: int) -> RowShards:
    """Returns a matrix of zeros in as many variables; none is on this machine as a whole."""
    sizes = [len(range(number, rows, count)) for number in range(count)]
    return RowShards(
        [
            tf.Variable(functools.partial(tf.zeros, [size, dim]), name=f"{name}/part_{number}")
            for number, size in enumerate(sizes)
        ]
    )


def count_shards(rows: int, dim: int, strategy: ParameterServers) -> int:
    """Returns how many servers a matrix is split over: all, unless it is small."""
    enough = rows * dim * tf.float32.size // MIN_SHARD_BYTES
    return max(1, min(enough, len(strategy.cluster.servers), rows))


def fill_like(rows: Rows, value: float, name: str) -> Rows:
    """Returns a matrix that is not trained, of the shape and in the place of another one."""
    if isinstance(rows, RowShards | GrowingRows):
        return rows.fill_like(value, name)
    return tf.Variable(tf.fill(rows.shape, value), trainable=False, name=name)


def list_variables(rows: Rows) -> list[tf.Variable]:
    """Returns the variables that a matrix lies in."""
    if isinstance(rows, GrowingRows):
        return [rows.variable]
    return rows.shards if isinstance(rows, RowShards) else [rows]

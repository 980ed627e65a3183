"""Matrices with a row for each key of a key space: whole, in two tiers, or one worker's part."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from training.embedding.key_index import FIRST_ROW
from training.embedding.placement.device_tier import NO_ROW, HostRows

if TYPE_CHECKING:
    from training.embedding.key_space import KeySpace


def list_copies(variable: tf.Variable) -> tuple[tf.Variable, ...]:
    """Returns the copy of a variable on each replica, outside of replicas."""
    if not isinstance(variable, tf.distribute.DistributedValues):
        return (variable,)
    return tuple(variable.distribute_strategy.experimental_local_results(variable))


class GrowingRows(tf.Module):
    """A matrix `[rows, dim]` in a variable that is longer, so that it grows in steps.

    Rows that no key has yet hold the first value in all places, and so does that of padding, which
    nothing trains.

    Args:
        keys: Whose rows they are.
        dim: Length of a row.
        name: Name of the variable.
        fill: First value.
        trainable: Whether the variable has gradients.
    """

    def __init__(
        self, keys: KeySpace, dim: int, name: str, *, fill: float = 0.0, trainable: bool = True
    ) -> None:
        super().__init__(name="growing_rows")
        self.keys, self.dim, self.fill = keys, dim, fill
        length = self.capacity if keys.tier is None else len(keys.tier.held)
        with tf.device("CPU:0") if keys.is_on_host else nullcontext():
            self.variable = tf.Variable(
                tf.fill([FIRST_ROW, dim], fill),
                shape=tf.TensorShape([None, dim]),
                trainable=trainable,
                name=name,
            )
            # Each process by itself: several would send the whole matrix from one to the others.
            for copy in self._copies:
                with tf.device(copy.device):
                    copy.assign(tf.fill([length, dim], fill))
        keys.join(self)

    @property
    def step_variable(self) -> tf.Variable:
        """The variable that a step looks rows up in, and that has gradients."""
        return self.variable

    @property
    def capacity(self) -> int:
        """Rows that memory is reserved for from the start."""
        return self.keys.capacity

    @property
    def most_rows(self) -> int | None:
        """Rows that there will ever be here, or None."""
        return None if self.keys.max_rows is None else self.keys.max_rows + FIRST_ROW

    @property
    def shape(self) -> tf.TensorShape:
        """Shape of the matrix as it is."""
        return tf.TensorShape([self.keys.row_count, self.dim])

    @property
    def dtype(self) -> tf.DType:
        """Type of a number."""
        return self.variable.dtype

    @property
    def bytes(self) -> int:
        """Memory that one copy takes, that for rows to come included."""
        return self.device_bytes

    @property
    def device_bytes(self) -> int:
        """The same of the device alone."""
        return int(read_length(self._copies[0])) * self.dim * self.dtype.size

    def gather(self, rows: tf.Tensor) -> tf.Tensor:
        """Returns rows as the steps so far have left them, outside of steps.

        Args:
            rows: int64, any shape.

        Returns:
            `rows.shape + [dim]`.
        """
        return tf.gather(self._copies[0], rows)

    def read_value(self) -> tf.Tensor:
        """Returns the matrix, without the rows that no key has."""
        copy = self._copies[0]
        return tf.gather(copy, tf.range(self.count_held(self.keys.row_count)))

    def count_held(self, rows: Any) -> Any:
        """Returns how many rows are here of so many in all, a number or a tensor."""
        return rows

    def numpy(self) -> np.ndarray:
        """Returns the matrix."""
        return np.asarray(self.read_value())

    def assign(self, values: tf.Tensor | np.ndarray) -> None:
        """Sets the matrix; the rows of other keys are cut off.

        Args:
            values: float32 `[rows, dim]`; the key space is set to as many rows by itself.
        """
        missing = max(0, self.capacity - len(values))
        padded = np.pad(values, ((0, missing), (0, 0)), constant_values=self.fill)
        for copy in self._copies:
            copy.assign(padded)

    def fill_like(self, value: float, name: str) -> GrowingRows:
        """Returns another matrix of the same keys and row length that is not trained."""
        return build_growing_rows(self.keys, self.dim, name, fill=value, trainable=False)

    @property
    def _copies(self) -> tuple[tf.Variable, ...]:
        return list_copies(self.variable)


class TieredRows(GrowingRows):
    """A matrix whose rows are in host memory, but for those that `keys.tier` has on the device.

    The variable is as long as the device has places. Args are those of `GrowingRows`.
    """

    def __init__(
        self, keys: KeySpace, dim: int, name: str, *, fill: float = 0.0, trainable: bool = True
    ) -> None:
        super().__init__(keys, dim, name, fill=fill, trainable=trainable)
        if keys.tier is None:
            raise ValueError("these keys have all rows on the device")
        self._tier, self._written = keys.tier, 0
        self._host = HostRows(keys.capacity, dim, fill, self.most_rows)
        keys.tier.add(self._host)

    @property
    def bytes(self) -> int:
        """Memory that the device's copy and the host's take."""
        return self.device_bytes + self._host.values.nbytes

    def gather(self, rows: tf.Tensor) -> tf.Tensor:
        """As `GrowingRows.gather`: from host memory."""
        self.write_back()
        return tf.constant(self._host.values[np.asarray(rows)])

    def read_value(self) -> tf.Tensor:
        """Returns the matrix, without the rows that no key has."""
        self.write_back()
        return tf.constant(self._host.values[: self.keys.row_count].copy())

    def assign(self, values: tf.Tensor | np.ndarray) -> None:
        """Sets the matrix; the device's places are empty then, those of all matrices.

        Args:
            values: float32 `[rows, dim]`; the key space is set to as many rows by itself.
        """
        self.keys.leave_device()
        self._host.reserve(len(values))
        self._host.values[: len(values)] = values
        for copy in self._copies:
            copy.scatter_update(tf.IndexedSlices(values[:FIRST_ROW], tf.range(FIRST_ROW)))

    def write_back(self) -> None:
        """Writes the rows on the device to host memory, where steps have run since."""
        if self._written == self._tier.swaps:
            return
        self._host.reserve(self.keys.row_count)
        places = np.flatnonzero(self._tier.held != NO_ROW)
        rows = tf.gather(self._copies[0], places)
        self._host.values[self._tier.held[places]] = rows.numpy()
        self._written = self._tier.swaps


class ShardedRows(GrowingRows):
    """The rows of a matrix that this worker owns; the others are at other workers.

    A step looks rows up in a matrix of its batch's distinct ones, which the workers have put
    together before. Args are those of `GrowingRows`; of optimizer state there is no such matrix.

    Attributes:
        owners: Who owns which rows.
        read_remote: Reads rows of all workers outside of steps, while they are served; else None.
    """

    def __init__(
        self, keys: KeySpace, dim: int, name: str, *, fill: float = 0.0, trainable: bool = True
    ) -> None:
        if keys.exchange is None:
            raise ValueError("one process holds all rows of these keys")
        self.owners = keys.exchange.owners
        self.read_remote: Callable[[np.ndarray], np.ndarray] | None = None
        super().__init__(keys, dim, name, fill=fill, trainable=False)
        self.batch_rows: tf.Variable | None = None
        if trainable:
            self.batch_rows = tf.Variable(
                tf.zeros([FIRST_ROW, dim]),
                shape=tf.TensorShape([None, dim]),
                name=f"{name}_of_batch",
            )

    @property
    def step_variable(self) -> tf.Variable:
        """The rows of the batch; of optimizer state those of this worker."""
        return self.variable if self.batch_rows is None else self.batch_rows

    @property
    def capacity(self) -> int:
        """As `GrowingRows.capacity`, of this worker."""
        return self.owners.count_most(self.keys.capacity)

    @property
    def most_rows(self) -> int | None:
        """As `GrowingRows.most_rows`, of this worker."""
        most = super().most_rows
        return None if most is None else self.owners.count_most(most)

    def count_held(self, rows: Any) -> Any:
        """As `GrowingRows.count_held`."""
        return self.owners.count_local(rows)

    def gather(self, rows: tf.Tensor) -> tf.Tensor:
        """As `GrowingRows.gather`, from all workers.

        Raises:
            RuntimeError: The other workers do not serve their rows now.
        """
        if self.read_remote is None:
            raise RuntimeError(f"the other workers do not serve their rows of {self.keys.label}")
        asked = np.asarray(rows)
        return tf.constant(self.read_remote(asked.ravel()).reshape(*asked.shape, self.dim))

    def read_own(self, rows: np.ndarray) -> np.ndarray:
        """Returns those rows that this worker owns, and zeros in place of the others.

        Args:
            rows: int64 `[n]`.
        """
        is_own = (rows >= FIRST_ROW) & (self.owners.find_owners(rows) == self.owners.index)
        here = np.where(is_own, self.owners.to_local(rows), 0)
        found = tf.gather(self._copies[0], here).numpy()
        return np.where(is_own[:, np.newaxis], found, np.float32(0.0))

    def assign(self, values: tf.Tensor | np.ndarray) -> None:
        """Sets the rows of this worker, given those of all."""
        self.assign_own(np.asarray(values)[self.owners.list_rows(len(values))])

    def assign_own(self, values: np.ndarray) -> None:
        """Sets the rows of this worker.

        Args:
            values: float32 `[rows here, dim]`, in the order of `RowOwners.list_rows`.
        """
        super().assign(values)


def build_growing_rows(
    keys: KeySpace, dim: int, name: str, *, fill: float = 0.0, trainable: bool = True
) -> GrowingRows:
    """Returns a matrix with a row for each key: whole, in two tiers, or one worker's part."""
    cls = GrowingRows if keys.tier is None else TieredRows
    if keys.exchange is not None:
        cls = ShardedRows
    return cls(keys, dim, name, fill=fill, trainable=trainable)


def read_length(variable: tf.Variable) -> tf.Tensor:
    """Returns the rows that a variable has now, int64 scalar."""
    return tf.raw_ops.VariableShape(input=variable.handle, out_type=tf.int64)[0]

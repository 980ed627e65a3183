"""Dynamic embedding tables: keys of any value get their rows when training meets them.

First values of a row are a function of seed, table and key, and of nothing else. The rows of a
table, and those of its optimizer state, are a matrix that grows with the keys: whole, in two tiers,
or one worker's part.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeAlias, cast

import numpy as np
import tensorflow as tf

from conf.schema import OOV_ID, PAD_ID
from conf.training.tables import Initializer, NormalConfig, UniformConfig
from etl.tfrecord.codec.kernels import inlined, kernel
from training.distribution.strategy import on_host
from training.embedding.device_tier import NO_ROW, DeviceTier, HostRows
from training.embedding.distinct_rows import BatchRows
from training.embedding.key_index import FIRST_ROW
from training.embedding.key_space import KeySpace
from training.embedding.static_table import (
    FIRST_VALUES,
    EmbeddingTable,
    RowUpdates,
    list_copies,
    read_rows,
)
from training.embedding.worker_rows import RowOwners

_TWO_PI = 2.0 * math.pi
_MOST_NUMBERS = 1 << 31  # Of one read: on a GPU a gather of many more fails.


def draw_first_rows(
    keys: np.ndarray,
    dim: int,
    *,
    seed: int,
    table: str,
    initializer: Initializer,
    has_oov: bool = True,
) -> np.ndarray:
    """Draws the first values of the rows of keys, float32 `[n, dim]`, each on its own.

    With `has_oov` key 1 is what encoders give to null: it starts at zeros, as the OOV row of a
    static table does.
    """
    rows = np.empty((len(keys), dim), np.float32)
    stream = np.int64((seed << 32 | zlib.crc32(table.encode())) & (1 << 63) - 1)
    keys = np.ascontiguousarray(keys, np.int64)
    if isinstance(initializer, UniformConfig):
        _fill_uniform(keys, stream, initializer.low, initializer.high, rows)
        # What is rounded up to float32 may reach the bound, which is left out.
        below = np.nextafter(np.float32(initializer.high), np.float32("-inf"))
        np.minimum(rows, below, out=rows)
    else:
        bound = np.inf if isinstance(initializer, NormalConfig) else 2.0
        _fill_normal(keys, stream, initializer.stddev, bound, rows)
    if has_oov:
        rows[keys == OOV_ID] = 0.0
    return rows


@inlined
def _mix(state):  # type: ignore[no-untyped-def]
    """The output function of SplitMix64 (Steele, Lea & Flood 2014, figure 17)."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


@inlined
def _uniform(state):  # type: ignore[no-untyped-def]
    """A number in `(0, 1]`, float64."""
    return (np.float64(np.int64(_mix(state) >> np.uint64(11))) + 1.0) * 2.0**-53


@kernel
def _fill_uniform(keys, stream, low, high, rows):  # type: ignore[no-untyped-def]
    gamma = np.uint64(0x9E3779B97F4A7C15)
    start = _mix(np.uint64(stream) + gamma)
    for i in range(len(keys)):
        state = _mix(_mix(np.uint64(keys[i]) + gamma) ^ start)
        for j in range(rows.shape[1]):
            state += gamma
            rows[i, j] = high - (high - low) * _uniform(state)


@kernel
def _fill_normal(keys, stream, stddev, bound, rows):  # type: ignore[no-untyped-def]
    """Pairs of normal numbers by the transform of Box & Muller 1958.

    A pair with a number beyond the bound, in standard deviations, is drawn again.
    """
    gamma = np.uint64(0x9E3779B97F4A7C15)
    dim, limit = rows.shape[1], bound * stddev
    start = _mix(np.uint64(stream) + gamma)
    for i in range(len(keys)):
        state = _mix(_mix(np.uint64(keys[i]) + gamma) ^ start)
        for j in range(0, dim, 2):
            one = other = np.inf
            while max(abs(one), abs(other)) >= limit:
                state += gamma
                radius = stddev * math.sqrt(-2.0 * math.log(_uniform(state)))
                state += gamma
                angle = _TWO_PI * _uniform(state)
                one, other = radius * math.cos(angle), radius * math.sin(angle)
            rows[i, j] = one
            if j + 1 < dim:
                rows[i, j + 1] = other


class GrowingRows(tf.Module):
    """A matrix `[rows, dim]` in a variable that is longer, so that it grows in steps.

    Rows that no key has yet hold the first value in all places, and so does that of padding, which
    nothing trains.
    """

    def __init__(
        self, keys: KeySpace, dim: int, name: str, *, fill: float = 0.0, trainable: bool = True
    ) -> None:
        super().__init__(name="growing_rows")
        self.keys, self.dim, self.fill = keys, dim, fill
        self.owners = RowOwners(0, 1) if keys.exchange is None else keys.exchange.owners
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
        return self.owners.count_most(self.keys.capacity)

    @property
    def most_rows(self) -> int | None:
        """Rows that there will ever be here, or None."""
        most = self.keys.max_rows
        return None if most is None else self.owners.count_most(most + FIRST_ROW)

    @property
    def shape(self) -> tf.TensorShape:
        return tf.TensorShape([self.keys.row_count, self.dim])

    @property
    def dtype(self) -> tf.DType:
        return self.variable.dtype

    @property
    def bytes(self) -> int:
        """Memory that one copy takes, that for rows to come and host memory included."""
        return self.device_bytes

    @property
    def device_bytes(self) -> int:
        return int(read_length(self._copies[0])) * self.dim * self.dtype.size

    def gather(self, rows: tf.Tensor) -> tf.Tensor:
        """Returns rows by number, `rows.shape + [dim]`, as the steps so far have left them."""
        return tf.gather(self._copies[0], rows)

    def read_value(self) -> tf.Tensor:
        """Returns the matrix, without the rows that no key has."""
        copy = self._copies[0]
        held, most = self.count_held(self.keys.row_count), _MOST_NUMBERS // self.dim
        pieces = [
            tf.gather(copy, tf.range(start, min(start + most, held), dtype=tf.int64))
            for start in range(0, held, most)
        ]
        return pieces[0] if len(pieces) == 1 else tf.concat(pieces, axis=0)

    def count_held(self, rows: Any) -> Any:
        """Returns how many rows are here of so many in all, a number or a tensor."""
        return self.owners.count_local(rows)

    def numpy(self) -> np.ndarray:
        return np.asarray(self.read_value())

    def assign(self, values: tf.Tensor | np.ndarray) -> None:
        """Sets the matrix, float32 `[rows, dim]`; the key space is set to as many by itself."""
        missing = max(0, self.capacity - len(values))
        padded = np.pad(values, ((0, missing), (0, 0)), constant_values=self.fill)
        for copy in self._copies:
            copy.assign(padded)

    @property
    def _copies(self) -> tuple[tf.Variable, ...]:
        return list_copies(self.variable)


class TieredRows(GrowingRows):
    """A matrix whose rows are in host memory, but for those that `keys.tier` has on the device.

    The variable is as long as the device has places.
    """

    def __init__(
        self, keys: KeySpace, dim: int, name: str, *, fill: float = 0.0, trainable: bool = True
    ) -> None:
        super().__init__(keys, dim, name, fill=fill, trainable=trainable)
        self._tier, self._written = cast(DeviceTier, keys.tier), 0
        self._host = HostRows(keys.capacity, dim, fill, self.most_rows)
        self._tier.add(self._host)

    @property
    def bytes(self) -> int:
        return self.device_bytes + self._host.values.nbytes

    def gather(self, rows: tf.Tensor) -> tf.Tensor:
        self.write_back()
        return tf.constant(self._host.values[np.asarray(rows)])

    def read_value(self) -> tf.Tensor:
        self.write_back()
        return tf.constant(self._host.values[: self.keys.row_count].copy())

    def assign(self, values: tf.Tensor | np.ndarray) -> None:
        """Sets the matrix; the device's places are empty then, those of all matrices."""
        self.keys.leave_device()
        self._host.reserve(len(values))
        self._host.values[: len(values)] = values
        for copy in self._copies:
            copy.scatter_update(tf.IndexedSlices(values[:FIRST_ROW], tf.range(FIRST_ROW)))

    def write_back(self) -> None:
        """Writes the rows on the device to host memory, where steps have run since."""
        if self._written == self._tier.swaps:
            return
        self._tier.wait()
        self._host.reserve(self.keys.row_count)
        places = np.flatnonzero(self._tier.held != NO_ROW)
        rows = tf.gather(self._copies[0], places)
        self._host.values[self._tier.held[places]] = rows.numpy()
        self._written = self._tier.swaps


class ShardedRows(GrowingRows):
    """The rows of a matrix that this worker owns; the others are at other workers.

    A step looks rows up in a matrix of its batch's distinct ones, which the workers have put
    together before; of optimizer state there is no such matrix. `read_remote` reads rows of all
    workers outside of steps, while they are served.
    """

    def __init__(
        self, keys: KeySpace, dim: int, name: str, *, fill: float = 0.0, trainable: bool = True
    ) -> None:
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
        return self.variable if self.batch_rows is None else self.batch_rows

    def gather(self, rows: tf.Tensor) -> tf.Tensor:
        """As `GrowingRows.gather`, from all workers, while they serve their rows."""
        if self.read_remote is None:
            raise RuntimeError(f"the other workers do not serve their rows of {self.keys.label}")
        asked = np.asarray(rows)
        return tf.constant(self.read_remote(asked.ravel()).reshape(*asked.shape, self.dim))

    def read_own(self, rows: np.ndarray) -> np.ndarray:
        """Returns those rows that this worker owns, and zeros in place of the others."""
        is_own = self.owners.are_own(rows)
        here = np.where(is_own, self.owners.to_local(rows), 0)
        found = tf.gather(self._copies[0], here).numpy()
        return np.where(is_own[:, np.newaxis], found, np.float32(0.0))

    def assign(self, values: tf.Tensor | np.ndarray) -> None:
        """Sets the rows of this worker, given those of all."""
        self.assign_own(np.asarray(values)[self.owners.list_rows(len(values))])

    def assign_own(self, values: np.ndarray) -> None:
        """Sets the rows of this worker, in the order of `RowOwners.list_rows`."""
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
    shape = tf.raw_ops.VariableShape(input=variable.handle, out_type=tf.int64)
    with on_host():
        return shape[0]


TableRows: TypeAlias = tf.Variable | GrowingRows


def fill_like(rows: TableRows, value: float, name: str) -> TableRows:
    """Returns a matrix that is not trained, of the shape and in the place of another one."""
    if isinstance(rows, GrowingRows):
        return build_growing_rows(rows.keys, rows.dim, name, fill=value, trainable=False)
    return tf.Variable(tf.fill(rows.shape, value), trainable=False, name=name)


def find_step_variable(rows: TableRows) -> tf.Variable:
    """Returns the variable that a step looks a matrix up in."""
    return rows.step_variable if isinstance(rows, GrowingRows) else rows


class DynamicTable(EmbeddingTable):
    """A trainable row for each key that training has met.

    Key 0 is padding. It and keys without a row (never met, or met when the table was full) read
    zeros that nothing trains. Tables of the same keys share them.
    """

    def __init__(
        self,
        name: str,
        keys: KeySpace,
        dim: int,
        *,
        seed: int,
        initializer: Initializer | None = FIRST_VALUES,
    ) -> None:
        tf.Module.__init__(self, name="dynamic_table")
        self.keys, self.dim, self.updates = keys, dim, RowUpdates()
        self.rows: GrowingRows = build_growing_rows(keys, dim, f"{name}/rows")
        self._label, self._seed, self._initializer = name, seed, initializer

    @property
    def vocabulary_size(self) -> int:
        return self.keys.row_count

    @property
    def variable(self) -> tf.Variable:
        return self.rows.step_variable

    @property
    def is_drawn(self) -> bool:
        return self._initializer is not None

    def draw_rows(self, keys: np.ndarray) -> np.ndarray:
        """Returns the first values of keys' rows, float32 `[keys, dim]`."""
        if self._initializer is None:
            return np.zeros((len(keys), self.dim), np.float32)
        return draw_first_rows(
            keys, self.dim, seed=self._seed, table=self._label, initializer=self._initializer
        )

    def lookup(self, ids: tf.Tensor, rows: BatchRows | None = None) -> tf.Tensor:
        """Returns the rows of keys, zeros (and no gradient) for padding and where there is none.

        In a step `ids` are the numbers of rows, of a table in two tiers places on the device.
        """
        places = ids if rows is not None else self.keys.find(ids)
        mask = tf.cast(tf.greater(places, OOV_ID), tf.float32)
        return self._gather(places, rows) * mask[..., tf.newaxis]

    def gather(self, ids: tf.Tensor, rows: BatchRows | None = None) -> tf.Tensor:
        """As `lookup`, but padding may have gradients: for callers that weight it by zero."""
        return self._gather(ids if rows is not None else self.keys.find(ids), rows)

    def _gather(self, places: tf.Tensor, rows: BatchRows | None) -> tf.Tensor:
        if rows is None and self.keys.is_in_parts:
            return self._mask_refused(self.rows.gather(places), places)
        return super().gather(places, rows)

    def read_by_key(self) -> tuple[np.ndarray, np.ndarray]:
        keys, values = self.keys.read_keys(), self.rows.numpy()
        taken = np.flatnonzero(keys != PAD_ID)
        return keys[taken], values[taken + FIRST_ROW]

    def read_rows(self, rows: tf.Tensor) -> tf.Tensor:
        return self.rows.gather(rows)

    def _read(self, variable: tf.Variable, ids: tf.Tensor) -> tf.Tensor:
        return self._mask_refused(read_rows(variable, ids), ids)

    def _mask_refused(self, values: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
        if self.keys.max_rows is None and not self.keys.is_ruled:  # Each key of a step has a row.
            return values
        return values * tf.cast(tf.greater(ids, OOV_ID), tf.float32)[..., tf.newaxis]

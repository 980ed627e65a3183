"""Dynamic embedding tables: keys of any value get their rows when training meets them.

First values of a row are a function of seed, table and key, and of nothing else.
"""

from __future__ import annotations

import math
import zlib

import numpy as np
import tensorflow as tf

from conf.schema import OOV_ID, PAD_ID
from conf.training.tables import Initializer, NormalConfig, UniformConfig
from etl.tfrecord.reading import inlined, kernel
from training.embedding.growing_rows import GrowingRows, build_growing_rows
from training.embedding.key_index import FIRST_ROW
from training.embedding.key_space import KeySpace, is_reading_rows
from training.embedding.static_table import (
    FIRST_VALUES,
    EmbeddingTable,
    RowUpdates,
    read_rows,
)

_TWO_PI = 2.0 * math.pi


def draw_first_rows(
    keys: np.ndarray,
    dim: int,
    *,
    seed: int,
    table: str,
    initializer: Initializer,
    has_oov: bool = True,
) -> np.ndarray:
    """Draws the first values of rows, each key's on its own.

    Args:
        keys: int64 `[n]`.
        dim: Length of a row.
        seed: The run's seed.
        table: Name of the table.
        initializer: Their distribution.
        has_oov: Whether key 1 is what encoders give to null: it starts at zeros then, as the OOV
            row of a static table does.

    Returns:
        float32 `[n, dim]`.
    """
    rows = np.empty((len(keys), dim), np.float32)
    stream = np.int64((seed << 32 | zlib.crc32(table.encode())) & (1 << 63) - 1)
    keys = np.ascontiguousarray(keys, np.int64)
    if isinstance(initializer, UniformConfig):
        _fill_uniform(keys, stream, initializer.low, initializer.high, has_oov, rows)
        # What is rounded up to float32 may reach the bound, which is left out.
        below = np.nextafter(np.float32(initializer.high), np.float32("-inf"))
        is_oov = has_oov & (keys == OOV_ID)
        return np.where(is_oov[:, None], rows, np.minimum(rows, below))
    bound = np.inf if isinstance(initializer, NormalConfig) else 2.0
    _fill_rows(keys, stream, initializer.stddev, bound, has_oov, rows)
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
def _fill_uniform(keys, stream, low, high, has_oov, rows):  # type: ignore[no-untyped-def]
    """Numbers in `[low, high)`."""
    gamma = np.uint64(0x9E3779B97F4A7C15)
    start = _mix(np.uint64(stream) + gamma)
    for i in range(len(keys)):
        if has_oov and keys[i] == OOV_ID:
            rows[i, :] = 0.0
            continue
        state = _mix(_mix(np.uint64(keys[i]) + gamma) ^ start)
        for j in range(rows.shape[1]):
            state += gamma
            rows[i, j] = high - (high - low) * _uniform(state)


@kernel
def _fill_rows(keys, stream, stddev, bound, has_oov, rows):  # type: ignore[no-untyped-def]
    """Pairs of normal numbers by the transform of Box & Muller 1958.

    A pair with a number beyond the bound, in standard deviations, is drawn again.
    """
    gamma = np.uint64(0x9E3779B97F4A7C15)
    dim, limit = rows.shape[1], bound * stddev
    start = _mix(np.uint64(stream) + gamma)
    for i in range(len(keys)):
        if has_oov and keys[i] == OOV_ID:
            rows[i, :] = 0.0
            continue
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


class DynamicTable(EmbeddingTable):
    """A trainable row for each key that training has met.

    Key 0 is padding. It and keys without a row (never met, or met when the table was full) read
    zeros that nothing trains.

    Args:
        name: Name of the table.
        keys: Its keys; tables of the same keys share them.
        dim: Length of a row.
        seed: Seed of the first values.
        initializer: Distribution of the first values; None starts at zeros.
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
        """Rows that training has come to, those of padding and of unknown keys included."""
        return self.keys.row_count

    @property
    def variable(self) -> tf.Variable:
        """The variable that a step looks rows up in."""
        return self.rows.step_variable

    @property
    def is_drawn(self) -> bool:
        """Whether rows start at draws, and not at zeros."""
        return self._initializer is not None

    def draw_rows(self, keys: np.ndarray) -> np.ndarray:
        """Returns the first values of keys' rows, float32 `[keys, dim]`."""
        if self._initializer is None:
            return np.zeros((len(keys), self.dim), np.float32)
        return draw_first_rows(
            keys, self.dim, seed=self._seed, table=self._label, initializer=self._initializer
        )

    def lookup(self, ids: tf.Tensor) -> tf.Tensor:
        """Returns the rows of keys, zeros (and no gradient) for padding and where there is none.

        Args:
            ids: Keys of any shape; in a step, their rows.

        Returns:
            float32 `ids.shape + [dim]`.
        """
        rows = self.keys.find(ids)
        mask = tf.cast(tf.greater(rows, OOV_ID), tf.float32)
        return super().gather(rows) * mask[..., tf.newaxis]

    def gather(self, ids: tf.Tensor) -> tf.Tensor:
        """As `lookup`, but padding may have gradients: for callers that weight it by zero."""
        return super().gather(self.keys.find(ids))

    def read_by_key(self) -> tuple[np.ndarray, np.ndarray]:
        """As `EmbeddingTable.read_by_key`, in the order of the rows."""
        keys, values = self.keys.read_keys(), self.rows.numpy()
        taken = np.flatnonzero(keys != PAD_ID)
        return keys[taken], values[taken + FIRST_ROW]

    def read_rows(self, rows: tf.Tensor) -> tf.Tensor:
        """As `EmbeddingTable.read_rows`."""
        return self.rows.gather(rows)

    def _read(self, variable: tf.Variable, ids: tf.Tensor) -> tf.Tensor:
        is_elsewhere = self.keys.is_in_parts and not is_reading_rows()
        values = self.rows.gather(ids) if is_elsewhere else read_rows(variable, ids)
        if not self.keys.may_refuse:  # Then every key of a step has a row of its own.
            return values
        return values * tf.cast(tf.greater(ids, OOV_ID), tf.float32)[..., tf.newaxis]

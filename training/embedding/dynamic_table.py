"""A dynamic embedding table: keys of any value, which get their rows when training meets them."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from conf.schema import OOV_ID
from training.embedding.first_rows import draw_first_rows
from training.embedding.growing_rows import GrowingRows
from training.embedding.key_space import KeySpace
from training.embedding.row_shards import RowShards
from training.embedding.table import EmbeddingTable, read_rows


class DynamicTable(EmbeddingTable):
    """A trainable row for each key that training has met.

    Key 0 is padding. It and keys without a row (never met, or met when the table was full) read
    zeros that nothing trains.

    Args:
        name: Name of the table.
        keys: Its keys; tables of the same keys share them.
        dim: Length of a row.
        seed: Seed of the first values.
        stddev: Standard deviation of the first values; None starts at zeros.
    """

    def __init__(
        self, name: str, keys: KeySpace, dim: int, *, seed: int, stddev: float | None = 0.05
    ) -> None:
        tf.Module.__init__(self, name="dynamic_table")
        self.keys, self.dim = keys, dim
        self.rows = GrowingRows(keys, dim, f"{name}/rows")
        self._label, self._seed, self._stddev = name, seed, stddev

    @property
    def vocabulary_size(self) -> int:
        """Rows that training has come to, those of padding and of unknown keys included."""
        return self.keys.row_count

    @property
    def variable(self) -> tf.Variable:
        """The variable that holds the rows, and memory for more."""
        return self.rows.variable

    @property
    def is_drawn(self) -> bool:
        """Whether rows start at draws, and not at zeros."""
        return self._stddev is not None

    def draw_rows(self, keys: np.ndarray) -> np.ndarray:
        """Returns the first values of keys' rows, float32 `[keys, dim]`."""
        if self._stddev is None:
            return np.zeros((len(keys), self.dim), np.float32)
        return draw_first_rows(
            keys, self.dim, seed=self._seed, table=self._label, stddev=self._stddev
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

    def _read(self, variable: tf.Variable | RowShards, ids: tf.Tensor) -> tf.Tensor:
        values = read_rows(variable, ids)
        if self.keys.max_rows is None:  # Then every key of a step has a row of its own.
            return values
        return values * tf.cast(tf.greater(ids, OOV_ID), tf.float32)[..., tf.newaxis]

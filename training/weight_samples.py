"""What histograms of a model's weights are made of: dense weights, and norms of tables' rows."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from conf.schema import PAD_ID
from training.embedding.table import read_rows
from training.models.base import RetrievalModel

PIECE_ROWS = 1 << 16


def read_weight_samples(model: RetrievalModel, sampled_rows: int) -> dict[str, tf.Tensor]:
    """Returns the values that histograms show, by tag.

    Args:
        model: The model.
        sampled_rows: Rows read of a table that has more: every n-th, always the same ones, so
            the cost does not grow with the vocabulary.

    Returns:
        `weights/<name>`: a dense weight as it is; `row_norms/<table>`: Euclidean norms of rows,
        float32 `[rows]`, padding left out.
    """
    samples = {f"weights/{v.name.partition(':')[0]}": tf.convert_to_tensor(v)
               for v in model.dense_variables}  # fmt: skip
    for name, table in sorted(model.tables.items()):
        ids = sample_ids(table.vocabulary_size, sampled_rows)
        norms = [
            tf.norm(tf.cast(read_rows(table.variable, tf.constant(piece)), tf.float32), axis=1)
            for piece in np.split(ids, range(PIECE_ROWS, len(ids), PIECE_ROWS))
        ]
        samples[f"row_norms/{name}"] = tf.concat(norms, axis=0)
    return samples


def sample_ids(vocabulary_size: int, count: int) -> np.ndarray:
    """Returns at most `count` ids, evenly spread over a vocabulary without its padding, rising."""
    first = PAD_ID + 1
    rows = vocabulary_size - first
    if rows <= count:
        return np.arange(first, vocabulary_size, dtype=np.int64)
    return first + np.arange(count, dtype=np.int64) * rows // count

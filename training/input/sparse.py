"""Ids with weights beside them, as sparse rows."""

from __future__ import annotations

import tensorflow as tf

from conf.manifest import Manifest
from conf.operations import SparseIndices, Weights
from conf.place import Place
from training.vocabularies import read_plan


def find_sparse_pairs(version_dir: Place, manifest: Manifest) -> dict[str, str]:
    """Finds the features that are the two halves of sparse rows.

    The encoders tell: weights are made from the columns of weights and, behind these, the very
    columns of ids that the indices are made from.

    Args:
        version_dir: Directory of the dataset version.
        manifest: Its manifest.

    Returns:
        Feature of the weights by feature of the indices.
    """
    plan = read_plan(version_dir, manifest)
    names = set(manifest.schema.names)
    columns = [column for column in plan.columns if column.feature in names]
    weights = {
        tuple(c.name for c in column.inputs[len(column.inputs) // 2 :]): column.feature
        for column in columns
        if isinstance(column.operation, Weights)
    }
    found = {}
    for column in columns:
        ids = tuple(c.name for c in column.inputs) or (column.column,)
        is_indices = isinstance(column.operation, SparseIndices)
        if (is_indices or manifest.schema[column.feature].vocabulary_size) and ids in weights:
            found[column.feature] = weights[ids]
    return found


def build_sparse(ids: tf.RaggedTensor, weights: tf.RaggedTensor, size: int) -> tf.SparseTensor:
    """Builds sparse rows as `tf.io.SparseFeature` does.

    Args:
        ids: int64 `[batch, (len)]`, each in [0, size).
        weights: float32 `[batch, (len)]`, as many as there are ids.
        size: Length of a dense row.

    Returns:
        `[batch, size]`, in row-major order; an id that a row holds twice is there twice.
    """
    same = tf.debugging.assert_equal(
        ids.row_splits, weights.row_splits, "as many weights as ids are needed in each row"
    )
    with tf.control_dependencies([same]):
        rows = ids.value_rowids()
    indices = tf.stack([rows, ids.values], axis=1)
    shape = tf.stack([ids.nrows(), tf.constant(size, tf.int64)])
    return tf.sparse.reorder(tf.SparseTensor(indices, weights.values, shape))

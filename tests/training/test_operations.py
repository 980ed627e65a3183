"""Operations on tensors by hand-made cases; their equality with the ETL is a contract test."""

from __future__ import annotations

import tensorflow as tf

from conf.operations import Hash, SparseIndices, Weights
from training.operations import RawValues, Resources, apply_operation, scale_weights

NOTHING = Resources({}, {})


def raw(rows: list, pads: list | None = None, kind: tf.DType = tf.int64) -> RawValues:
    values = tf.constant(rows, kind)
    none = tf.zeros_like(values, tf.bool)
    return RawValues(values, none, none if pads is None else tf.constant(pads))


def test_merged_indices_close_up_over_padding() -> None:
    first = raw([[1, 0], [2, 3]], [[False, True], [False, False]])
    second = raw([[0], [9]], [[False], [False]])
    found = apply_operation(SparseIndices((5, 4)), [first, second], NOTHING)
    assert found.numpy().tolist() == [[3, 7, 0], [4, 5, 1]]


def test_weights_are_kept_where_ids_are() -> None:
    weights = raw([[0.5, 9.0], [1.0, 3.0]], [[False, False]] * 2, tf.float32)
    ids = raw([[1, 0], [1, 2]], [[False, True], [False, False]])
    found = apply_operation(Weights(), [weights, ids], NOTHING)
    assert found.numpy().tolist() == [[0.5, 0.0], [1.0, 3.0]]
    assert scale_weights(found).numpy().tolist() == [[1.0, 0.0], [0.25, 0.75]]


def test_padding_wins_over_null_and_both_over_values() -> None:
    values = tf.constant([["a", "b", "c"]])
    marks = RawValues(
        values, tf.constant([[False, True, True]]), tf.constant([[False, False, True]])
    )
    ((known, null, pad),) = apply_operation(Hash(10), [marks], NOTHING).numpy()
    assert (null, pad) == (1, 0)
    assert known == tf.strings.to_hash_bucket_fast(tf.constant("a"), 10).numpy() + 2

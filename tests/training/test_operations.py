"""Operations on tensors by hand-made cases; their equality with the ETL is a contract test."""

from __future__ import annotations

import tensorflow as tf

from conf.operations import Cross, Hash, SparseIndices, Weights
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


def test_lists_of_no_width_have_no_combinations() -> None:
    nothing, ids = tf.zeros([2, 0], tf.int64), raw([[1, 2], [3, 0]], [[False] * 2, [False, True]])
    empty = RawValues(nothing, tf.zeros_like(nothing, tf.bool), tf.zeros_like(nothing, tf.bool))
    for lists in ([empty, ids], [ids, empty], [empty, empty]):
        assert apply_operation(Cross(9), lists, NOTHING).shape == (2, 0)


def test_combinations_of_a_shorter_row_are_padded() -> None:
    first = raw([[1, 2], [3, 0]], [[False] * 2, [False, True]])
    second = raw([[7, 8], [7, 8]], [[False] * 2] * 2)
    found = apply_operation(Cross(1000), [first, second], NOTHING)
    texts = [[f"{a}\x1f{b}" for a in row for b in (7, 8)] for row in ((1, 2), (3,))]
    wide = [tf.strings.to_hash_bucket_fast(row, 1000).numpy() + 2 for row in texts]
    assert found.numpy().tolist() == [wide[0].tolist(), [*wide[1].tolist(), 0, 0]]


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

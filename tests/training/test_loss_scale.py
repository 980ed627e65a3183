from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from training.loss_scale import LossScale, are_finite


def adapt(scale: LossScale, *finite: bool) -> list[float]:
    found = []
    for flag in finite:
        scale.adapt(tf.distribute.get_strategy(), tf.constant(flag))
        found.append(float(scale.scale))
    return found


def test_halves_at_once_and_doubles_after_finite_steps_in_a_row() -> None:
    scale = LossScale(8.0, 3)
    assert adapt(scale, True, True, False, True, True, True, True) == [8, 8, 4, 4, 4, 8, 8]


def test_stays_between_one_and_the_largest_float() -> None:
    assert adapt(LossScale(1.0, 9), False, False) == [1, 1]
    largest = 2.0**127
    assert adapt(LossScale(largest, 1), True) == [largest]


def test_unscale_divides_all_kinds_of_gradients() -> None:
    slices = tf.IndexedSlices(tf.constant([[8.0]]), tf.constant([3]), [5, 1])
    rows, none, dense = LossScale(4.0, 1).unscale([slices, None, tf.constant([2.0])])
    assert none is None
    assert (rows.indices.numpy().tolist(), rows.values.numpy().tolist()) == ([3], [[2.0]])
    np.testing.assert_array_equal(dense, [0.5])


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_one_number_that_is_not_finite_is_found(bad: float) -> None:
    fine = [tf.zeros([2]), None, tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]))]
    assert bool(are_finite(fine))
    rows = tf.IndexedSlices(tf.constant([[1.0, bad]]), tf.constant([0]))
    assert not bool(are_finite([*fine, rows]))
    assert not bool(are_finite([tf.constant([bad]), *fine]))

from __future__ import annotations

import time

import numpy as np
import pytest
import tensorflow as tf

from training.step import build_run_steps


class Sum:
    """A step that adds up what it is given."""

    def __init__(self) -> None:
        self.total = tf.Variable(0.0)

    def __call__(self, batch: dict[str, tf.Tensor]) -> tf.Tensor:
        self.total.assign_add(batch["x"])
        return batch["x"]


def test_runs_exactly_the_asked_steps() -> None:
    step = Sum()
    run_steps = build_run_steps(tf.distribute.get_strategy(), step)  # type: ignore[arg-type]
    iterator = iter(tf.data.Dataset.from_tensor_slices({"x": [1.0, 2.0, 3.0, 4.0, 5.0]}))
    assert run_steps(iterator, tf.constant(2)).losses.numpy().tolist() == [1.0, 2.0]
    assert run_steps(iterator, tf.constant(3)).losses.numpy().tolist() == [3.0, 4.0, 5.0]
    assert float(step.total) == 15.0
    with pytest.raises(tf.errors.OutOfRangeError):
        run_steps(iterator, tf.constant(1))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_stops_after_the_first_loss_that_is_not_finite(bad: float) -> None:
    step = Sum()
    run_steps = build_run_steps(tf.distribute.get_strategy(), step)  # type: ignore[arg-type]
    iterator = iter(tf.data.Dataset.from_tensor_slices({"x": [1.0, bad, 3.0, 4.0]}))
    losses = run_steps(iterator, tf.constant(4)).losses.numpy()
    np.testing.assert_array_equal(losses, [1.0, bad])
    assert float(next(iterator)["x"]) == 3.0


def test_measures_the_wait_for_slow_input() -> None:
    def slow(x: tf.Tensor) -> tf.Tensor:
        return tf.numpy_function(lambda value: time.sleep(0.05) or value, [x], tf.float32)

    dataset = tf.data.Dataset.from_tensor_slices({"x": [1.0, 2.0, 3.0]})
    dataset = dataset.map(lambda row: {"x": tf.ensure_shape(slow(row["x"]), [])})
    run_steps = build_run_steps(tf.distribute.get_strategy(), Sum())  # type: ignore[arg-type]
    waited = float(run_steps(iter(dataset), tf.constant(3)).wait_s)
    assert 0.15 <= waited < 5

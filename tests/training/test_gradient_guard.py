from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from conf.training import DevicesConfig
from training.gradient_guard import GradientGuard
from training.strategy import build_strategy


class Kept:
    """Optimizers that keep what they are given."""

    def __init__(self) -> None:
        self.step = tf.Variable(3)
        self.variables_in_step_order = [self.step]
        self.given: list[Any] = []

    def apply(self, gradients: list[Any], known: Any = None) -> None:
        self.given.append(gradients)


def rows(value: float) -> tf.IndexedSlices:
    return tf.IndexedSlices(tf.constant([[1.0], [value]]), tf.constant([0, 4]))


@pytest.mark.parametrize(
    ("gradients", "finite"),
    [
        ([tf.constant([1.0, -1e38]), rows(2.0), None], True),
        ([None], True),
        ([], True),
        ([tf.constant([1.0, np.nan]), rows(2.0)], False),
        ([tf.constant([1.0]), rows(np.inf)], False),
    ],
)
def test_the_loss_is_nan_where_a_gradient_is_not_finite(gradients: list, finite: bool) -> None:
    kept = Kept()
    guard = GradientGuard(kept)  # type: ignore[arg-type]
    assert guard.step is kept.step
    assert guard.variables_in_step_order is kept.variables_in_step_order

    def step(batch: dict[str, tf.Tensor]) -> tf.Tensor:
        guard.apply(gradients)
        return batch["x"]

    loss = float(guard.watch(step)({"x": tf.constant(0.5)}))
    assert loss == 0.5 if finite else np.isnan(loss)
    assert kept.given == [gradients]


@pytest.mark.parametrize("bad", [0, 1])
def test_each_replica_answers_for_its_own_gradients(bad: int) -> None:
    guard = GradientGuard(Kept())  # type: ignore[arg-type]
    strategy = build_strategy(DevicesConfig(cpu_replicas=2))

    def step(batch: dict[str, tf.Tensor]) -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        is_bad = tf.equal(context.replica_id_in_sync_group, bad)
        guard.apply([tf.where(is_bad, np.nan, 1.0)])
        context.merge_call(lambda strategy: None)  # the other replica is traced up to here
        return tf.constant(0.5)

    shares = tf.function(lambda: strategy.run(guard.watch(step), args=({},)))()
    losses = [float(share) for share in strategy.experimental_local_results(shares)]
    assert np.isnan(losses[bad])
    assert losses[1 - bad] == 0.5

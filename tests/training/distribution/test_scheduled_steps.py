"""The chief's loop over a coordinator that runs steps in this process."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from conf.errors import InternalError
from tests.training.processes import find_addresses
from training.distribution import scheduled_steps as steps_module
from training.distribution.cluster import ServerCluster
from training.distribution.scheduled_steps import STEPS_PER_WORKER, ScheduledSteps


class Coordinator:
    """Runs a step when its result is asked for; `behave` may raise or wait then."""

    def __init__(self, strategy: Any) -> None:
        self.cause: Exception | None = None
        self.under_way = self.most_under_way = 0

    def schedule(self, step: Any, args: Any) -> Any:
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)

        def fetch() -> float:
            loss = behave(float(step(*args)))
            self.under_way -= 1
            return loss

        return SimpleNamespace(fetch=fetch)

    def join(self) -> None:
        if self.cause is not None:
            raise self.cause


behave: Callable[[float], float]


@pytest.fixture(autouse=True)
def coordinated(monkeypatch: pytest.MonkeyPatch) -> None:
    global behave
    behave = lambda loss: loss  # noqa: E731
    monkeypatch.setattr(tf.distribute.coordinator, "ClusterCoordinator", Coordinator)
    monkeypatch.setattr(steps_module, "POLL_S", 0.05)


class Count:
    """Optimizers, as far as they count."""

    def __init__(self) -> None:
        self.step = tf.Variable(7, dtype=tf.int64)

    def set_step(self, step: int) -> None:
        self.step.assign(step)


def build_steps(timeout_s: float = 60.0) -> tuple[ScheduledSteps, Count]:
    chief, worker, server = find_addresses(3)  # Nobody listens there.
    strategy = SimpleNamespace(
        cluster=ServerCluster(chief, (worker,), (server,), "chief", 0),
        timeout_s=timeout_s,
        run=lambda step, args: step(*args),
    )
    count = Count()
    return ScheduledSteps(strategy, lambda batch: batch * 2.0, count), count


def iterate(losses: list[float]) -> Any:
    return iter(tf.data.Dataset.from_tensor_slices(np.array(losses, np.float32)))


def test_losses_come_in_the_order_of_the_batches() -> None:
    run_steps, count = build_steps()
    iterator = iterate(list(range(20)))
    result = run_steps(iterator, tf.constant(15))
    np.testing.assert_array_equal(result.losses, np.arange(15) * 2.0)
    assert int(count.step) == 7 + 15
    assert float(result.wait_s) >= 0
    assert float(iterator.get_next()) == 15  # No batch was read in vain.
    assert 1 < run_steps._coordinator.most_under_way <= STEPS_PER_WORKER
    assert run_steps._coordinator.under_way == 0
    with pytest.raises(tf.errors.OutOfRangeError):
        run_steps(iterator, tf.constant(15))


def test_nothing_is_given_out_after_a_loss_that_is_not_finite() -> None:
    run_steps, count = build_steps()
    iterator = iterate([1, 2, math.nan, *range(4, 100)])
    result = run_steps(iterator, tf.constant(90))
    np.testing.assert_array_equal(result.losses, [2, 4, math.nan])
    assert int(count.step) == 7 + 3
    assert run_steps._coordinator.under_way == 0
    assert float(iterator.get_next()) <= 4 + STEPS_PER_WORKER


def test_the_cause_of_a_failure_is_raised() -> None:
    global behave

    def fail(loss: float) -> float:
        raise tf.errors.CancelledError(None, None, "what followed")

    behave = fail
    run_steps, _ = build_steps()
    run_steps._coordinator.cause = tf.errors.UnavailableError(None, None, "the cause")
    with pytest.raises(tf.errors.UnavailableError, match="the cause"):
        run_steps(iterate([1.0]), tf.constant(1))


def test_it_does_not_wait_for_ever_where_a_worker_is_gone() -> None:
    global behave
    held = threading.Event()

    def hang(loss: float) -> float:
        held.wait(30)
        return loss

    behave = hang
    run_steps, _ = build_steps(timeout_s=0.1)
    with pytest.raises(InternalError, match="no step has ended since"):
        run_steps(iterate([1.0]), tf.constant(1))
    held.set()

"""Whole runs by configs of steps that the defaults leave out."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from conf.training.optimizer import OptimizerConfig
from tests.machine import some_of
from tests.training.toy_models import ToyModel, build_toy_batches, squared_error
from training.distribution.strategy import build_prefetching_steps, build_run_steps
from training.input.batches import Batch
from training.loop.optimizers import Optimizers
from training.loop.step import StepOptions, TrainStep, split_batch
from training.networks.network import StepContext


class Sum:
    """A step that adds up what it is given."""

    def __init__(self) -> None:
        self.total = tf.Variable(0.0)

    def __call__(self, batch: dict[str, tf.Tensor]) -> tf.Tensor:
        self.total.assign_add(batch["x"])
        return batch["x"]


BUILDS = {
    "plain": lambda step: build_run_steps(tf.distribute.get_strategy(), step),
    "ahead": lambda step: build_prefetching_steps(step, "CPU:0"),
}


@pytest.mark.parametrize("build", BUILDS)
def test_runs_the_asked_steps_and_stops_a_step_after_a_loss_that_is_not_finite(build: str) -> None:
    step = Sum()
    run_steps = BUILDS[build](step)
    iterator = iter(tf.data.Dataset.from_tensor_slices({"x": [1.0, 2, 3, 4, 5, np.inf, 6, 7]}))
    assert run_steps(iterator, tf.constant(2)).losses.numpy().tolist() == [1.0, 2.0]
    assert run_steps(iterator, tf.constant(3)).losses.numpy().tolist() == [3.0, 4.0, 5.0]
    assert float(step.total) == 15.0
    assert run_steps(iterator, tf.constant(3)).losses.numpy().tolist() == [np.inf, 6.0]
    left = 0 if build == "ahead" else 1  # One more was fetched.
    with pytest.raises(tf.errors.OutOfRangeError):
        run_steps(iterator, tf.constant(left + 1))


ONE_THREAD = """
import tensorflow as tf

tf.config.threading.set_inter_op_parallelism_threads(1)
from tests.training.fake_clock import FakeClock
from training.distribution.strategy import build_run_steps

clock = FakeClock()
tf.timestamp = clock.read
data = tf.data.Dataset.range(100).map(lambda n: {"x": clock.spend(tf.cast(n, tf.float32), 0.25)})
options = tf.data.Options()
options.experimental_optimization.inject_prefetch = False
rows = iter(data.with_options(options))
run_steps = build_run_steps(
    tf.distribute.get_strategy(), lambda batch: clock.spend(batch["x"], 10.0, stateful=False)
)
print(float(run_steps(rows, tf.constant(40)).wait_s))
"""


def test_the_wait_is_that_for_input_and_not_what_one_thread_computes() -> None:
    found = subprocess.run(
        [sys.executable, "-c", ONE_THREAD], capture_output=True, text=True, check=True
    )
    assert float(found.stdout) == 40 * 0.25


def train(
    steps: int = 4,
    *,
    rows: int = 12,
    optimizer: dict[str, object] | None = None,
    options: StepOptions | None = None,
    l2: float | None = None,
    objective: Callable[..., tf.Tensor] = squared_error,
) -> tuple[ToyModel, Optimizers, list[float]]:
    """Trains a small model; returns it, its optimizers and the losses."""
    options = options or StepOptions(seed=1)
    model = ToyModel(dtype=options.dtype, l2=l2)
    config = OptimizerConfig.model_validate({"learning_rate": 0.02, **(optimizer or {})})
    optimizers = Optimizers(config, model, 10)
    step = TrainStep(model, objective, optimizers, options)
    run_steps = build_run_steps(tf.distribute.get_strategy(), step)
    batches = iter(build_toy_batches(rows))
    losses = [float(run_steps(batches, tf.constant(1)).losses[0]) for _ in range(steps)]
    return model, optimizers, losses


def weights(model: ToyModel) -> list[np.ndarray]:
    return [variable.numpy() for variable in model.trainable_variables]


@pytest.mark.parametrize(
    ("parts", "kind"),
    some_of(itertools.product([2, 3, 6], ["adam", "adagrad"]), [(6, "adam"), (3, "adagrad")]),
)
def test_parts_of_a_batch_train_as_the_whole(parts: int, kind: str) -> None:
    config = {"epsilon": 1e-4, "sparse": {"kind": kind}, "clip_norm": 0.5}
    whole, _, losses = train(optimizer=config, l2=0.01)
    cut, optimizers, found = train(optimizer={**config, "accumulate_steps": parts}, l2=0.01)
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    for a, b in zip(weights(whole), weights(cut), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert int(optimizers.step) == 4  # a step is an update, in however many parts


def kinds_of_values(rows: list[int]) -> Batch:
    """Dense, ragged and sparse columns that all tell which rows they hold."""
    sparse = tf.sparse.from_dense([[row + 1, 0, row + 1] for row in rows])
    ragged = tf.ragged.constant([[row] * (row % 3) for row in rows], dtype=tf.int64)
    return {"dense": tf.constant(rows), "ragged": ragged, "sparse": sparse}


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_parts_hold_the_same_rows_on_any_number_of_replicas(replicas: int) -> None:
    found: list[list[int]] = [[], [], []]
    for rows in np.split(np.arange(24), replicas):
        for part, cut in enumerate(split_batch(kinds_of_values(rows.tolist()), 3)):
            own = cut["dense"].numpy().tolist()
            found[part] += own
            expected = kinds_of_values(own)
            assert cut["ragged"].to_list() == expected["ragged"].to_list()
            np.testing.assert_array_equal(
                tf.sparse.to_dense(cut["sparse"]), tf.sparse.to_dense(expected["sparse"])
            )
    assert found == [list(range(part, 24, 3)) for part in range(3)]


def test_each_part_has_a_seed_of_its_own() -> None:
    seeds: list[list[int]] = []

    def objective(model: ToyModel, batch: Batch, training: StepContext) -> tf.Tensor:
        tf.py_function(lambda s: seeds.append(s.numpy().tolist()), [training.seed], [])
        return squared_error(model, batch, training)

    train(2, optimizer={"accumulate_steps": 3}, objective=objective)
    assert len({tuple(seed) for seed in seeds}) == 6


def test_mixed_precision_keeps_weights_and_losses_in_float32() -> None:
    kinds: set[tf.DType] = set()

    def objective(model: ToyModel, batch: Batch, training: StepContext) -> tf.Tensor:
        kinds.add(training.dtype)
        losses = squared_error(model, batch, training)
        assert losses.dtype == tf.float32
        return losses

    plain, _, losses = train()
    options = StepOptions(seed=1, dtype=tf.bfloat16)
    mixed, optimizers, found = train(options=options, objective=objective)
    assert kinds == {tf.bfloat16}
    assert {v.dtype for v in mixed.trainable_variables} == {tf.float32}
    assert found != losses  # half precision was in play
    np.testing.assert_allclose(found, losses, rtol=0.02)
    assert int(optimizers.step) == 4
    for a, b in zip(weights(plain), weights(mixed), strict=True):
        np.testing.assert_allclose(a, b, atol=0.02)

"""Batches that come to the device ahead: the same steps, and no batch asked for too much."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import tensorflow as tf

from conf.training.optimizer import OptimizerConfig
from tests.training.fake_clock import FakeClock
from tests.training.toy_models import ToyModel, build_toy_batches, squared_error
from training.distribution import strategy as strategies
from training.distribution.strategy import (
    RunSteps,
    StepFunction,
    build_prefetching_steps,
    build_run_steps,
)
from training.input.batches import Batch
from training.loop.optimizers import Optimizers
from training.loop.step import StepOptions, TrainStep

CPU = "CPU:0"


def first(batch: dict[str, tf.Tensor]) -> tf.Tensor:
    return batch["x"]


def train(run_steps: RunSteps) -> list[float]:
    batches = iter(build_toy_batches(12))
    return [float(loss) for n in (1, 3, 2) for loss in run_steps(batches, tf.constant(n)).losses]


def build_toy_step() -> TrainStep:
    model = ToyModel()
    config = OptimizerConfig.model_validate({"learning_rate": 0.02})
    return TrainStep(model, squared_error, Optimizers(config, model, 10), StepOptions(seed=1))


def test_trains_as_the_plain_loop_does() -> None:
    plain = train(build_run_steps(tf.distribute.get_strategy(), build_toy_step()))
    assert train(build_prefetching_steps(build_toy_step(), CPU)) == plain
    assert len(set(plain)) == 6


def test_takes_lists_sparse_tensors_and_text() -> None:
    rows = tf.data.Dataset.from_tensor_slices(
        {
            "lists": tf.ragged.constant([[1.0, 2.0], [], [3.0]]),
            "sparse": tf.sparse.from_dense([[0.0, 5.0], [7.0, 0.0], [0.0, 0.0]]),
            "text": ["a", "bc", ""],
        }
    )

    def total(batch: dict[str, tf.Tensor]) -> tf.Tensor:
        lengths = tf.cast(tf.strings.length(batch["text"]), tf.float32)
        sparse = tf.sparse.reduce_sum(batch["sparse"])
        return tf.reduce_sum(batch["lists"].flat_values) + sparse + tf.reduce_sum(lengths)

    losses = build_prefetching_steps(total, CPU)(iter(rows.batch(1)), tf.constant(3)).losses
    assert losses.numpy().tolist() == [1 + 2 + 5 + 1, 7 + 2, 3]


def test_what_the_host_reads_stays_there() -> None:
    swaps = {"0": {"swaps": tf.zeros([3, 1, 4], tf.int64), "new rows": tf.zeros([3, 1], tf.int64)}}
    parts = {"x": tf.zeros([3, 1]), "text": ["a", "b", "c"], "count": [1, 2, 3], "arrivals": swaps}
    devices: dict[str, str] = {}

    @tf.function(autograph=False)
    def fetch(batches: Iterator[Batch]) -> None:
        batch = strategies._fetch_batch(batches, "GPU:0")
        found = {**batch, **batch["arrivals"]["0"]}
        found.pop("arrivals")
        devices.update({name: part.device for name, part in found.items()})

    fetch.get_concrete_function(iter(tf.data.Dataset.from_tensor_slices(parts)))
    brought = {name for name, device in devices.items() if "GPU" in device}
    assert brought == {"x", "new rows"}
    assert devices.keys() - brought == {"text", "count", "swaps"}


def in_python(function: Callable[[float], float], x: tf.Tensor) -> tf.Tensor:
    return tf.ensure_shape(tf.numpy_function(function, [x], tf.float32), [])


def test_the_next_batch_is_made_while_a_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    making_s, count = 0.25, 6
    clock = FakeClock()
    monkeypatch.setattr(tf, "timestamp", clock.read)

    def run(build: Callable[[StepFunction], RunSteps], patience_s: float) -> tuple[set, float]:
        """Whether steps have met the batch after their own, and the time that was waited."""
        made, met = [threading.Event() for _ in range(count)], set()

        def make(number: float) -> float:
            made[int(number)].set()
            return number

        def take(number: float) -> float:
            met.update(event.wait(patience_s) for event in made[int(number) + 1 :][:1])
            return number

        rows = tf.data.Dataset.from_tensor_slices({"x": np.arange(count, dtype=np.float32)})
        rows = rows.map(lambda row: {"x": in_python(make, clock.spend(row["x"], making_s))})
        options = tf.data.Options()
        options.experimental_optimization.inject_prefetch = False  # Else rows are ready anyway.
        run_steps = build(lambda batch: in_python(take, batch["x"]))
        result = run_steps(iter(rows.with_options(options)), tf.constant(count))
        return met, float(result.wait_s)

    strategy = tf.distribute.get_strategy()
    plain = run(lambda step: build_run_steps(strategy, step), 0.0)
    assert plain == ({False}, count * making_s)
    ahead = run(lambda step: build_prefetching_steps(step, CPU), 60.0)
    assert ahead == ({True}, making_s)  # Of the first batch alone.


def test_only_a_single_gpu_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategies, "build_run_steps", lambda *_: "plain")
    monkeypatch.setattr(strategies, "build_prefetching_steps", lambda step, device: device)
    alone, mirrored = tf.distribute.get_strategy(), tf.distribute.MirroredStrategy(["/cpu:0"])
    for strategy, gpus, found in (
        (mirrored, ["a device"], "plain"), (alone, [], "plain"), (alone, ["a device"], "GPU:0"),
    ):  # fmt: skip
        monkeypatch.setattr(strategies, "has_gpu", lambda gpus=gpus: bool(gpus))
        assert strategies.compile_steps(strategy, first) == found

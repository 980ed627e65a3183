"""Several steps in one compiled call, on one device or several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from training.input.batches import Batch

StepFunction = Callable[[Batch], tf.Tensor]


class StepsResult(NamedTuple):
    """The outcome of some steps.

    Attributes:
        losses: Loss of each step that ran, float32 `[steps]`; all but the last are finite.
        wait_s: Seconds that they waited for their batches, float64 scalar. An upper bound: waiting
            overlaps with the end of the step before.
    """

    losses: tf.Tensor
    wait_s: tf.Tensor


RunSteps = Callable[[Any, tf.Tensor], StepsResult]


def build_run_steps(strategy: tf.distribute.Strategy, train_step: StepFunction) -> RunSteps:
    """Returns the function that runs several steps in one compiled call.

    Args:
        strategy: Runs each step on all replicas.
        train_step: One replica's step.

    Returns:
        Function of a dataset's iterator and an int32 number of steps. It stops after the first
        step whose loss is not finite.
    """

    # The loop below needs AutoGraph; a step has no Python control flow on tensors.
    step = tf.autograph.experimental.do_not_convert(train_step)

    def run_steps(iterator: Any, steps: tf.Tensor) -> StepsResult:
        losses = tf.TensorArray(tf.float32, size=steps, element_shape=[])
        wait_s = tf.constant(0.0, tf.float64)
        done, loss = tf.constant(0), tf.constant(0.0)
        while tf.logical_and(done < steps, tf.math.is_finite(loss)):
            tf.autograph.experimental.set_loop_options(parallel_iterations=1)
            with tf.control_dependencies([loss]):
                asked = tf.timestamp()
            with tf.control_dependencies([asked]):
                batch = next(iterator)
            with tf.control_dependencies(tf.nest.flatten(batch, expand_composites=True)):
                arrived = tf.timestamp()
            wait_s += arrived - asked
            # One thread would compute the step first, and look at the clock when it is done.
            with tf.control_dependencies([arrived]):
                shares = strategy.run(step, args=(batch,))
            loss = strategy.reduce(tf.distribute.ReduceOp.SUM, shares, axis=None)
            losses = losses.write(done, loss)
            done += 1
        return StepsResult(losses.stack()[:done], wait_s)

    return tf.function(run_steps, reduce_retracing=True)


def find_prefetch_device(strategy: tf.distribute.Strategy) -> str | None:
    """Returns the device that batches are fetched to ahead of their steps, None without need.

    A strategy of several devices fetches to each of them by itself; a CPU has the batches already.

    Args:
        strategy: Devices to train on.
    """
    is_alone = strategy is tf.distribute.get_strategy()
    return "GPU:0" if is_alone and tf.config.list_logical_devices("GPU") else None


def build_prefetching_steps(train_step: StepFunction, device: str) -> RunSteps:
    """Returns what `build_run_steps` does, with the next batch under way during each step.

    TensorFlow's own `prefetch_to_device` takes no ragged or sparse tensors.

    Args:
        train_step: The step.
        device: Where it is computed.

    Returns:
        Function of a dataset's iterator and an int32 number of steps, 1 or more. It asks for that
        many batches, fewer where it stops at a loss that is not finite: then for one more than
        it has trained on.
    """
    step = tf.autograph.experimental.do_not_convert(train_step)
    fetch = tf.autograph.experimental.do_not_convert(_fetch_batch)

    def run_steps(iterator: Any, steps: tf.Tensor) -> StepsResult:
        losses = tf.TensorArray(tf.float32, size=steps, element_shape=[])
        done, loss = tf.constant(0), tf.constant(0.0)
        finished = tf.timestamp()
        with tf.control_dependencies([finished]):
            batch = fetch(iterator, device)
        with tf.control_dependencies(tf.nest.flatten(batch, expand_composites=True)):
            wait_s = tf.timestamp() - finished
        while tf.logical_and(done < steps, tf.math.is_finite(loss)):
            tf.autograph.experimental.set_loop_options(parallel_iterations=1)
            # Nothing of the step depends on what is fetched here: both go on side by side.
            following = batch
            if done + 1 < steps:
                following = fetch(iterator, device)
            with tf.control_dependencies(tf.nest.flatten(following, expand_composites=True)):
                arrived = tf.timestamp()
            loss = tf.ensure_shape(step(batch), [])
            with tf.control_dependencies([loss]):
                finished = tf.timestamp()
            wait_s += tf.maximum(arrived - finished, 0.0)
            losses = losses.write(done, loss)
            batch = following
            done += 1
        return StepsResult(losses.stack()[:done], wait_s)

    return tf.function(run_steps, reduce_retracing=True)


def _fetch_batch(iterator: Any, device: str) -> Batch:
    """Returns the next batch; text stays where it is, as no GPU holds it."""
    batch = next(iterator)
    with tf.device(device):
        return tf.nest.map_structure(
            lambda part: part if part.dtype == tf.string else tf.identity(part),
            batch,
            expand_composites=True,
        )

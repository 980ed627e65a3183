"""The compiled training loop: many steps per call, on all replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from training.input import Batch
from training.models.base import RetrievalModel
from training.objective import Objective
from training.optimizers import Optimizers

StepFunction = Callable[[Batch], tf.Tensor]


class StepsResult(NamedTuple):
    """What some steps gave.

    Attributes:
        losses: Loss of each step that ran, float32 `[steps]`; all but the last are finite.
        wait_s: Seconds that they waited for their batches, float64 scalar. An upper bound: waiting
            overlaps with the end of the step before.
    """

    losses: tf.Tensor
    wait_s: tf.Tensor


RunSteps = Callable[[Any, tf.Tensor], StepsResult]


class TrainStep:
    """One step on one replica: loss, gradients, update.

    Args:
        model: The model.
        objective: Loss per row.
        optimizers: Update rules.
        seed: The run's seed; with the step it fixes dropout and drawn negatives.
        embedding_l2: Weight of the squared norms of the batch's rows, or None.
    """

    def __init__(
        self,
        model: RetrievalModel,
        objective: Objective,
        optimizers: Optimizers,
        seed: int,
        embedding_l2: float | None = None,
    ) -> None:
        self._model = model
        self._objective = objective
        self._optimizers = optimizers
        self._seed = seed % 2**31
        self._embedding_l2 = embedding_l2

    def __call__(self, batch: Batch) -> tf.Tensor:
        """Updates the model; returns this replica's share of the batch's mean loss, scalar."""
        context = tf.distribute.get_replica_context()
        variables = self._optimizers.variables_in_step_order
        step = tf.cast(self._optimizers.step.read_value(), tf.int32)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(variables)
            losses = self._objective(self._model, batch, tf.stack([self._seed, step * 8]))
            # Shares of the global mean: summed over replicas they are the loss of the batch.
            rows = tf.cast(tf.size(losses) * context.num_replicas_in_sync, tf.float32)
            loss = tf.reduce_sum(losses) / rows
            target = loss
            if self._embedding_l2 is not None:
                norms = tf.reduce_sum(self._model.sum_squared_rows(batch)) / rows
                target += self._embedding_l2 * norms
        self._optimizers.apply(tape.gradient(target, variables))
        return loss


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
                wait_s += tf.timestamp() - asked
            shares = strategy.run(step, args=(batch,))
            loss = strategy.reduce(tf.distribute.ReduceOp.SUM, shares, axis=None)
            losses = losses.write(done, loss)
            done += 1
        return StepsResult(losses.stack()[:done], wait_s)

    return tf.function(run_steps, reduce_retracing=True)

"""Learning rate schedules: Keras' own where it has them, behind a warm-up."""

from __future__ import annotations

import tensorflow as tf
from keras.optimizers.schedules import CosineDecay, LearningRateSchedule, PolynomialDecay

from conf.training.optimizer import (
    ConstantSchedule,
    CosineSchedule,
    OptimizerConfig,
    ScheduleConfig,
)


class WarmupSchedule(LearningRateSchedule):
    """Rises in a line over the warm-up, then follows another schedule.

    Step k (zero-based) of a warm-up of W steps has the share (k + 1) / W of the rate that the
    schedule starts with (Goyal et al. 2017, "Accurate, large minibatch SGD", section 2.2): the
    first update moves the weights, and the W-th has the full rate. Keras' only warm-up, that of
    `CosineDecay`, starts at 0.

    Args:
        after: The rate after the warm-up, a number or a schedule.
        warmup_steps: Steps of the warm-up.
        first_step: The step that `after` counts from; its rate there holds for earlier steps.
    """

    def __init__(
        self, after: float | LearningRateSchedule, warmup_steps: int, first_step: int
    ) -> None:
        self._after, self._warmup_steps, self._first_step = after, warmup_steps, first_step

    def __call__(self, step: tf.Tensor) -> tf.Tensor:
        """Returns the rate of a zero-based step, float32 scalar."""
        done = tf.cast(step, tf.float32)
        rate = self._after
        if callable(rate):
            rate = rate(tf.maximum(done - self._first_step, 0.0))
        return rate * tf.minimum((done + 1.0) / self._warmup_steps, 1.0)


def build_learning_rate(
    config: OptimizerConfig, total_steps: int, learning_rate: float | None = None
) -> float | LearningRateSchedule:
    """Returns the learning rate: a number, or a function of the zero-based step.

    Args:
        config: Rate, schedule and warm-up.
        total_steps: Steps of the whole run, warm-up included.
        learning_rate: A rate of its own that the schedule is applied to; None: the config's.
    """
    rate = config.learning_rate if learning_rate is None else learning_rate
    warmup_steps = config.warmup_steps or 0
    after, first_step = _build_schedule(rate, config.schedule, warmup_steps, total_steps)
    return WarmupSchedule(after, warmup_steps, first_step) if warmup_steps else after


def _build_schedule(
    rate: float, schedule: ScheduleConfig, warmup_steps: int, total_steps: int
) -> tuple[float | LearningRateSchedule, int]:
    """Returns the rate after the warm-up, and the step that it counts from."""
    steps = max(1, total_steps - warmup_steps)
    if isinstance(schedule, ConstantSchedule):
        return rate, 0
    if isinstance(schedule, CosineSchedule):
        return CosineDecay(rate, steps, schedule.final_share), warmup_steps
    return PolynomialDecay(rate, steps, schedule.final_share * rate, 1.0), warmup_steps

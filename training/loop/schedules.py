"""Learning rate schedules: Keras' own where it has them, behind a warm-up."""

from __future__ import annotations

import tensorflow as tf
from keras.optimizers.schedules import (
    CosineDecay,
    ExponentialDecay,
    LearningRateSchedule,
    PolynomialDecay,
)

from conf.training.optimizer import (
    ConstantSchedule,
    CosineSchedule,
    ExponentialSchedule,
    InverseSqrtSchedule,
    OptimizerConfig,
    PolynomialSchedule,
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


class InverseSqrtDecay(LearningRateSchedule):
    """Falls with the square root of the steps, after steps of the full rate.

    Vaswani et al. 2017, "Attention is all you need", equation 3, for a given peak rate; Keras has
    none.

    Args:
        learning_rate: The full rate.
        flat_steps: Steps before it falls.
    """

    def __init__(self, learning_rate: float, flat_steps: int) -> None:
        self._learning_rate, self._flat_steps = learning_rate, float(flat_steps)

    def __call__(self, step: tf.Tensor) -> tf.Tensor:
        """Returns the rate of a zero-based step, float32 scalar."""
        steps = tf.maximum(tf.cast(step, tf.float32) + 1.0, self._flat_steps)
        return self._learning_rate * tf.sqrt(self._flat_steps / steps)


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
    own_steps = getattr(schedule, "steps", None)
    steps = max(1, (own_steps or total_steps) - warmup_steps)
    match schedule:
        case ConstantSchedule():
            return rate, 0
        case InverseSqrtSchedule():
            return InverseSqrtDecay(rate, schedule.flat_steps or max(1, warmup_steps)), 0
        case CosineSchedule():
            return CosineDecay(rate, steps, schedule.final_share), warmup_steps
        case ExponentialSchedule(decay_steps=every, decay_rate=factor, staircase=stairs):
            return ExponentialDecay(rate, every, factor, stairs), warmup_steps
    power = schedule.power if isinstance(schedule, PolynomialSchedule) else 1.0
    return PolynomialDecay(rate, steps, schedule.final_share * rate, power), warmup_steps

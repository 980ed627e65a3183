"""Learning rate schedules: a warm-up, then a schedule over the steps that are left."""

from __future__ import annotations

import math
from typing import Any

import keras
import tensorflow as tf

from conf.training.optimizer import (
    ConstantSchedule,
    CosineSchedule,
    ExponentialSchedule,
    InverseSqrtSchedule,
    OptimizerConfig,
    ScheduleConfig,
)


class WarmupSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """Rises in a line over the warm-up, then follows a schedule over the steps that are left.

    Step k (zero-based) of a warm-up of W steps has the share (k + 1) / W of what the schedule
    starts with (Goyal et al. 2017, "Accurate, large minibatch SGD", section 2.2): the first
    update moves the weights, and the W-th has the full rate.

    Args:
        learning_rate: The configured rate.
        schedule: What follows the warm-up.
        warmup_steps: Steps of the warm-up, or None.
        total_steps: Steps of the whole run, warm-up included.
    """

    def __init__(
        self,
        learning_rate: float,
        schedule: ScheduleConfig,
        *,
        warmup_steps: int | None,
        total_steps: int,
    ) -> None:
        self._learning_rate = learning_rate
        self._schedule = schedule
        self._warmup_steps = warmup_steps or 0
        self._total_steps = total_steps

    def __call__(self, step: tf.Tensor) -> tf.Tensor:
        """Returns the rate of a zero-based step, float32 scalar."""
        done = tf.cast(step, tf.float32)
        share = self._share(done, tf.maximum(done - self._warmup_steps, 0.0))
        if self._warmup_steps:
            share *= tf.minimum((done + 1.0) / self._warmup_steps, 1.0)
        return self._learning_rate * share

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments as JSON values."""
        return {
            "learning_rate": self._learning_rate,
            "schedule": self._schedule.model_dump(),
            "warmup_steps": self._warmup_steps,
            "total_steps": self._total_steps,
        }

    def _share(self, done: tf.Tensor, after: tf.Tensor) -> tf.Tensor:
        """Share of the configured rate after `done` steps, `after` of them behind the warm-up."""
        schedule = self._schedule
        if isinstance(schedule, ConstantSchedule):
            return tf.ones([])
        if isinstance(schedule, ExponentialSchedule):
            periods = after / schedule.decay_steps
            return tf.pow(schedule.decay_rate, tf.floor(periods) if schedule.staircase else periods)
        if isinstance(schedule, InverseSqrtSchedule):
            # Vaswani et al. 2017, "Attention is all you need", eq. 3, for a given peak rate.
            flat = float(schedule.flat_steps or max(1, self._warmup_steps))
            return tf.sqrt(flat / tf.maximum(done + 1.0, flat))
        progress = tf.minimum(after / max(1, self._total_steps - self._warmup_steps), 1.0)
        if isinstance(schedule, CosineSchedule):
            # Loshchilov & Hutter 2017, "SGDR", eq. 5, without restarts.
            left = 0.5 * (1.0 + tf.cos(math.pi * progress))
        else:
            left = tf.pow(1.0 - progress, getattr(schedule, "power", 1.0))
        return schedule.final_share + (1.0 - schedule.final_share) * left


def build_learning_rate(
    config: OptimizerConfig, total_steps: int, learning_rate: float | None = None
) -> float | WarmupSchedule:
    """Returns the learning rate: a number, or a function of the zero-based step.

    Args:
        config: Rate, schedule and warm-up.
        total_steps: Steps of the whole run.
        learning_rate: A rate of its own that the schedule is applied to; None: the config's.
    """
    rate = config.learning_rate if learning_rate is None else learning_rate
    if isinstance(config.schedule, ConstantSchedule) and config.warmup_steps is None:
        return rate
    return WarmupSchedule(
        rate, config.schedule, warmup_steps=config.warmup_steps, total_steps=total_steps
    )

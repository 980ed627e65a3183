"""What is trained, and the compiled steps that train it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import tensorflow as tf

from conf.errors import ConfigError
from conf.training import TrainConfig
from training.chunks import StepInputs, TrainingData
from training.device_prefetch import build_prefetching_steps, find_prefetch_device
from training.embedding.key_mapping import plan_keyed_features
from training.gradient_guard import GradientGuard
from training.input import find_mixed
from training.mixed_ids import check_mixed_ids
from training.models import build_model
from training.models.base import RetrievalModel
from training.objective import build_objective
from training.optimizers import Optimizers
from training.parameter_server.steps import ScheduledSteps
from training.parameter_server.strategy import ParameterServers
from training.step import (
    RunSteps,
    TrainStep,
    build_loss_scale,
    build_run_steps,
    build_step_options,
    plan_shared_rows,
)


@dataclass(frozen=True)
class Learner:
    """A model, and how it learns.

    Attributes:
        model: The model.
        optimizers: Update its weights.
        inputs: What a step reads.
        run_steps: The compiled steps.
    """

    model: RetrievalModel
    optimizers: Optimizers
    inputs: StepInputs
    run_steps: RunSteps


def build_learner(
    config: TrainConfig, data: TrainingData, strategy: tf.distribute.Strategy, total_steps: int
) -> Learner:
    """Builds model, optimizers and steps.

    Args:
        config: The resolved config.
        data: What to train on.
        strategy: Devices to train on.
        total_steps: Steps of the whole run, for the schedule.

    Raises:
        ConfigError: The config does not fit the dataset or the devices.
    """
    options = build_step_options(config, strategy)
    with strategy.scope():
        model = build_model(config.model, data.manifest, config.seed)
        loss_scale = build_loss_scale(config.compute)
        optimizers = Optimizers(config.optimizer, model, total_steps, loss_scale)
    part_size = config.input.batch_size // optimizers.accumulate_steps
    objective = build_objective(config.model, data.version_dir, data.manifest, model, part_size)
    features = dict.fromkeys((*model.user_inputs, *model.item_inputs, *objective.inputs))
    keyed = plan_keyed_features(model.embedded_features, model.tables, objective.inputs)
    inputs = StepInputs(tuple(features), plan_shared_rows(model, config, strategy), keyed)
    mixed = find_mixed(config.input, data.manifest, inputs.features)  # Refuses what does not fit.
    check_mixed_ids(data.version_dir, data.manifest, mixed, inputs.features)
    guard = _build_guard(config, optimizers)
    updated = optimizers if guard is None else cast(Optimizers, guard)
    step = TrainStep(model, objective, updated, options, inputs.lookups, keyed)
    watched = step if guard is None else guard.watch(step)
    run_steps: RunSteps
    if isinstance(strategy, ParameterServers):
        run_steps = ScheduledSteps(strategy, watched, optimizers)
    elif device := find_prefetch_device(strategy):
        run_steps = build_prefetching_steps(watched, device)
    else:
        run_steps = build_run_steps(strategy, watched)
    return Learner(model, optimizers, inputs, run_steps)


def _build_guard(config: TrainConfig, optimizers: Optimizers) -> GradientGuard | None:
    """Returns what stops steps at gradients that are not finite, where the config wants it."""
    if not config.fit.check_gradients:
        return None
    if optimizers.loss_scale is not None:
        raise ConfigError(
            "fit.check_gradients cannot be used with float16: scaled gradients may overflow, "
            "and the step is then left out",
            received="compute.mixed_precision in float16",
            fix="leave out fit.check_gradients, or set compute.half_dtype=bfloat16",
        )
    return GradientGuard(optimizers)

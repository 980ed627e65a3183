"""What a trainer is made of: the model and its optimizers, its batches, its compiled steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from conf.errors import ConfigError
from conf.training.train import StepRange, TrainConfig
from training.checkpoint.calibrations import requires_fit
from training.distribution.run_steps import (
    RunSteps,
    build_prefetching_steps,
    build_run_steps,
    find_prefetch_device,
)
from training.distribution.strategy import check_batch_size
from training.embedding.key_mapping import plan_keyed_features, prepare_rules
from training.loop.epoch_input import EpochInput, StepInputs
from training.loop.optimizers import Optimizers
from training.loop.step import (
    TrainStep,
    build_loss_scale,
    build_step_options,
    plan_shared_rows,
)
from training.loop.step_validation import StepPlan
from training.loop.validation import Validate, build_step_validate, check_validation
from training.models.model import Model
from training.models.registry import build_model, list_model_notes, undo_balance
from training.models.sequence_rows import require_held_out
from training.monitoring.progress import TrainingProgress
from training.objectives.objective import (
    Objective,
    SoftmaxMemory,
    build_objective,
    complete_memory,
    list_notes,
    list_state,
    plan_memory,
)
from training.reader.batch_plan import check_mixed_ids, find_mixed, find_sparse_pairs
from training.reader.training_data import TrainingData


@dataclass(frozen=True)
class TrainingTask:
    """What is to be trained, on what, by what.

    Attributes:
        config: The resolved config.
        data: The dataset version to train on.
        strategy: Devices to train on.
        progress: Shows how it goes.
    """

    config: TrainConfig
    data: TrainingData
    strategy: tf.distribute.Strategy
    progress: TrainingProgress


@dataclass(frozen=True)
class TrainingParts:
    """What a trainer is made of.

    Attributes:
        model: The model.
        optimizers: Its optimizers.
        epoch_input: Opens the batches of its epochs.
        step: One step.
        run_steps: Runs compiled steps.
        validate_steps: Validates between epochs; None: that is not done.
        steps_per_epoch: Whole batches of an epoch.
        memory: What a softmax over the catalogue takes; None: there is no such.
    """

    model: Model
    optimizers: Optimizers
    epoch_input: EpochInput
    step: TrainStep
    run_steps: RunSteps
    validate_steps: Validate | None
    steps_per_epoch: int
    memory: SoftmaxMemory | None = None


def assemble(task: TrainingTask, profile: StepRange | None = None) -> TrainingParts:
    """Builds what a trainer is made of; nothing is written.

    Args:
        task: What is to be trained.
        profile: Steps that are to be profiled, or None.

    Raises:
        ConfigError: The config does not fit the dataset or the devices, or the run does not have
            the steps to profile.
        InputDataError: The train split is smaller than a batch, or damaged.
    """
    config, data, strategy = task.config, task.data, task.strategy
    check_batch_size(config.input.batch_size, strategy)
    require_held_out(config.model, config.input.validation, data.manifest)
    steps_per_epoch = _count_steps(task)
    validate_steps = build_step_validate(config, data)
    total_steps = StepPlan.of(config.fit, steps_per_epoch).total
    if profile is not None:
        profile.require_within(total_steps)
    options = build_step_options(config, strategy)
    part_size = config.input.batch_size // (config.optimizer.accumulate_steps or 1)
    memory = plan_memory(config.model, data.manifest, part_size)
    with strategy.scope():
        model = build_model(config.model, data.manifest, config.seed, options.dtype)
        memory = complete_memory(memory, model, data.manifest)
        loss_scale = build_loss_scale(config.compute)
        optimizers = Optimizers(config.optimizer, model, total_steps, loss_scale)
    objective = _build_objective(task, model, optimizers)
    balanced = undo_balance(model, config.input, data.manifest)
    # What is fitted when training ends takes the place of what is missing.
    unknown_balance = () if requires_fit(config.model) else balanced
    notes = list_model_notes(model, data.manifest)
    for note in (*notes, *list_notes(objective), *unknown_balance):
        task.progress.message(note)
    inputs = _build_inputs(task, model, objective)
    epoch_input = EpochInput(config, data, strategy, inputs)
    step = TrainStep(model, objective, optimizers, options, inputs.lookups, inputs.keyed)
    run_steps = _compile(strategy, step)
    return TrainingParts(
        model, optimizers, epoch_input, step, run_steps, validate_steps, steps_per_epoch, memory
    )


def _count_steps(task: TrainingTask) -> int:
    config, file = task.config.input, task.data.counts_file
    if not config.is_exact and (file is None or not file.exists()):
        task.progress.message(
            "reading the train split through once: input.filter, input.validation or "
            "input.on_corrupt leave rows out, and the steps of an epoch must be known"
        )
    steps = task.data.steps_per_epoch(config)
    if note := check_validation(task.config, task.data):
        task.progress.message(note)
    return steps


def _build_objective(task: TrainingTask, model: Model, optimizers: Optimizers) -> Objective:
    config, data = task.config, task.data
    part_size = config.input.batch_size // optimizers.accumulate_steps
    with task.strategy.scope():
        objective = build_objective(
            config.model, data.version_dir, data.manifest, model, part_size, config.input
        )
    optimizers.objective_state = list(list_state(objective))
    return objective


def _build_inputs(task: TrainingTask, model: Model, objective: Objective) -> StepInputs:
    """Returns what steps read; refuses a mix of datasets that does not fit."""
    config, manifest = task.config, task.data.manifest
    keyed = plan_keyed_features(model.embedded_features, model.tables, objective.inputs)
    times = prepare_rules(keyed, manifest)
    features = tuple(dict.fromkeys((*model.inputs, *objective.inputs, *times)))
    refuse_lost_order(task, model, features)
    compared = (*features, *config.input.chooses_by)
    mixed = find_mixed(config.input, manifest, compared)
    check_mixed_ids(task.data.version_dir, manifest, mixed, compared)
    shared = plan_shared_rows(model, config, task.strategy)
    return StepInputs(features, shared, keyed, objective.binary_labels)


def refuse_lost_order(task: TrainingTask, model: Model, features: Sequence[str]) -> None:
    """Refuses sparse tensors, whose ids are sorted, for lists whose order is read.

    Args:
        task: What is to be trained.
        model: Its model.
        features: Features that steps read.

    Raises:
        ConfigError: There is such a list.
    """
    if not task.config.input.sparse:
        return
    pairs = find_sparse_pairs(task.data.version_dir, task.data.manifest)
    ordered = [
        feature.name
        for part in model.embedded_inputs
        for feature in part.features
        if feature.spec.is_list and feature.reads_order
    ]
    found = [name for name in ordered if pairs.get(name) in features]
    if found:
        raise ConfigError(
            "input.sparse sorts the ids of a row, and the model reads their order",
            received=", ".join(found),
            fix="set input.sparse=false, or a combiner that does not read the order",
        )


def _compile(strategy: tf.distribute.Strategy, step: TrainStep) -> RunSteps:
    """Returns the compiled steps: on one GPU, or any other devices."""
    if device := find_prefetch_device(strategy):
        return build_prefetching_steps(step, device)
    return build_run_steps(strategy, step)

"""Parts of a training run: the model and its optimizers, its batches, its compiled steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from conf.errors import ConfigError
from conf.training.train import StepRange, TrainConfig
from training.distribution.strategy import (
    RunSteps,
    build_strategy,
    check_devices,
    compile_steps,
    has_gpu,
    use_tf32,
)
from training.distribution.workers import require_memory
from training.embedding.distinct_rows import Lookups, plan_lookups
from training.embedding.key_mapping import plan_keyed_features, prepare_rules
from training.loop.epochs import EpochInput, StepInputs
from training.loop.optimizers import Optimizers
from training.loop.plan import StepPlan, TrainPlan
from training.loop.step import StepOptions, TrainStep
from training.loop.validation import Validate, build_step_validate, check_validation
from training.models.calibration import requires_fit
from training.models.model import Model
from training.models.ranking import undo_balance
from training.models.registry import build_model
from training.models.retrieval import tell_later_items
from training.models.sequence import require_held_out
from training.monitoring.progress import TrainingProgress
from training.objectives.objective import (
    Objective,
    build_objective,
    list_notes,
    list_state,
)
from training.reader.batch_plan import check_mixed_ids, find_mixed, find_sparse_pairs

_SMALLER_SOFTMAX = (
    "set model.objective={kind: sampled_softmax, negatives: {source: uniform, count: 1000}}, or a "
    "smaller input.batch_size or model.embedding_dim"
)


@dataclass(frozen=True)
class TrainingParts:
    """What a run is made of; `validate_steps` validates between epochs."""

    plan: TrainPlan
    strategy: tf.distribute.Strategy
    progress: TrainingProgress
    model: Model
    optimizers: Optimizers
    epoch_input: EpochInput
    run_steps: RunSteps
    validate_steps: Validate | None
    steps: StepPlan
    profile: StepRange | None = None


def build(
    plan: TrainPlan,
    strategy: tf.distribute.Strategy | None = None,
    progress: TrainingProgress | None = None,
    profile: StepRange | None = None,
) -> TrainingParts:
    """Builds what a run is made of, by default on the config's devices; nothing is written."""
    config, data = plan.config, plan.data
    strategy, progress = strategy or build_strategy(config.devices), progress or TrainingProgress()
    check_devices(config, strategy)
    require_held_out(config.model, config.input.validation, data.manifest)
    steps = StepPlan.of(config.fit, _count_steps(plan, progress))
    validate_steps = build_step_validate(config, data)
    if profile is not None:
        profile.require_within(steps.total)
    use_tf32(config.compute.tf32)
    dtype = tf.bfloat16 if config.compute.mixed_precision else tf.float32
    part_size = config.input.batch_size // (config.optimizer.accumulate_steps or 1)
    require_memory("a softmax over the whole catalogue", plan.softmax_bytes or 0, _SMALLER_SOFTMAX)
    with strategy.scope():
        model = build_model(config.model, data.manifest, config.seed, dtype)
        optimizers = Optimizers(config.optimizer, model, steps.total)
        objective = build_objective(
            config.model, data.version_dir, data.manifest, model, part_size, config.input
        )
    optimizers.objective_state = list(list_state(objective))
    for note in _list_notes(plan, model, objective):
        progress.message(note)
    inputs = _plan_inputs(plan, model, objective, strategy)
    options = StepOptions(config.seed, dtype)
    step = TrainStep(model, objective, optimizers, options, inputs.lookups, inputs.keyed)
    return TrainingParts(
        plan,
        strategy,
        progress,
        model,
        optimizers,
        EpochInput(config, data, strategy, inputs),
        compile_steps(strategy, step),
        validate_steps,
        steps,
        profile,
    )


def _count_steps(plan: TrainPlan, progress: TrainingProgress) -> int:
    config, file = plan.config.input, plan.data.counts_file
    if not config.is_exact and (file is None or not file.exists()):
        progress.message(
            "reading the train split through once: input.filter, input.validation or "
            "input.on_corrupt leave rows out, and the steps of an epoch must be known"
        )
    steps = plan.data.steps_per_epoch(config)
    if note := check_validation(plan.config, plan.data):
        progress.message(note)
    return steps


def _list_notes(plan: TrainPlan, model: Model, objective: Objective) -> list[str]:
    config, manifest = plan.config, plan.data.manifest
    balanced = undo_balance(model, config.input, manifest)
    # What is fitted when training ends takes the place of what is missing.
    unknown_balance = [] if requires_fit(config.model) else balanced
    later = tell_later_items(model, manifest)
    return [*model.notes, *later, *list_notes(objective), *unknown_balance]


def _plan_inputs(
    plan: TrainPlan, model: Model, objective: Objective, strategy: tf.distribute.Strategy
) -> StepInputs:
    """Returns what steps read; refuses a mix of datasets that does not fit."""
    config, manifest = plan.config, plan.data.manifest
    keyed = plan_keyed_features(model.embedded_features, model.tables, objective.inputs)
    times = prepare_rules(keyed, manifest)
    features = tuple(dict.fromkeys((*model.inputs, *objective.inputs, *times)))
    refuse_lost_order(plan, model, features)
    compared = (*features, *config.input.chooses_by)
    mixed = find_mixed(config.input, manifest, compared)
    check_mixed_ids(plan.data.version_dir, manifest, mixed, compared)
    shared = _plan_shared_rows(model, config, strategy)
    return StepInputs(features, shared, keyed, objective.binary_labels)


def refuse_lost_order(plan: TrainPlan, model: Model, features: Sequence[str]) -> None:
    """Refuses sparse tensors, whose ids are sorted, for lists whose order is read."""
    if not plan.config.input.sparse:
        return
    pairs = find_sparse_pairs(plan.data.version_dir, plan.data.manifest)
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


def _plan_shared_rows(
    model: Model, config: TrainConfig, strategy: tf.distribute.Strategy
) -> tuple[Lookups, ...] | None:
    """Returns which rows a step gathers once for all; None where each lookup gathers its own.

    One CPU device gains by it; collectives and parts of a batch take no changing number of rows.
    """
    is_alone = strategy is tf.distribute.get_strategy() and strategy.num_replicas_in_sync == 1
    in_parts = (config.optimizer.accumulate_steps or 1) > 1
    if not is_alone or in_parts or has_gpu():
        return None
    return plan_lookups(model.lookups)

"""Trainer: builds model and compiled steps, runs epochs, validates, stops early, saves."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import tensorflow as tf

from conf.errors import ConfigError, InputDataError
from conf.run import LOGS_DIR, WARM_START_FILE, write_json
from conf.training.train import StepRange, TrainConfig
from training.checkpoint.checkpoint_files import EpochSums, Position, ResumeState
from training.checkpoint.manager import CheckpointManager
from training.checkpoint.training_state import MODEL, OPTIMIZERS, collect_state, find_non_finite
from training.distribution.parameter_server import ParameterServers
from training.distribution.scheduled_steps import ScheduledSteps
from training.distribution.strategy import check_batch_size
from training.distribution.workers import NullWriter, Workers
from training.embedding.key_mapping import plan_keyed_features
from training.input.mixing import check_mixed_ids, find_mixed
from training.loop.epoch_records import (
    LOSS_METRIC,
    EpochRecord,
    find_best_epoch,
    latest_metric,
    read_resumed_history,
    should_stop,
    write_history,
)
from training.loop.epochs import EpochLoop, RunFiles, StepInputs, StepRunner, TrainingData
from training.loop.interruption import StopNowError, StopRequest
from training.loop.optimizers import Optimizers
from training.loop.step import (
    GradientGuard,
    RunSteps,
    TrainStep,
    build_loss_scale,
    build_prefetching_steps,
    build_run_steps,
    build_step_options,
    find_prefetch_device,
    plan_shared_rows,
)
from training.loop.validation import Validate, check_held_out, selection_metric
from training.loop.warm_start import WarmStartReport, WarmTarget, take_over
from training.models.registry import build_model
from training.models.retrieval import RetrievalModel
from training.monitoring.progress import TrainingProgress
from training.monitoring.run_logs import EpochLog, StepLog, StepProfiler, read_weight_samples
from training.objectives.objective import build_objective
from training.tensorflow_runtime import disk_errors


@dataclass(frozen=True)
class TrainingResult:
    """How a run ended.

    Attributes:
        best_epoch: One-based epoch whose weights are kept as the best.
        epochs: Epochs that ran, those before a resume included.
        steps: Batches trained on in all, those that overflowed a loss scale included.
        stopped_early: Whether early stopping ended the run.
        left_out: What the input left out of the last epoch; see `EpochRecord`.
    """

    best_epoch: int
    epochs: int
    steps: int
    stopped_early: bool
    left_out: Mapping[str, int]


@dataclass(frozen=True)
class CompiledTraining:
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


def compile_training(
    config: TrainConfig, data: TrainingData, strategy: tf.distribute.Strategy, total_steps: int
) -> CompiledTraining:
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
    return CompiledTraining(model, optimizers, inputs, run_steps)


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


class Trainer:
    """Trains one model.

    Args:
        config: The resolved config.
        data: What to train on.
        strategy: Devices to train on.
        progress: Where to tell how it goes.
        profile: Steps to profile, or None.

    Raises:
        ConfigError: The config does not fit the dataset or the devices, or the run does not have
            the steps to profile. Nothing was written.
        InputDataError: The train split is smaller than a batch, or damaged.
    """

    def __init__(
        self,
        config: TrainConfig,
        data: TrainingData,
        strategy: tf.distribute.Strategy,
        progress: TrainingProgress,
        profile: StepRange | None = None,
    ) -> None:
        self._config, self._data = config, data
        self._strategy, self._progress = strategy, progress
        self._workers = Workers(strategy)
        check_batch_size(config.input.batch_size, strategy)
        self._metric = selection_metric(config)
        self._warm_start: WarmStartReport | None = None
        self._told: list[str] = []
        self.steps_per_epoch = self._count_steps()
        if profile is not None:
            profile.require_within(self.steps_per_epoch * config.fit.epochs)
        total_steps = self.steps_per_epoch * config.fit.epochs
        learner = compile_training(config, data, strategy, total_steps)
        self.model, self._optimizers = learner.model, learner.optimizers
        run_steps, self._profiler = learner.run_steps, None
        if profile is not None and self._workers.is_chief:
            run_steps = self._profiler = StepProfiler(run_steps, profile, progress)
        self._runner = StepRunner(config, data, strategy, learner.inputs, run_steps)

    def fit(
        self, run: Path, validate: Validate | None, stop: StopRequest | None = None
    ) -> TrainingResult:
        """Trains until the last epoch or until the metric no longer improves.

        Goes on at the position of the newest checkpoint where the run directory has one.

        Args:
            run: Directory of the run; it exists.
            validate: Returns the validation metrics of the model, or None where there is no
                validation split.
            stop: Whether a signal has asked to stop; None where none is listened to.

        Raises:
            TrainingDivergedError: The loss or a weight is no finite number.
            TrainingInterruptedError: A signal asked to stop; the state is saved.
            InputDataError: A record is damaged, or the run's history or checkpoints are.
            InternalError: The run directory cannot be written.
        """
        metric = self._metric if validate is not None or self._metric == LOSS_METRIC else None
        if self._metric is not None and metric is None:
            self._progress.message(
                "the dataset has no validation split: no early stopping, the last epoch is kept"
            )
        stopping = self._config.fit.early_stopping
        if metric is not None and stopping is not None and stopping.metric != metric:
            self._progress.message(
                f"rows with labels are not ranked: {metric} of the held-out rows chooses the "
                f"epoch, not {stopping.metric}"
            )
        with self._strategy.scope():
            checkpoints = CheckpointManager(
                run, self.model, self._optimizers, self._config.fit.checkpoint, self._workers
            )
        is_chief = self._workers.is_chief
        log: EpochLog | NullWriter = EpochLog(run / LOGS_DIR) if is_chief else NullWriter()
        with closing(checkpoints), closing(log):
            standing, history = self._begin(run, checkpoints)
            done = standing.position.step(self.steps_per_epoch)
            steps: StepLog | NullWriter = StepLog(run, done) if is_chief else NullWriter()
            profiler = self._profiler
            profiling = profiler.begin(run / LOGS_DIR, done) if profiler else nullcontext()
            with closing(steps), profiling:
                files = RunFiles(run, checkpoints, steps)
                loop = EpochLoop(
                    self._runner, files, self._progress, stop or StopRequest(), self._workers
                )
                while len(history) < self._config.fit.epochs and not self._stops(history, metric):
                    loop.metric = latest_metric(history, metric)
                    standing = loop.run(standing)
                    validation = self._validate(loop, standing, validate)
                    history.append(self._describe_epoch(standing, validation))
                    standing = self._end_epoch(loop, files, history, metric, log)
                loop.wait()
        return TrainingResult(
            best_epoch=find_best_epoch(history, metric),
            epochs=len(history),
            steps=len(history) * self.steps_per_epoch,
            stopped_early=len(history) < self._config.fit.epochs,
            left_out=history[-1].left_out,
        )

    def warm_start(self) -> WarmStartReport | None:
        """Takes over the weights of `fit.warm_start`, once, and returns what came; None: unset.

        `fit` does so where it has no checkpoint to go on from.

        Raises:
            ConfigError: The weights do not fit. The model is as it was.
            InputDataError: The checkpoint or its dataset version is damaged or gone.
            UpstreamNotReadyError: There is no such run or checkpoint.
        """
        if self._warm_start is None and self._config.fit.warm_start is not None:
            target = WarmTarget(self.model, self._optimizers, self._data)
            report = self._workers.share(lambda: asdict(take_over(self._config, target)))
            self._warm_start = WarmStartReport(**report)
            state = collect_state(**{MODEL: self.model, OPTIMIZERS: self._optimizers})
            self._workers.share_variables(state.variables.values())
        return self._warm_start

    def _count_steps(self) -> int:
        config, file = self._config.input, self._data.counts_file
        if not config.is_exact and (file is None or not file.exists()):
            self._progress.message(
                "reading the train split through once: input.filter, input.validation or "
                "input.on_corrupt leave rows out, and the steps of an epoch must be known"
            )
        steps = self._data.steps_per_epoch(config)
        check_held_out(self._config, self._data)
        return steps

    def _begin(
        self, run: Path, checkpoints: CheckpointManager
    ) -> tuple[ResumeState, list[EpochRecord]]:
        """Returns where the run stands, and the history of its finished epochs.

        The history is as long as the restored weights are old, so the loop may count by it.
        """
        standing = checkpoints.restore_last(self._progress.message)
        position = Position(0, 0) if standing is None else standing.position
        history = self._read_history(run, position.epoch, checkpoints)
        if standing is None:
            report = self.warm_start()
            if report is not None:
                if self._workers.is_chief:
                    write_json(run / WARM_START_FILE, asdict(report))
                self._progress.message(report.render())
            return ResumeState(position, EpochSums(), self._config.seed), history
        if standing.seed != self._config.seed:
            raise InputDataError(
                "the checkpoint is of a run with another seed",
                received=f"seed {standing.seed}",
                allowed=f"seed {self._config.seed}",
                fix="train again without --resume",
            )
        where = f"after epoch {position.epoch}"
        if position.batch or not position.epoch:
            where = f"in epoch {position.epoch + 1} after step {position.batch}"
        self._progress.message(
            f"resuming {where}", finished_epochs=position.epoch, finished_batches=position.batch
        )
        return standing, history

    def _read_history(
        self, run: Path, finished: int, checkpoints: CheckpointManager
    ) -> list[EpochRecord]:
        entries = self._workers.share(
            lambda: [
                asdict(record)
                for record in read_resumed_history(run, finished, checkpoints.newest_epoch)
            ]
        )
        return [EpochRecord(**entry) for entry in entries]

    def _stops(self, history: list[EpochRecord], metric: str | None) -> bool:
        stopping = self._config.fit.early_stopping
        if metric is None or stopping is None:
            return False
        return should_stop(history, stopping.model_copy(update={"metric": metric}))

    def _validate(
        self, loop: EpochLoop, standing: ResumeState, validate: Validate | None
    ) -> dict[str, float]:
        """Returns the validation metrics; a signal ends it at once, as it can be done again.

        The chief validates for all: numbers that differ in the last bit on other machines would
        have the processes stop at different epochs.
        """
        name = find_non_finite((v.name, v) for v in self.model.trainable_variables)
        if name is not None:
            loop.diverge(standing.position, f"{name} is not finite")

        def measure() -> dict[str, float] | None:
            try:
                with loop.stop.immediate():
                    return {} if validate is None else dict(validate(self.model))
            except StopNowError:
                return None

        found = self._workers.share(measure)
        if found is None:
            loop.save_and_stop(standing)
        return found

    def _describe_epoch(self, standing: ResumeState, validation: dict[str, float]) -> EpochRecord:
        sums = standing.sums
        examples = self.steps_per_epoch * self._config.input.batch_size
        counts = self._runner.count_left_out(standing.position.epoch)
        lines = [*counts.describe(), *self._runner.describe_full_tables()]
        for line in lines:
            if line not in self._told:  # Most losses are the same in every epoch.
                self._progress.message(line)
        self._told = lines
        return EpochRecord(
            epoch=standing.position.epoch + 1,
            loss=sums.loss / self.steps_per_epoch,
            seconds=sums.seconds,
            examples=examples,
            examples_per_s=examples / sums.seconds,
            input_wait_share=min(1.0, sums.wait_s / sums.seconds),
            validation=validation,
            left_out=counts.totals(),
        )

    def _end_epoch(
        self,
        loop: EpochLoop,
        files: RunFiles,
        history: list[EpochRecord],
        metric: str | None,
        log: EpochLog | NullWriter,
    ) -> ResumeState:
        """Saves a finished epoch; returns where the next one begins."""
        record = history[-1]
        best = find_best_epoch(history, metric) == record.epoch
        # The history is at most one epoch ahead of the checkpoints, which come last: they are
        # what says that the epoch is done.
        loop.wait()
        if self._workers.is_chief:
            with disk_errors(
                "cannot write the history of the run; the checkpoints are untouched",
                "free some space (or check the permissions), then go on with --resume",
            ):
                write_history(files.run, history)
        standing = ResumeState(Position(record.epoch, 0), EpochSums(), self._config.seed)
        loop.save(standing, best=best)
        shown = self._config.fit.histograms
        samples = None if shown is None else read_weight_samples(self.model, shown.sampled_rows)
        log.write(record, standing.position.step(self.steps_per_epoch), samples)
        self._progress.epoch(record, best and metric is not None)
        return standing

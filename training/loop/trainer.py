"""Trainer: compiles a model's steps, trains epochs, validates, stops early and saves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import tensorflow as tf

from conf.artefacts.run import LOGS_DIR, WARM_START_FILE, write_json
from conf.errors import ConfigError, InputDataError
from conf.metrics import LOSS_METRIC
from conf.training.train import EarlyStoppingConfig, StepRange, TrainConfig
from training.checkpoint.manager import CheckpointManager
from training.checkpoint.resume_state import EpochSums, Position, ResumeState
from training.checkpoint.saved_tensors import (
    MODEL,
    OPTIMIZERS,
    collect_state,
    find_non_finite,
    share_state,
)
from training.distribution.parameter_server import ParameterServers
from training.distribution.run_steps import (
    RunSteps,
    build_prefetching_steps,
    build_run_steps,
    find_prefetch_device,
)
from training.distribution.scheduled_steps import ScheduledSteps
from training.distribution.strategy import check_batch_size
from training.distribution.tensorflow_runtime import disk_errors
from training.distribution.workers import NullWriter, Workers
from training.embedding.key_mapping import plan_keyed_features, prepare_rules
from training.input.batches import find_sparse_pairs
from training.input.mixing import check_mixed_ids, find_mixed
from training.input.split_source import TrainingData
from training.loop.early_stopping import (
    find_best_epoch,
    latest_metric,
    selection_metric,
    should_stop,
)
from training.loop.epoch_input import EpochInput, StepInputs
from training.loop.epochs import EpochRunner, RunContext
from training.loop.gradient_norms import build_gradient_norms
from training.loop.interruption import StopNowError, StopRequest
from training.loop.optimizers import Optimizers
from training.loop.step import (
    StepOptions,
    TrainStep,
    build_loss_scale,
    build_step_options,
    plan_shared_rows,
)
from training.loop.step_validation import StepPlan, StepValidations
from training.loop.validation import Validate, build_step_validate, check_validation
from training.loop.warm_start import WarmStartReport, WarmTarget, transfer_weights
from training.models.registry import build_model
from training.monitoring.epoch_records import (
    EpochRecord,
    StepValidation,
    TrainingResult,
    read_resumed_history,
    write_history,
)
from training.monitoring.progress import TrainingProgress
from training.monitoring.run_logs import (
    EpochLog,
    GraphWriter,
    StepLog,
    StepProfiler,
    StepValidationLog,
    read_step_validations,
    read_weight_samples,
)
from training.objectives.objective import Objective, build_objective, list_notes, list_state


class Trainer:
    """Trains one model.

    Args:
        config: The resolved config.
        data: The dataset version to train on.
        strategy: Devices to train on.
        progress: Shows how it goes.
        profile: Steps to profile, or None.

    Attributes:
        model: The model.
        epoch_input: Opens the batches of its epochs.
        steps_per_epoch: Whole batches of an epoch.

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
        self._shown: list[str] = []
        self.steps_per_epoch = self._count_steps()
        self._validate_steps = build_step_validate(config, data)
        total_steps = self.plan.total
        if profile is not None:
            profile.require_within(total_steps)
        options = build_step_options(config, strategy)
        with strategy.scope():
            self.model = build_model(config.model, data.manifest, config.seed, options.dtype)
            loss_scale = build_loss_scale(config.compute)
            self._optimizers = Optimizers(config.optimizer, self.model, total_steps, loss_scale)
            if config.fit.gradient_norms:
                norms = build_gradient_norms(self.model, config.fit.steps_per_loop)
                options = replace(options, norms=norms)
        self._norms = options.norms
        objective = self._build_objective()
        for note in (*self.model.notes, *list_notes(objective)):
            progress.message(note)
        inputs = self._build_inputs(objective)
        self.epoch_input = EpochInput(config, data, strategy, inputs)
        self._graph_writer: GraphWriter | None = None
        self._run_steps = self._compile(objective, options, inputs)
        self._profiler: StepProfiler | None = None
        if profile is not None and self._workers.is_chief:
            self._run_steps = self._profiler = StepProfiler(self._run_steps, profile, progress)

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
        metric = self._choose_metric(is_validated=validate is not None)
        with self._open_run(run, stop or StopRequest()) as (runner, state, history):
            validations = self._build_validations(runner, metric)
            # An epoch that was begun is brought to its end, even if none of it is left to train.
            while state.position.batch or not self._is_over(history, metric, validations):
                state = runner.run(state, latest_metric(history, metric), validations)
                found = self._validate(runner, state, validate)
                history.append(self._describe_epoch(state, found))
                chosen = None if validations is None else validations.best
                state = self._end_epoch(runner, history, metric, is_chosen=chosen is not None)
            runner.wait()
            best = None if validations is None else validations.best
        steps = self._count_trained(history)
        return TrainingResult(
            best_epoch=find_best_epoch(history, metric) if best is None else best.epoch,
            epochs=len(history),
            steps=steps,
            stopped_early=steps < self.plan.total,
            left_out=history[-1].left_out,
            best_step=None if best is None else best.step,
        )

    def warm_start(self) -> WarmStartReport | None:
        """Sets the weights of `fit.warm_start`, once, and returns what came; None: unset.

        `fit` does so where it has no checkpoint to go on from.

        Raises:
            ConfigError: The weights do not fit. The model is as it was.
            InputDataError: The checkpoint or its dataset version is damaged or gone.
            UpstreamNotReadyError: There is no such run or checkpoint.
        """
        if self._warm_start is None and self._config.fit.warm_start is not None:
            target = WarmTarget(self.model, self._optimizers, self._data)
            report = self._workers.share(lambda: asdict(transfer_weights(self._config, target)))
            self._warm_start = WarmStartReport(**report)
            state = collect_state(**{MODEL: self.model, OPTIMIZERS: self._optimizers})
            share_state(state, self._workers)
        return self._warm_start

    @property
    def plan(self) -> StepPlan:
        """How many steps a run has."""
        return StepPlan.of(self._config.fit, self.steps_per_epoch)

    def _count_steps(self) -> int:
        config, file = self._config.input, self._data.counts_file
        if not config.is_exact and (file is None or not file.exists()):
            self._progress.message(
                "reading the train split through once: input.filter, input.validation or "
                "input.on_corrupt leave rows out, and the steps of an epoch must be known"
            )
        steps = self._data.steps_per_epoch(config)
        if measured := check_validation(self._config, self._data):
            self._progress.message(measured)
        return steps

    def _build_objective(self) -> Objective:
        part_size = self._config.input.batch_size // self._optimizers.accumulate_steps
        version_dir, manifest = self._data.version_dir, self._data.manifest
        with self._strategy.scope():
            objective = build_objective(
                self._config.model,
                version_dir,
                manifest,
                self.model,
                part_size,
                self._config.input,
            )
        self._optimizers.objective_state = list(list_state(objective))
        return objective

    def _build_inputs(self, objective: Objective) -> StepInputs:
        """Returns what steps read; refuses a mix of datasets that does not fit."""
        model, manifest = self.model, self._data.manifest
        keyed = plan_keyed_features(model.embedded_features, model.tables, objective.inputs)
        times = prepare_rules(keyed, manifest)
        features = tuple(dict.fromkeys((*model.inputs, *objective.inputs, *times)))
        self._refuse_lost_order(features)
        mixed = find_mixed(self._config.input, manifest, features)
        check_mixed_ids(self._data.version_dir, manifest, mixed, features)
        shared = plan_shared_rows(model, self._config, self._strategy)
        return StepInputs(features, shared, keyed, objective.binary_labels)

    def _refuse_lost_order(self, features: Sequence[str]) -> None:
        """Refuses sparse tensors, whose ids are sorted, for lists whose order is read."""
        if not self._config.input.sparse:
            return
        pairs = find_sparse_pairs(self._data.version_dir, self._data.manifest)
        ordered = [
            feature.name
            for part in self.model.embedded_inputs
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

    def _compile(self, objective: Objective, options: StepOptions, inputs: StepInputs) -> RunSteps:
        """Returns the compiled steps: on parameter servers, one GPU, or any other devices."""
        step = TrainStep(
            self.model, objective, self._optimizers, options, inputs.lookups, inputs.keyed
        )
        run_steps: RunSteps
        if isinstance(self._strategy, ParameterServers):
            run_steps = ScheduledSteps(self._strategy, step, self._optimizers)
        elif device := find_prefetch_device(self._strategy):
            run_steps = build_prefetching_steps(step, device)
        else:
            run_steps = build_run_steps(self._strategy, step)
        if not self._config.fit.graph:
            return run_steps
        self._graph_writer = GraphWriter(run_steps, self._strategy, step)
        return self._graph_writer

    def _choose_metric(self, *, is_validated: bool) -> str | None:
        """Returns the metric that chooses the epoch, None for the last one; says if it differs."""
        metric = self._metric if is_validated or self._metric == LOSS_METRIC else None
        if self._metric is not None and metric is None:
            self._progress.message(
                "the dataset has no validation split: no early stopping, the last epoch is kept"
            )
        stopping = self._config.fit.early_stopping
        asked = None if stopping is None else stopping.metric
        if metric is not None and asked is not None and asked != metric:
            self._progress.message(
                f"rows with labels are not ranked: {metric} of the held-out rows chooses the "
                f"epoch, not {asked}"
            )
        return metric

    @contextmanager
    def _open_run(
        self, run: Path, stop: StopRequest
    ) -> Iterator[tuple[EpochRunner, ResumeState, list[EpochRecord]]]:
        """Opens a run's files, and yields where it goes on and its finished epochs."""
        is_chief = self._workers.is_chief
        with ExitStack() as stack:
            with self._strategy.scope():
                checkpoints = CheckpointManager(
                    run, self.model, self._optimizers, self._config.fit.checkpoint, self._workers
                )
            stack.enter_context(closing(checkpoints))
            epoch_log: EpochLog | NullWriter = (
                EpochLog(run / LOGS_DIR) if is_chief else NullWriter()
            )
            stack.enter_context(closing(epoch_log))
            state, history = self._begin(run, checkpoints)
            done = state.position.step(self.steps_per_epoch)
            step_log: StepLog | NullWriter = StepLog(run, done) if is_chief else NullWriter()
            stack.enter_context(closing(step_log))
            if self._profiler is not None:
                stack.enter_context(self._profiler.begin(run / LOGS_DIR, done))
            validation_log: StepValidationLog | NullWriter = NullWriter()
            if is_chief and self._config.fit.validation is not None:
                validation_log = StepValidationLog(run, done)
            stack.enter_context(closing(validation_log))
            if self._graph_writer is not None:
                self._graph_writer.begin(epoch_log)
            context = RunContext(
                run, checkpoints, step_log, epoch_log, self._progress, stop, self._workers,
                validation_log, self._norms,
            )  # fmt: skip
            runner = EpochRunner(self.epoch_input, self._run_steps, context)
            if self._config.fit.checkpoint.at_start and checkpoints.saved is None:
                runner.save(state)
            yield runner, state, history

    def _begin(
        self, run: Path, checkpoints: CheckpointManager
    ) -> tuple[ResumeState, list[EpochRecord]]:
        """Returns where the run goes on, and the history of its finished epochs.

        The history is as long as the restored weights are old, so the loop may count by it.
        """
        state = checkpoints.restore_last(self._progress.message)
        position = Position(0, 0) if state is None else state.position
        history = self._read_history(run, position.epoch, checkpoints)
        if state is None:
            report = self.warm_start()
            if report is not None:
                if self._workers.is_chief:
                    write_json(run / WARM_START_FILE, asdict(report))
                self._progress.message(report.render())
            return ResumeState(position, EpochSums(), self._config.seed), history
        if state.seed != self._config.seed:
            raise InputDataError(
                "the checkpoint is of a run with another seed",
                received=f"seed {state.seed}",
                allowed=f"seed {self._config.seed}",
                fix="train again without --resume",
            )
        where = f"after epoch {position.epoch}"
        if position.batch or not position.epoch:
            where = f"in epoch {position.epoch + 1} after step {position.batch}"
        self._progress.message(
            f"resuming {where}", finished_epochs=position.epoch, finished_batches=position.batch
        )
        return state, history

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

    def _build_validations(self, runner: EpochRunner, metric: str | None) -> StepValidations | None:
        """Returns the validations between epochs, those before a resume included."""
        config, validate = self._config.fit.validation, self._validate_steps
        if config is None:
            return None
        context = runner.context
        earlier = self._workers.share(lambda: list(map(asdict, read_step_validations(context.run))))
        return StepValidations(
            config.every_steps,
            self._choose_stopping("steps", metric),
            [StepValidation(**record) for record in earlier],
            (context.validation_log, context.epoch_log),
            lambda state: self._validate(runner, state, validate),
        )

    def _choose_stopping(self, by: str, metric: str | None) -> EarlyStoppingConfig | None:
        """Returns early stopping with its metric, None where something else decides."""
        stopping = self._config.fit.early_stopping
        if metric is None or stopping is None or stopping.by != by:
            return None
        return stopping.model_copy(update={"metric": metric})

    def _is_over(
        self, history: list[EpochRecord], metric: str | None, validations: StepValidations | None
    ) -> bool:
        """Whether training ends with the epochs so far."""
        if len(history) >= self.plan.epochs or (validations and validations.should_stop()):
            return True
        return should_stop(history, self._choose_stopping("epochs", metric))

    def _count_trained(self, history: list[EpochRecord]) -> int:
        return sum(record.examples for record in history) // self._config.input.batch_size

    def _validate(
        self, runner: EpochRunner, state: ResumeState, validate: Validate | None
    ) -> dict[str, float]:
        """Returns the validation metrics; a signal ends it at once, as it can be done again.

        The chief validates for all: numbers that differ in the last bit on other machines would
        have the processes stop at different epochs.
        """
        name = find_non_finite(self.model.named_variables.items())
        if name is not None:
            runner.diverge(state.position, f"{name} is not finite")

        def measure() -> dict[str, float] | None:
            try:
                with runner.context.stop.immediate():
                    return {} if validate is None else dict(validate(self.model))
            except StopNowError:
                return None

        found = self._workers.share(measure)
        if found is None:
            runner.save_and_stop(state)
        return found

    def _describe_epoch(self, state: ResumeState, validation: dict[str, float]) -> EpochRecord:
        sums, steps = state.sums, state.position.batch
        examples = steps * self._config.input.batch_size
        counts = self.epoch_input.count_left_out(state.position.epoch)
        lines = [*counts.describe(), *self.epoch_input.render_tables()]
        for line in lines:
            if line not in self._shown:  # Most losses are the same in every epoch.
                self._progress.message(line)
        self._shown = lines
        return EpochRecord(
            epoch=state.position.epoch + 1,
            loss=sums.loss / steps,
            seconds=sums.seconds,
            examples=examples,
            examples_per_s=examples / sums.seconds,
            input_wait_share=min(1.0, sums.wait_s / sums.seconds),
            validation=validation,
            left_out=counts.totals(),
            tables=self.epoch_input.describe_tables(),
        )

    def _end_epoch(
        self,
        runner: EpochRunner,
        history: list[EpochRecord],
        metric: str | None,
        *,
        is_chosen: bool,
    ) -> ResumeState:
        """Saves a finished epoch; returns where the next one begins.

        Args:
            runner: Saves.
            history: The epochs, this one the last.
            metric: The metric that chooses the epoch.
            is_chosen: Whether a validation between epochs has chosen the weights to keep.
        """
        record = history[-1]
        best = not is_chosen and find_best_epoch(history, metric) == record.epoch
        # The history is at most one epoch ahead of the checkpoints, which come last: they are
        # what says that the epoch is done.
        runner.wait()
        if self._workers.is_chief:
            with disk_errors(
                "cannot write the history of the run; the checkpoints are untouched",
                "free some space (or check the permissions), then go on with --resume",
            ):
                write_history(runner.context.run, history)
        state = ResumeState(Position(record.epoch, 0), EpochSums(), self._config.seed)
        runner.save(state, best=best)
        shown = self._config.fit.histograms
        samples = None if shown is None else read_weight_samples(self.model, shown.sampled_rows)
        runner.context.epoch_log.write(record, self._count_trained(history), samples)
        self._progress.epoch(record, best and metric is not None, metric)
        return state

"""Trainer: trains epochs, validates, stops early and saves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import tensorflow as tf

from conf.artefacts.run import LOGS_DIR, STEPS_FILE, VALIDATIONS_FILE, WARM_START_FILE, write_json
from conf.errors import InputDataError, SluiceError
from conf.metrics import LOSS_METRIC
from conf.training.train import EarlyStoppingConfig, StepRange, TrainConfig
from training.checkpoint.checkpoint_files import EpochSums, Position, ResumeState
from training.checkpoint.manager import CheckpointManager
from training.distribution.workers import NullWriter, Workers, disk_errors
from training.embedding.worker_rows import ServedRows
from training.loop.epochs import EpochRunner, RunContext, StopNowError, StopRequest
from training.loop.parts import TrainingParts, build
from training.loop.plan import check
from training.loop.validation import (
    StepValidations,
    Validate,
    find_best_epoch,
    is_measured,
    should_stop,
)
from training.loop.warm_start import WarmStartReport, WarmTarget, start_from
from training.monitoring.progress import TrainingProgress
from training.monitoring.run_logs import (
    EpochLog,
    EpochRecord,
    RecordLog,
    StepProfiler,
    StepRecord,
    StepValidation,
    TrainingResult,
    read_resumed_history,
    read_step_validations,
    write_history,
)
from training.reader.training_data import TrainingData

Log = TypeVar("Log", EpochLog, RecordLog[StepRecord], RecordLog[StepValidation])


class Trainer:
    """Trains one model of a config on a dataset version; `parts` is what it is made of.

    Raises:
        SluiceError: The config does not fit the dataset or the devices; nothing was written.
    """

    def __init__(
        self,
        config: TrainConfig,
        data: TrainingData,
        strategy: tf.distribute.Strategy,
        progress: TrainingProgress,
        profile: StepRange | None = None,
    ) -> None:
        self._take(build(check(config, data), strategy, progress, profile))

    @classmethod
    def of(cls, parts: TrainingParts) -> Trainer:
        trainer = cls.__new__(cls)
        trainer._take(parts)
        return trainer

    def _take(self, parts: TrainingParts) -> None:
        self.parts = parts
        self._workers = Workers(parts.strategy)
        self._served = ServedRows(self._workers, parts.model.tables)
        self._warm_start: WarmStartReport | None = None
        self._metric: str | None = None  # What chooses the epoch; None: the last one is kept.
        self._shown: list[str] = []

    def fit(
        self, run: Path, validate: Validate | None, stop: StopRequest | None = None
    ) -> TrainingResult:
        """Trains until the last epoch or until the metric no longer improves.

        Goes on at the newest checkpoint of the run directory, which exists, where it has one.
        `validate` returns the validation metrics of the model, None: there are no rows for it.

        Raises:
            TrainingDivergedError: The loss or a weight is no finite number.
            TrainingInterruptedError: A signal asked to stop; the state is saved.
            SluiceError: Records, or files of the run, are damaged or cannot be written.
        """
        self._metric = self._choose_metric(is_validated=validate is not None)
        with self._open_run(run, stop or StopRequest()) as (runner, state, history):
            validations = self._build_validations(runner)
            # An epoch that was begun is brought to its end, even if none of it is left to train.
            while state.position.batch or not self._is_over(history, validations):
                metric, latest = self._metric or "", history[-1].validation if history else {}
                shown = (metric, latest[metric]) if metric in latest else None
                state = runner.run(state, shown, validations)
                found = self._validate(runner, state, validate)
                history.append(self._describe_epoch(state, found))
                state = self._end_epoch(runner, history, is_chosen=validations.best is not None)
            runner.wait()
        return self._describe_result(history, validations.best)

    def warm_start(self) -> WarmStartReport | None:
        """Sets the weights of `fit.warm_start`, once; refused, the model is as it was."""
        parts, config = self.parts, self.parts.plan.config
        if self._warm_start is None and config.fit.warm_start is not None:
            target = WarmTarget(parts.model, parts.optimizers, parts.plan.data)
            self._warm_start = start_from(config, target, self._workers)
        return self._warm_start

    def _choose_metric(self, *, is_validated: bool) -> str | None:
        """Returns the metric that chooses the epoch, None for the last one; says if it differs."""
        planned, tell = self.parts.plan.metric, self.parts.progress.message
        metric = planned if is_validated or planned == LOSS_METRIC else None
        if planned is not None and metric is None:
            tell("the dataset has no validation split: no early stopping, the last epoch is kept")
        stopping = self.parts.plan.config.fit.early_stopping
        asked = stopping and stopping.metric
        if metric is not None and asked and asked != metric:
            tell(
                f"rows with labels are not ranked: {metric} of the held-out rows chooses the "
                f"epoch, not {asked}"
            )
        return metric

    @contextmanager
    def _open_run(
        self, run: Path, stop: StopRequest
    ) -> Iterator[tuple[EpochRunner, ResumeState, list[EpochRecord]]]:
        parts, fit, is_chief = self.parts, self.parts.plan.config.fit, self._workers.is_chief
        with ExitStack() as stack:
            with parts.strategy.scope():
                checkpoints = CheckpointManager(
                    run, parts.model, parts.optimizers, fit.checkpoint, self._workers
                )
            stack.enter_context(closing(checkpoints))
            logs = run / LOGS_DIR
            epoch_log = _open(stack, is_chief, lambda: EpochLog(logs))
            state, history = self._begin(run, checkpoints)
            done = state.position.step(parts.steps.steps_per_epoch)
            step_file, validation_file = run / STEPS_FILE, run / VALIDATIONS_FILE
            step_log = _open(stack, is_chief, lambda: RecordLog(step_file, StepRecord, done))
            run_steps = parts.run_steps
            if parts.profile is not None and is_chief:
                run_steps = StepProfiler(run_steps, parts.profile, parts.progress)
                stack.enter_context(run_steps.begin(logs, done))
            is_logged = is_chief and fit.validation is not None
            validation_log = _open(
                stack, is_logged, lambda: RecordLog(validation_file, StepValidation, done)
            )
            context = RunContext(
                run, checkpoints, step_log, epoch_log, parts.progress, stop, self._workers,
                validation_log,
            )  # fmt: skip
            runner = EpochRunner(parts.epoch_input, run_steps, context)
            if fit.checkpoint.at_start and checkpoints.saved is None:
                runner.save(state)
            yield runner, state, history

    def _begin(
        self, run: Path, checkpoints: CheckpointManager
    ) -> tuple[ResumeState, list[EpochRecord]]:
        """Returns where the run goes on, and the history of its finished epochs."""
        tell, seed = self.parts.progress.message, self.parts.plan.config.seed
        state = checkpoints.restore_last(tell)
        position = Position(0, 0) if state is None else state.position
        entries = self._workers.share(
            lambda: list(map(asdict, read_resumed_history(run, position.epoch)))
        )
        history = [EpochRecord(**entry) for entry in entries]
        if state is None:
            report = self.warm_start()
            if report is not None:
                if self._workers.is_chief:
                    write_json(run / WARM_START_FILE, asdict(report))
                tell(report.render())
            return ResumeState(position, EpochSums(), seed), history
        if state.seed != seed:
            raise InputDataError(
                "the checkpoint is of a run with another seed",
                received=f"seed {state.seed}",
                allowed=f"seed {seed}",
                fix="train again without --resume",
            )
        done = {"finished_epochs": position.epoch, "finished_batches": position.batch}
        tell(f"resuming in epoch {position.epoch + 1} after step {position.batch}", **done)
        return state, history

    def _build_validations(self, runner: EpochRunner) -> StepValidations:
        context, config = runner.context, self.parts.plan.config.fit.validation
        earlier = self._workers.share(lambda: list(map(asdict, read_step_validations(context.run))))
        return StepValidations(
            None if config is None else config.every_steps,
            self._choose_stopping("steps"),
            [StepValidation(**record) for record in earlier],
            (context.validation_log, context.epoch_log),
            lambda state: self._validate(runner, state, self.parts.validate_steps),
        )

    def _choose_stopping(self, by: str) -> EarlyStoppingConfig | None:
        """Returns early stopping with its metric, None where something else decides."""
        stopping = self.parts.plan.config.fit.early_stopping
        if self._metric is None or stopping is None or stopping.by != by:
            return None
        return stopping.model_copy(update={"metric": self._metric})

    def _is_over(self, history: list[EpochRecord], validations: StepValidations) -> bool:
        if len(history) >= self.parts.steps.epochs or validations.should_stop():
            return True
        return should_stop(history, self._choose_stopping("epochs"))

    def _count_trained(self, history: list[EpochRecord]) -> int:
        return sum(record.examples for record in history) // self.parts.plan.config.input.batch_size

    def _validate(
        self, runner: EpochRunner, state: ResumeState, validate: Validate | None
    ) -> dict[str, float]:
        """Returns the chief's validation metrics, so that all processes stop at one epoch."""
        variables = self.parts.model.named_variables | self._served.variables
        runner.require_finite(state.position, variables)

        def measure() -> dict[str, float] | None:
            try:
                with runner.context.stop.immediate():
                    return {} if validate is None else dict(validate(self.parts.model))
            except StopNowError:
                return None

        try:
            found = self._served.share(measure)
        except SluiceError:
            # What can be corrected, such as a user's metric, shall cost no step.
            runner.save_once(state, "validation failed: the state is saved, go on with --resume")
            raise
        if found is None:
            runner.save_and_stop(state)
        return found

    def _describe_epoch(self, state: ResumeState, validation: dict[str, float]) -> EpochRecord:
        sums, steps, source = state.sums, state.position.batch, self.parts.epoch_input
        examples = steps * self.parts.plan.config.input.batch_size
        spaces = [part.space for part in source.inputs.keyed]
        lines = [
            *source.left_out.describe(),
            *(line for space in spaces for line in space.render()),
        ]
        for line in lines:
            if line not in self._shown:  # Most losses are the same in every epoch.
                self.parts.progress.message(line)
        self._shown = lines
        return EpochRecord(
            epoch=state.position.epoch + 1,
            loss=sums.loss / steps,
            seconds=sums.seconds,
            examples=examples,
            examples_per_s=examples / sums.seconds,
            input_wait_share=min(1.0, sums.wait_s / sums.seconds),
            validation=validation,
            left_out=source.left_out.totals(),
            tables={space.label: space.describe() for space in spaces},
        )

    def _end_epoch(
        self, runner: EpochRunner, history: list[EpochRecord], *, is_chosen: bool
    ) -> ResumeState:
        """Saves the last epoch of a history; `is_chosen`: a step's weights are kept."""
        record, metric = history[-1], self._metric
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
        state = ResumeState(Position(record.epoch, 0), EpochSums(), self.parts.plan.config.seed)
        runner.save(state, best=best)
        runner.context.epoch_log.write(record, self._count_trained(history))
        self.parts.progress.epoch(record, best and is_measured([record], metric), metric)
        return state

    def _describe_result(
        self, history: list[EpochRecord], best: StepValidation | None
    ) -> TrainingResult:
        metric = self._metric
        steps, is_chosen = self._count_trained(history), is_measured(history, metric)
        if metric is not None and not is_chosen:
            self.parts.progress.message(
                f"{metric} was not defined in any epoch: it has chosen nothing, and stopped nothing"
            )
        return TrainingResult(
            best_epoch=find_best_epoch(history, metric) if best is None else best.epoch,
            epochs=len(history),
            steps=steps,
            stopped_early=steps < self.parts.steps.total,
            left_out=history[-1].left_out,
            best_step=None if best is None else best.step,
            selected_by=metric if is_chosen else None,
        )


def _open(stack: ExitStack, is_written: bool, make: Callable[[], Log]) -> Log | NullWriter:
    return stack.enter_context(closing(make() if is_written else NullWriter()))

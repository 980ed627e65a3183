"""Epochs: compiled calls of several steps, with records, checkpoints and signals in between."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import numpy as np
import tensorflow as tf

from conf.errors import TrainingDivergedError
from training.checkpoint.checkpoint_files import Position, ResumeState
from training.checkpoint.manager import CheckpointManager, build_divergence_error
from training.checkpoint.saved_tensors import find_non_finite
from training.distribution.run_steps import RunSteps
from training.distribution.workers import NullWriter, Workers
from training.input.batches import FINITE_ADVICE, tell_non_finite
from training.loop.epoch_input import EpochBatches, EpochInput
from training.loop.interruption import StopRequest
from training.loop.step_validation import StepPlan, StepValidations
from training.monitoring.progress import StepStatus, TrainingProgress
from training.monitoring.run_logs import EpochLog, StepLog, StepRecord, StepValidationLog
from training.networks.own_code import own_errors

SECONDS_PER_MINUTE = 60


@dataclass(frozen=True)
class CallOutcome:
    """The steps of one compiled call.

    Attributes:
        losses: Loss of each step, float32 `[steps]`; the last one alone may not be finite.
        wait_s: Seconds that the steps waited for their batches.
    """

    losses: np.ndarray
    wait_s: float

    @property
    def steps(self) -> int:
        """How many steps there are."""
        return len(self.losses)

    @property
    def loss(self) -> float:
        """Sum of the losses."""
        return float(np.sum(self.losses, dtype=np.float64))


@dataclass(frozen=True)
class RunContext:
    """A run under way: its files, and the processes and signals that it listens to.

    Attributes:
        run: Directory of the run.
        checkpoints: Its checkpoints.
        step_log: Its `metrics.jsonl`; unwritten by all processes but the chief.
        epoch_log: Its event files; unwritten by all processes but the chief.
        progress: Shows how training goes.
        stop: Whether a signal has asked to stop.
        workers: The processes of the run, which stop together.
        validation_log: Its `validations.jsonl`; unwritten by all processes but the chief.
    """

    run: Path
    checkpoints: CheckpointManager
    step_log: StepLog | NullWriter
    epoch_log: EpochLog | NullWriter
    progress: TrainingProgress
    stop: StopRequest
    workers: Workers
    validation_log: StepValidationLog | NullWriter = field(default_factory=NullWriter)


class EpochRunner:
    """Trains epochs, each from any position to its end.

    Args:
        epoch_input: Opens the batches.
        run_steps: The compiled steps.
        context: The run.
    """

    def __init__(self, epoch_input: EpochInput, run_steps: RunSteps, context: RunContext) -> None:
        self._input, self._run_steps, self.context = epoch_input, run_steps, context
        self._config, self._steps = epoch_input.config, epoch_input.steps_per_epoch
        self._plan = StepPlan.of(self._config.fit, self._steps)
        self._saved_at = time.monotonic()

    def run(
        self,
        state: ResumeState,
        metric: tuple[str, float] | None = None,
        validations: StepValidations | None = None,
    ) -> ResumeState:
        """Trains from a resume state to the end of its epoch and returns the state there.

        The epoch ends with its batches, with the run's last step, or where validations between
        steps say so.

        Args:
            state: Where to begin.
            metric: Name and value of the last epoch's validation that the progress shows.
            validations: Validations between steps, or None.

        Raises:
            TrainingInterruptedError: A signal came; the state is saved.
            TrainingDivergedError: A loss is not finite; the batch is written.
            InputDataError: A record is damaged.
            InternalError: A file of the run cannot be written.
        """
        mark = time.monotonic()
        with self._input.open(state.position) as batches:
            if self._validate_where_due(state, validations):  # A signal had ended it.
                mark = time.monotonic()
            while not self._is_over(state.position, validations):
                if self.context.workers.any(self.context.stop.requested):
                    self.save_and_stop(state)
                outcome = self._run_call(batches, state.position)
                now = time.monotonic()
                self._require_finite(state.position, outcome)
                state = state.after(outcome.steps, outcome.loss, outcome.wait_s, now - mark)
                self._log(state.position, outcome, now - mark)
                self._show(state, metric)
                validated = self._validate_where_due(state, validations)
                self._save_where_due(state)
                mark = time.monotonic() if validated else now
            if state.position.batch < self._steps:
                self._input.keep_counts(batches)
        return state

    def save(self, state: ResumeState, *, best: bool = False) -> None:
        """Saves the variables and the resume state.

        Raises:
            TrainingDivergedError: A number of this state or of the one before is not finite.
        """
        self.context.step_log.sync()
        with self._divergence_errors():
            self.context.checkpoints.save(state, best=best)
        self._saved_at = time.monotonic()

    def wait(self) -> None:
        """Waits until all that was saved is on the disk; raises what `save` does."""
        with self._divergence_errors():
            self.context.checkpoints.wait()

    def save_and_stop(self, state: ResumeState) -> NoReturn:
        """Saves the state, waits until it is on the disk, and ends training.

        Raises:
            TrainingInterruptedError: Always, unless saving fails.
        """
        self.save_once(state, "asked to stop: saving the state of training")
        position = state.position
        raise self.context.stop.build_error(
            f"after step {position.batch} of epoch {position.epoch + 1}"
        )

    def save_once(self, state: ResumeState, why: str) -> None:
        """Saves a state, if it is not saved yet, and waits until it is on the disk; tells why."""
        if self.context.checkpoints.saved != state.position:
            self.context.progress.message(why)
            self.save(state)
        self.wait()

    def require_finite(self, done: Position, variables: Mapping[str, tf.Variable]) -> None:
        """Ends training where a variable is not finite, at this process or another one.

        Args:
            done: Where training is.
            variables: What to look at, by name.

        Raises:
            TrainingDivergedError: One is not finite.
        """
        name = find_non_finite(variables.items())
        if self.context.workers.any(name is not None):
            self.diverge(done, f"{name or 'a row of another worker'} is not finite")

    def diverge(self, done: Position, received: str) -> NoReturn:
        """Ends training whose state is not finite after the last step.

        Args:
            done: Where the state was seen.
            received: The number that is not finite.

        Raises:
            TrainingDivergedError: Always.
        """
        last = divmod(done.step(self._steps) - 1, self._steps)
        self._diverge(Position(*last), received)

    def _run_call(self, batches: EpochBatches, position: Position) -> CallOutcome:
        """Runs the steps of one compiled call, and reads the tail after the epoch's last one."""
        steps = self._plan.count_steps_of_call(position)
        with own_errors(), self._input.step_errors(position, steps):
            result = self._run_steps(batches.iterator, tf.constant(steps))
        if position.batch + steps == self._steps:
            self._input.finish(batches)
        if position.batch + steps == self._plan.count_steps_of_epoch(position.epoch):
            self._input.compare_begun()
        return CallOutcome(result.losses.numpy(), float(result.wait_s))

    def _require_finite(self, position: Position, outcome: CallOutcome) -> None:
        loss = float(outcome.losses[-1])
        if not math.isfinite(loss):
            suffix = " (or a gradient)" if self._config.fit.check_gradients else ""
            culprit = Position(position.epoch, position.batch + outcome.steps - 1)
            self._diverge(culprit, f"loss {loss}{suffix}")

    def _is_over(self, position: Position, validations: StepValidations | None) -> bool:
        """Whether an epoch has no further step."""
        if position.batch >= self._plan.count_steps_of_epoch(position.epoch):
            return True
        return validations is not None and validations.should_stop()

    def _validate_where_due(self, state: ResumeState, validations: StepValidations | None) -> bool:
        """Validates, and saves the best weights; returns whether it was due."""
        step = state.position.step(self._steps)
        if validations is None or not validations.is_due(step):
            return False
        is_best = validations.update(state, step)
        if validations.should_stop():
            self._input.compare_begun()
        if is_best:
            self.save(state, best=True)
        return True

    def _save_where_due(self, state: ResumeState) -> None:
        with self._divergence_errors():
            self.context.checkpoints.check()
        if self._is_due(state.position) and self.context.checkpoints.saved != state.position:
            self.save(state)

    def _is_due(self, position: Position) -> bool:
        config = self._config.fit.checkpoint
        if config.every_steps is not None and not position.step(self._steps) % config.every_steps:
            return True
        if config.every_minutes is None:
            return False
        waited_s = time.monotonic() - self._saved_at
        # Each process has a clock of its own, and all of them have to save.
        return self.context.workers.any(waited_s >= config.every_minutes * SECONDS_PER_MINUTE)

    @contextmanager
    def _divergence_errors(self) -> Iterator[None]:
        """Ends training where the state that a checkpoint was to hold is not finite."""
        try:
            yield
        except TrainingDivergedError as error:
            saved = self.context.checkpoints.saved
            if saved is None:
                raise
            self.diverge(saved, str(error.received))

    def _diverge(self, position: Position, received: str) -> NoReturn:
        odd = ""
        if self.context.workers.is_chief:
            with suppress(OSError):  # It must not hide what went wrong first.
                odd = tell_non_finite(self._input.read_batch(position))
        has_temperature = self._config.model.kind == "retrieval"
        raise build_divergence_error(
            received + odd,
            position,
            has_temperature=has_temperature,
            advice=FINITE_ADVICE if odd else "",
        )

    def _log(self, position: Position, outcome: CallOutcome, seconds: float) -> None:
        self.context.step_log.write(
            StepRecord(
                step=position.step(self._steps),
                epoch=position.epoch + 1,
                loss=outcome.loss / outcome.steps,
                examples_per_s=outcome.steps * self._config.input.batch_size / seconds,
                input_wait_share=min(1.0, outcome.wait_s / seconds),
            )
        )

    def _show(self, state: ResumeState, metric: tuple[str, float] | None) -> None:
        position, sums = state.position, state.sums
        done, total = position.step(self._steps), self._plan.total
        self.context.progress.step(
            StepStatus(
                epoch=position.epoch + 1,
                epochs=self._plan.epochs,
                step=position.batch,
                steps=self._plan.count_steps_of_epoch(position.epoch),
                loss=sums.loss / position.batch,
                examples_per_s=position.batch * self._config.input.batch_size / sums.seconds,
                input_wait_share=min(1.0, sums.wait_s / sums.seconds),
                eta_s=(total - done) * sums.seconds / position.batch,
                run_step=done,
                run_steps=total,
                metric=metric,
            )
        )

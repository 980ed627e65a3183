"""Epochs: their batches, and compiled calls of several steps with records, checkpoints, signals."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from conf.errors import (
    InputDataError,
    TrainingCancelledError,
    TrainingDivergedError,
    TrainingInterruptedError,
)
from conf.training.train import TrainConfig
from training.checkpoint.checkpoint_files import Position, ResumeState
from training.checkpoint.manager import CheckpointManager, build_divergence_error
from training.checkpoint.saved_tensors import find_non_finite
from training.distribution.strategy import RunSteps, distribute_batches
from training.distribution.workers import NullWriter, Workers
from training.embedding.distinct_rows import Lookups, add_distinct_ids
from training.embedding.key_mapping import KeyedFeatures, map_keys
from training.input.batches import (
    FINITE_ADVICE,
    Batch,
    build_train_dataset,
    find_carried,
    input_errors,
    tell_non_finite,
)
from training.loop.plan import StepPlan
from training.loop.validation import StepValidations
from training.models.embedded_inputs import vector_errors
from training.monitoring.progress import StepStatus, TrainingProgress
from training.monitoring.run_logs import EpochLog, RecordLog, StepRecord, StepValidation
from training.networks.user_code import user_errors
from training.reader.shards import DamagePolicy, InputCounts, ShardChecks, compare_begun
from training.reader.training_data import InputOptions, TrainingData

SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SECONDS_PER_MINUTE = 60


class StopNowError(BaseException):
    """A signal came where nothing is to be finished; no Exception, which user code may swallow."""


class StopRequest:
    """Whether a signal has asked training to stop, once the compiled loop of steps has ended."""

    def __init__(self) -> None:
        self._signal: signal.Signals | None = None
        self._immediate = False

    @property
    def requested(self) -> bool:
        return self._signal is not None

    def request(self, number: int) -> None:
        """Takes note of a signal; raises `StopNowError` inside `immediate`."""
        self._signal = signal.Signals(number)
        if self._immediate:
            self._immediate = False
            raise StopNowError

    @contextmanager
    def immediate(self) -> Iterator[None]:
        """Lets a signal, before or inside the block, end it: for work that changes nothing."""
        self._immediate = True
        try:
            if self.requested:
                raise StopNowError
            yield
        finally:
            self._immediate = False

    def build_error(self, where: str) -> TrainingInterruptedError:
        """Returns the error that ends the run once its state is saved at a position, in words."""
        cancelled = self._signal is signal.SIGINT
        kind = TrainingCancelledError if cancelled else TrainingInterruptedError
        return kind(
            "training was interrupted, and its state is saved",
            received=self._signal.name if self._signal is not None else None,
            fix=f"go on {where} with --resume",
        )


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Turns the first SIGTERM or SIGINT inside the block, of the main thread, into a request."""
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def handle(number: int, frame: FrameType | None) -> None:
        restore()
        stop.request(number)

    for number in SIGNALS:
        signal.signal(number, handle)
    try:
        yield stop
    finally:
        restore()


@dataclass(frozen=True)
class StepInputs:
    """The features that a step reads.

    Ahead of it the distinct ids of `lookups` are found, and the keys of `keyed` mapped to rows.
    The values of `binary_labels` must be 0 or 1.
    """

    features: tuple[str, ...]
    lookups: tuple[Lookups, ...] | None = None
    keyed: tuple[KeyedFeatures, ...] = ()
    binary_labels: tuple[str, ...] = ()


class EpochInput:
    """Opens the batches of a run's epochs, in the form that the steps read."""

    def __init__(
        self,
        config: TrainConfig,
        data: TrainingData,
        strategy: tf.distribute.Strategy,
        inputs: StepInputs,
    ) -> None:
        self.config, self.data, self.inputs = config, data, inputs
        self.steps_per_epoch = data.steps_per_epoch(config.input)
        self._strategy = strategy
        self.left_out = InputCounts()
        self._checks = ShardChecks()

    @contextmanager
    def open(self, position: Position) -> Iterator[Any]:
        """Yields the iterator over the rest of an epoch; `left_out` counts what it leaves out."""
        self.left_out = InputCounts()
        dataset = self.build_dataset(position, self.left_out)
        if self.inputs.keyed:
            batches = self.steps_per_epoch - position.batch
            is_new = position.batch == 0
            dataset = map_keys(dataset, self.inputs.keyed, batches, is_new_epoch=is_new)
        if self.inputs.lookups is not None:
            dataset = add_distinct_ids(dataset, self.inputs.lookups)
        with input_errors(self.data.version_dir, self.data.manifest, "train"):
            yield iter(distribute_batches(dataset, self._strategy))

    def finish(self, batches: Any) -> None:
        """Reads the tail of an epoch whose steps are done, for what it leaves out."""
        if not self.config.input.is_exact:
            for _ in batches:
                pass

    def compare_begun(self) -> None:
        """Compares shards that were read in part with their checksums, once a run."""
        compare_begun(DamagePolicy(self.config.input.on_corrupt, checks=self._checks))

    def read_batch(self, position: Position) -> Batch:
        batch: Batch = next(iter(self.build_dataset(position, InputCounts()).take(1)))
        return batch

    @contextmanager
    def step_errors(self, position: Position, steps: int) -> Iterator[None]:
        """Turns errors of some steps from a position on, if data cause them, into ours."""
        try:
            with vector_errors():
                yield
        except tf.errors.OutOfRangeError as error:
            raise InputDataError(
                "the train split gives fewer rows than were counted before training",
                received=f"fewer than {position.batch + steps} batches in epoch "
                f"{position.epoch + 1}",
                allowed=f"{self.steps_per_epoch} batches of {self.config.input.batch_size} rows",
                fix="restore the shards that are damaged or gone by now, or start a new run",
            ) from error
        except tf.errors.InvalidArgumentError as error:
            # What CPUs say of a gather beyond a table; not of what the input itself has raised.
            said = [line for line in str(error).splitlines() if "is not in [0" in line]
            if find_carried(error) or not said:
                raise
            raise InputDataError(
                "the train split holds an id that its feature's vocabulary does not have",
                received=said[0].strip(),
                fix="leave such rows out by input.filter, or build the dataset again",
            ) from error

    def build_dataset(self, position: Position, counts: InputCounts) -> tf.data.Dataset:
        """Builds the batches from a position on, as the shards have them; counts the rest."""
        options = InputOptions(
            binary_labels=self.inputs.binary_labels, counts=counts, checks=self._checks
        )
        return build_train_dataset(
            self.data.version_dir,
            self.data.manifest,
            self.config.input,
            epoch=position.epoch,
            seed=self.config.seed,
            features=self.inputs.features,
            start_batch=position.batch,
            options=options,
        )


@dataclass(frozen=True)
class RunContext:
    """A run under way: its files, whose logs the chief alone writes, its processes and signals."""

    run: Path
    checkpoints: CheckpointManager
    step_log: RecordLog[StepRecord] | NullWriter
    epoch_log: EpochLog | NullWriter
    progress: TrainingProgress
    stop: StopRequest
    workers: Workers
    validation_log: RecordLog[StepValidation] | NullWriter = field(default_factory=NullWriter)


class EpochRunner:
    """Trains epochs, each from any position to its end."""

    def __init__(self, epoch_input: EpochInput, run_steps: RunSteps, context: RunContext) -> None:
        self._input, self._run_steps, self.context = epoch_input, run_steps, context
        self._config, self._steps = epoch_input.config, epoch_input.steps_per_epoch
        self._plan = StepPlan.of(self._config.fit, self._steps)
        self._saved_at = time.monotonic()

    def run(
        self, state: ResumeState, metric: tuple[str, float] | None, validations: StepValidations
    ) -> ResumeState:
        """Trains to the end of an epoch; `metric` is what is shown of the last validation."""
        mark = time.monotonic()
        with self._input.open(state.position) as batches:
            if state.position.batch == self._steps:  # Another process has done its steps.
                self._input.finish(batches)
            if self._validate_where_due(state, validations):  # A signal had ended it.
                mark = time.monotonic()
            while not self._is_over(state.position, validations):
                if self.context.workers.any(self.context.stop.requested):
                    self.save_and_stop(state)
                losses, wait_s = self._run_call(batches, state.position)
                now = time.monotonic()
                if len(odd := np.flatnonzero(~np.isfinite(losses))):
                    at = Position(state.position.epoch, state.position.batch + int(odd[0]))
                    self._diverge(at, f"loss {losses[odd[0]]}")
                loss = float(np.sum(losses, dtype=np.float64))
                state = state.after(len(losses), loss, wait_s, now - mark)
                self._log(state.position, loss / len(losses), len(losses), wait_s, now - mark)
                self._show(state, metric)
                validated = self._validate_where_due(state, validations)
                self._save_where_due(state)
                mark = time.monotonic() if validated else now
        return state

    def save(self, state: ResumeState, *, best: bool = False) -> None:
        """Saves the variables and the resume state; refuses numbers that are not finite."""
        self.context.step_log.sync()
        with self._divergence_errors():
            self.context.checkpoints.save(state, best=best)
        self._saved_at = time.monotonic()

    def wait(self) -> None:
        with self._divergence_errors():
            self.context.checkpoints.wait()

    def save_and_stop(self, state: ResumeState) -> NoReturn:
        """Saves the state, waits until it is on the disk, and ends training by the stop's error."""
        self.save_once(state, "asked to stop: saving the state of training")
        position = state.position
        raise self.context.stop.build_error(
            f"after step {position.batch} of epoch {position.epoch + 1}"
        )

    def save_once(self, state: ResumeState, why: str) -> None:
        if self.context.checkpoints.saved != state.position:
            self.context.progress.message(why)
            self.save(state)
        self.wait()

    def require_finite(self, done: Position, variables: Mapping[str, tf.Variable]) -> None:
        """Ends training at a position where a variable is not finite, on any process."""
        name = find_non_finite(variables.items())
        if self.context.workers.any(name is not None):
            self._diverge_after(done, f"{name or 'a row of another worker'} is not finite")

    def _run_call(self, batches: Any, position: Position) -> tuple[np.ndarray, float]:
        """Runs the steps of one compiled call; returns their losses, and seconds of waiting."""
        steps = self._plan.count_steps_of_call(position)
        with user_errors(), self._input.step_errors(position, steps):
            result = self._run_steps(batches, tf.constant(steps))
        if position.batch + steps == self._steps:
            self._input.finish(batches)
        if position.batch + steps == self._plan.count_steps_of_epoch(position.epoch):
            self._input.compare_begun()
        return result.losses.numpy(), float(result.wait_s)

    def _is_over(self, position: Position, validations: StepValidations) -> bool:
        is_done = position.batch >= self._plan.count_steps_of_epoch(position.epoch)
        return is_done or validations.should_stop()

    def _validate_where_due(self, state: ResumeState, validations: StepValidations) -> bool:
        """Validates, and saves the best weights; returns whether it was due."""
        step = state.position.step(self._steps)
        if not validations.is_due(step):
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
        return self.context.workers.any(waited_s >= config.every_minutes * _SECONDS_PER_MINUTE)

    @contextmanager
    def _divergence_errors(self) -> Iterator[None]:
        """Names the step where the state that a checkpoint was to hold diverged."""
        try:
            yield
        except TrainingDivergedError as error:
            saved = self.context.checkpoints.saved
            if saved is None:
                raise
            self._diverge_after(saved, str(error.received))

    def _diverge_after(self, done: Position, received: str) -> NoReturn:
        last = divmod(done.step(self._steps) - 1, self._steps)
        self._diverge(Position(*last), received)

    def _diverge(self, position: Position, received: str) -> NoReturn:
        odd = ""
        if self.context.workers.is_chief:
            with suppress(OSError):  # It must not hide what went wrong first.
                odd = tell_non_finite(self._input.read_batch(position))
        raise build_divergence_error(
            received + odd,
            position,
            has_temperature=self._config.model.kind == "retrieval",
            advice=FINITE_ADVICE if odd else "",
        )

    def _log(
        self, position: Position, loss: float, steps: int, wait_s: float, seconds: float
    ) -> None:
        self.context.step_log.write(
            StepRecord(
                step=position.step(self._steps),
                epoch=position.epoch + 1,
                loss=loss,
                examples_per_s=steps * self._config.input.batch_size / seconds,
                input_wait_share=min(1.0, wait_s / seconds),
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

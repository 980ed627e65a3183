"""Epochs: compiled calls of several steps, with records, checkpoints and signals in between."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from conf.errors import InputDataError, TrainingDivergedError
from conf.manifest import Manifest
from conf.paths import ReadablePath
from conf.training.input import InputConfig
from conf.training.train import TrainConfig
from training.checkpoint.checkpoint_files import EpochSums, Position, ResumeState
from training.checkpoint.manager import CheckpointManager
from training.distribution.strategy import distribute_batches
from training.distribution.workers import NullWriter, Workers
from training.embedding.distinct_rows import Lookups, add_distinct_ids
from training.embedding.key_mapping import KeyedFeatures, map_keys
from training.input.batches import Batch, build_train_dataset
from training.input.damage import InputCounts, input_errors, is_carried
from training.input.split_source import InputOptions, SplitSource, count_rows, count_steps
from training.loop.diverged_batch import DivergedStep, build_divergence_error, write_diverged_batch
from training.loop.interruption import StopRequest
from training.loop.step import RunSteps, StepsResult
from training.monitoring.progress import StepStatus, TrainingProgress
from training.monitoring.run_logs import StepLog, StepRecord


def find_unknown_id(
    batches: Iterable[Batch], manifest: Manifest, features: Sequence[str]
) -> InputDataError | None:
    """Returns the error that names the first id that no row of a table stands for, or None.

    Looking at every id of every batch would cost each run what only a damaged dataset needs.

    Args:
        batches: The batches of the steps that failed.
        manifest: The dataset.
        features: Names of the features that are read.
    """
    sizes = {name: manifest.schema[name].vocabulary_size for name in features}
    for batch in batches:
        for name, size in sizes.items():
            if size is None or name not in batch:
                continue
            ids = _flatten(batch[name])
            stray = ids[(ids < 0) | (ids >= size)]
            if stray.size:
                return InputDataError(
                    f"feature {name!r} holds an id that its vocabulary does not have",
                    received=f"{int(stray[0])} in split 'train' of {manifest.dataset_name!r}",
                    allowed=f"0 to {size - 1}",
                    fix="leave such rows out by input.filter, or build the dataset again",
                )
    return None


def _flatten(value: tf.Tensor | tf.RaggedTensor | tf.SparseTensor) -> np.ndarray:
    if isinstance(value, tf.RaggedTensor):
        value = value.flat_values
    elif isinstance(value, tf.SparseTensor):
        value = value.indices[:, -1]
    return np.asarray(value).ravel()


@dataclass(frozen=True)
class TrainingData:
    """What a run reads.

    Attributes:
        version_dir: Directory of the dataset version.
        manifest: Its manifest.
        counts_file: Keeps how many rows the input leaves, where they had to be counted; None
            keeps it for this process alone.
    """

    version_dir: ReadablePath
    manifest: Manifest
    counts_file: Path | None = None

    def steps_per_epoch(self, config: InputConfig) -> int:
        """Whole batches of an epoch; the rows left over are drawn anew each epoch.

        Args:
            config: How the train split is read. Only where it leaves rows out is the split read
                through, once.

        Raises:
            InputDataError: There is no whole batch, or a shard is damaged.
        """
        source = SplitSource(self.version_dir, self.manifest, "train", config)
        return count_steps(source, self.counts_file)

    def held_out_rows(self, config: InputConfig) -> int:
        """Rows of train that `config.validation` keeps apart; counted as those of an epoch are.

        Raises:
            InputDataError: A shard is damaged.
        """
        source = SplitSource(self.version_dir, self.manifest, "train", config, is_held_out=True)
        return count_rows(source, self.counts_file)


@dataclass(frozen=True)
class StepInputs:
    """What a step reads of the dataset.

    Attributes:
        features: Names of features.
        lookups: Those whose distinct ids are found ahead of the step, or None.
        keyed: Those whose keys are mapped to rows ahead of the step.
    """

    features: tuple[str, ...]
    lookups: tuple[Lookups, ...] | None = None
    keyed: tuple[KeyedFeatures, ...] = ()


@dataclass(frozen=True)
class StepsOutcome:
    """What one compiled call gave.

    Attributes:
        losses: Loss of each step, float32 `[steps]`; the last one alone may not be finite.
        wait_s: Seconds that the steps waited for their batches.
    """

    losses: np.ndarray
    wait_s: float


def count_steps_of_call(
    position: Position, steps_per_epoch: int, steps_per_loop: int, every_steps: int | None
) -> int:
    """Returns how many steps to run in one call.

    Calls end at fixed positions, whichever position a run is resumed at: at multiples of
    `steps_per_loop` inside the epoch, where a checkpoint is due, and with the epoch.
    """
    batch = position.batch
    ends = [steps_per_epoch, (batch // steps_per_loop + 1) * steps_per_loop]
    if every_steps is not None:
        ends.append(batch + every_steps - position.step(steps_per_epoch) % every_steps)
    return min(ends) - batch


class StepRunner:
    """Feeds an epoch's batches to the compiled steps.

    Args:
        config: The run's config.
        data: What to read.
        strategy: Devices to train on.
        inputs: What a step reads.
        run_steps: The compiled steps.
    """

    def __init__(
        self,
        config: TrainConfig,
        data: TrainingData,
        strategy: tf.distribute.Strategy,
        inputs: StepInputs,
        run_steps: RunSteps,
    ) -> None:
        self.config, self.data = config, data
        self.steps_per_epoch = data.steps_per_epoch(config.input)
        self._strategy, self._inputs, self._run_steps = strategy, inputs, run_steps
        is_binary = config.model.objective.kind == "binary"
        self._binary_label = data.manifest.keys.label if is_binary else None
        self._counts: dict[int, InputCounts] = {}

    def run(self, position: Position) -> Generator[StepsOutcome, None, None]:
        """Runs the steps from a position to the end of its epoch.

        Raises:
            InputDataError: A record is damaged.
        """
        fit, counts = self.config.fit, InputCounts()
        dataset = self._open(position, counts)
        if self._inputs.keyed:
            batches = self.steps_per_epoch - position.batch
            dataset = map_keys(dataset, self._inputs.keyed, batches)
        if self._inputs.lookups is not None:
            dataset = add_distinct_ids(dataset, self._inputs.lookups)
        with input_errors(self.data.version_dir, self.data.manifest, "train"):
            iterator = iter(distribute_batches(dataset, self._strategy))
            while position.batch < self.steps_per_epoch:
                steps = count_steps_of_call(
                    position, self.steps_per_epoch, fit.steps_per_loop, fit.checkpoint.every_steps
                )
                result = self._run_chunk(iterator, position, steps)
                position = Position(position.epoch, position.batch + steps)
                if position.batch == self.steps_per_epoch:
                    self._end(iterator, position.epoch, counts)
                yield StepsOutcome(result.losses.numpy(), float(result.wait_s))

    def read_batch(self, position: Position) -> Batch:
        """Reads the batch of one step, over all replicas, once more."""
        batch: Batch = next(iter(self._open(position, InputCounts()).take(1)))
        return batch

    def count_left_out(self, epoch: int) -> InputCounts:
        """Returns what the input left out of an epoch whose steps are done.

        Where another process has done them, the epoch is read once more.

        Raises:
            InputDataError: A record is damaged.
        """
        if epoch not in self._counts:
            counts = InputCounts()
            dataset = self._open(Position(epoch, self.steps_per_epoch), counts)
            with input_errors(self.data.version_dir, self.data.manifest, "train"):
                self._end(iter(dataset), epoch, counts)
        return self._counts[epoch]

    def describe_full_tables(self) -> list[str]:
        """Returns a line for each dynamic table that has refused keys a row in this epoch."""
        return [
            f"table {space.label} is full: {space.refused:,} lookups of keys without a row read "
            f"zeros (model.embeddings.{space.label}.max_rows = {space.max_rows:,})"
            for space in (part.space for part in self._inputs.keyed)
            if space.refused
        ]

    def _run_chunk(self, iterator: Any, position: Position, steps: int) -> StepsResult:
        try:
            return self._run_steps(iterator, tf.constant(steps))
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
            if is_carried(error):
                raise
            again = self._open(position, InputCounts()).take(steps)
            stray = find_unknown_id(again, self.data.manifest, self._inputs.features)
            if stray is None:
                raise
            raise stray from error

    def _end(self, iterator: Any, epoch: int, counts: InputCounts) -> None:
        """Notes what an epoch left out: all of it is read by then, the tail included."""
        if not self.config.input.is_exact:
            for _ in iterator:
                pass
        self._counts = {epoch: counts}

    def _open(self, position: Position, counts: InputCounts) -> tf.data.Dataset:
        return build_train_dataset(
            self.data.version_dir,
            self.data.manifest,
            self.config.input,
            epoch=position.epoch,
            seed=self.config.seed,
            features=self._inputs.features,
            start_batch=position.batch,
            options=InputOptions(binary_label=self._binary_label, counts=counts),
        )


SECONDS_PER_MINUTE = 60


@dataclass(frozen=True)
class RunFiles:
    """What a run writes while steps go on.

    Attributes:
        run: Directory of the run.
        checkpoints: Its checkpoints.
        steps: Its `metrics.jsonl`; unwritten by all processes but the chief.
    """

    run: Path
    checkpoints: CheckpointManager
    steps: StepLog | NullWriter


class EpochLoop:
    """Runs epochs from any position.

    Args:
        runner: Runs the steps.
        files: What is written.
        progress: Where to tell how it goes.
        stop: Whether a signal has asked to stop.
        workers: The processes of the run, which stop together.

    Attributes:
        metric: What the progress shows of the last epoch's validation: name and value, or None.
    """

    def __init__(
        self,
        runner: StepRunner,
        files: RunFiles,
        progress: TrainingProgress,
        stop: StopRequest,
        workers: Workers,
    ) -> None:
        self._runner, self._files = runner, files
        self._progress = progress
        self.stop, self._workers = stop, workers
        self.metric: tuple[str, float] | None = None
        self._saved_at = time.monotonic()

    def run(self, standing: ResumeState) -> ResumeState:
        """Trains from a standing to the end of its epoch and returns the standing there.

        Raises:
            TrainingInterruptedError: A signal came; the state is saved.
            TrainingDivergedError: A loss is not finite; the batch is written.
            InputDataError: A record is damaged.
            InternalError: A file of the run cannot be written.
        """
        mark = time.monotonic()
        with closing(self._runner.run(standing.position)) as chunks:
            while standing.position.batch < self._runner.steps_per_epoch:
                if self._workers.any(self.stop.requested):
                    self.save_and_stop(standing)
                chunk = next(chunks)
                now = time.monotonic()
                standing = self._advance(standing, chunk, now - mark)
                mark = now
        return standing

    def save(self, standing: ResumeState, *, best: bool = False) -> None:
        """Saves the state at a standing.

        Raises:
            TrainingDivergedError: A number of this state or of the one before is not finite.
        """
        self._files.steps.sync()
        with self._saving():
            self._files.checkpoints.save(standing, best=best)
        self._saved_at = time.monotonic()

    def wait(self) -> None:
        """Waits until all that was saved is on the disk; raises what `save` does."""
        with self._saving():
            self._files.checkpoints.wait()

    def diverge(self, done: Position, received: str) -> NoReturn:
        """Ends training whose state is not finite; writes the batch of the last step.

        Args:
            done: Where the state was seen.
            received: What was seen.

        Raises:
            TrainingDivergedError: Always.
        """
        steps = self._runner.steps_per_epoch
        last = divmod(done.step(steps) - 1, steps)
        self._diverge(Position(*last), math.nan, received)

    @contextmanager
    def _saving(self) -> Iterator[None]:
        try:
            yield
        except TrainingDivergedError as error:
            saved = self._files.checkpoints.saved
            if saved is None:
                raise
            self.diverge(saved, str(error.received))

    def save_and_stop(self, standing: ResumeState) -> NoReturn:
        """Saves the state, waits until it is on the disk, and ends training.

        Raises:
            TrainingInterruptedError: Always, unless saving fails.
        """
        if self._files.checkpoints.saved != standing.position:
            self._progress.message("asked to stop: saving the state of training")
            self.save(standing)
        self.wait()
        position = standing.position
        raise self.stop.build_error(f"after step {position.batch} of epoch {position.epoch + 1}")

    def _advance(self, standing: ResumeState, chunk: StepsOutcome, seconds: float) -> ResumeState:
        """Accounts for a chunk, and saves where that is due."""
        before, sums = standing.position, standing.sums
        if not math.isfinite(chunk.losses[-1]):
            last, loss = len(chunk.losses) - 1, float(chunk.losses[-1])
            suffix = " (or a gradient)" if self._runner.config.fit.check_gradients else ""
            self._diverge(Position(before.epoch, before.batch + last), loss, f"loss {loss}{suffix}")
        position = Position(before.epoch, before.batch + len(chunk.losses))
        loss = float(np.sum(chunk.losses, dtype=np.float64))
        standing = ResumeState(
            position,
            EpochSums(sums.loss + loss, sums.wait_s + chunk.wait_s, sums.seconds + seconds),
            standing.seed,
        )
        self._record(position, loss, chunk, seconds)
        self._report(standing)
        with self._saving():
            self._files.checkpoints.check()
        if self._is_due(position):
            self.save(standing)
        return standing

    def _is_due(self, position: Position) -> bool:
        config = self._runner.config.fit.checkpoint
        step = position.step(self._runner.steps_per_epoch)
        if config.every_steps is not None and step % config.every_steps == 0:
            return True
        waited_s = time.monotonic() - self._saved_at
        return (
            config.every_minutes is not None
            and waited_s >= config.every_minutes * SECONDS_PER_MINUTE
        )

    def _diverge(self, position: Position, loss: float, received: str) -> NoReturn:
        error = build_divergence_error(received, position)
        divergence = DivergedStep(position, position.step(self._runner.steps_per_epoch) + 1, loss)
        if not self._workers.is_chief:
            raise error
        try:
            batch = self._runner.read_batch(position)
            manifest = self._runner.data.manifest
            where = write_diverged_batch(self._files.run, divergence, batch, manifest)
            self._progress.message(f"the batch is in {where}", diverged=str(where))
        except OSError as failure:  # It must not hide what went wrong first.
            self._progress.message(f"the batch could not be written: {failure}")
        raise error

    def _record(self, position: Position, loss: float, chunk: StepsOutcome, seconds: float) -> None:
        steps, batch_size = len(chunk.losses), self._runner.config.input.batch_size
        self._files.steps.write(
            StepRecord(
                step=position.step(self._runner.steps_per_epoch),
                epoch=position.epoch + 1,
                loss=loss / steps,
                examples_per_s=steps * batch_size / seconds,
                input_wait_share=min(1.0, chunk.wait_s / seconds),
            )
        )

    def _report(self, standing: ResumeState) -> None:
        position, sums = standing.position, standing.sums
        epochs, steps = self._runner.config.fit.epochs, self._runner.steps_per_epoch
        left = steps * (epochs - position.epoch) - position.batch
        self._progress.step(
            StepStatus(
                epoch=position.epoch + 1,
                epochs=epochs,
                step=position.batch,
                steps=steps,
                loss=sums.loss / position.batch,
                examples_per_s=position.batch * self._runner.config.input.batch_size / sums.seconds,
                input_wait_share=min(1.0, sums.wait_s / sums.seconds),
                eta_s=left * sums.seconds / position.batch,
                run_step=position.step(steps),
                run_steps=epochs * steps,
                metric=self.metric,
            )
        )

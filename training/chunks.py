"""Runs the steps of an epoch from any batch on, some per compiled call."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from conf.errors import InputDataError
from conf.manifest import Manifest
from conf.place import Place
from conf.training import InputConfig, TrainConfig
from training.embedding.distinct_rows import Lookups, add_distinct_ids
from training.embedding.key_mapping import KeyedFeatures, map_keys
from training.input import (
    Batch,
    InputCounts,
    ReadOptions,
    Source,
    build_train_dataset,
    count_rows,
    count_steps,
)
from training.input_errors import input_errors, is_carried
from training.position import Position
from training.step import RunSteps, StepsResult
from training.strategy import distribute_batches
from training.stray_ids import find_stray_id


@dataclass(frozen=True)
class TrainingData:
    """What a run reads.

    Attributes:
        version_dir: Directory of the dataset version.
        manifest: Its manifest.
        counts_file: Keeps how many rows the input leaves, where they had to be counted; None
            keeps it for this process alone.
    """

    version_dir: Place
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
        source = Source(self.version_dir, self.manifest, "train", config)
        return count_steps(source, self.counts_file)

    def held_out_rows(self, config: InputConfig) -> int:
        """Rows of train that `config.validation` keeps apart; counted as those of an epoch are.

        Raises:
            InputDataError: A shard is damaged.
        """
        source = Source(self.version_dir, self.manifest, "train", config, is_held_out=True)
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
class Chunk:
    """What one compiled call gave.

    Attributes:
        losses: Loss of each step, float32 `[steps]`; the last one alone may not be finite.
        wait_s: Seconds that the steps waited for their batches.
    """

    losses: np.ndarray
    wait_s: float


def plan_chunk(
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


class ChunkRunner:
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

    def run(self, position: Position) -> Generator[Chunk, None, None]:
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
                steps = plan_chunk(
                    position, self.steps_per_epoch, fit.steps_per_loop, fit.checkpoint.every_steps
                )
                result = self._run_chunk(iterator, position, steps)
                position = Position(position.epoch, position.batch + steps)
                if position.batch == self.steps_per_epoch:
                    self._end(iterator, position.epoch, counts)
                yield Chunk(result.losses.numpy(), float(result.wait_s))

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
            stray = find_stray_id(again, self.data.manifest, self._inputs.features)
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
            options=ReadOptions(binary_label=self._binary_label, counts=counts),
        )

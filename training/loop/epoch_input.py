"""Input of an epoch: its batches from any position, in the form that the steps read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from conf.errors import InputDataError
from conf.manifest import Manifest
from conf.training.train import TrainConfig
from training.checkpoint.resume_state import Position
from training.distribution.strategy import distribute_batches
from training.embedding.distinct_rows import Lookups, add_distinct_ids
from training.embedding.key_mapping import KeyedFeatures, map_keys
from training.input.batches import Batch, build_train_dataset, input_errors, is_carried
from training.models.embedded_inputs import vector_errors
from training.reader.shards import DamagePolicy, InputCounts, ShardChecks, compare_begun
from training.reader.training_data import InputOptions, TrainingData


@dataclass(frozen=True)
class StepInputs:
    """The features that a step reads.

    Attributes:
        features: Names of features.
        lookups: Those whose distinct ids are found ahead of the step, or None.
        keyed: Those whose keys are mapped to rows ahead of the step.
        binary_labels: Those whose values must be 0 or 1.
    """

    features: tuple[str, ...]
    lookups: tuple[Lookups, ...] | None = None
    keyed: tuple[KeyedFeatures, ...] = ()
    binary_labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class EpochBatches:
    """The batches of an epoch that is being trained.

    Attributes:
        epoch: Zero-based epoch.
        iterator: Gives the batches, distributed over the replicas.
        counts: Rows and shards that the input has left out so far.
    """

    epoch: int
    iterator: Any
    counts: InputCounts


class EpochInput:
    """Opens the batches of a run's epochs.

    Args:
        config: The run's config.
        data: The dataset version.
        strategy: Devices to train on.
        inputs: The features that a step reads.

    Attributes:
        steps_per_epoch: Whole batches of an epoch.
    """

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
        self._counts: dict[int, InputCounts] = {}
        self._checks = ShardChecks()

    @contextmanager
    def open(self, position: Position) -> Iterator[EpochBatches]:
        """Opens an epoch's batches from a position on.

        Raises:
            InputDataError: A record is damaged.
        """
        counts = InputCounts()
        dataset = self.build_dataset(position, counts)
        if self.inputs.keyed:
            batches = self.steps_per_epoch - position.batch
            is_new = position.batch == 0
            dataset = map_keys(dataset, self.inputs.keyed, batches, is_new_epoch=is_new)
        if self.inputs.lookups is not None:
            dataset = add_distinct_ids(dataset, self.inputs.lookups)
        with input_errors(self.data.version_dir, self.data.manifest, "train"):
            iterator = iter(distribute_batches(dataset, self._strategy))
            yield EpochBatches(position.epoch, iterator, counts)

    def finish(self, batches: EpochBatches) -> None:
        """Reads the tail of an epoch whose steps are done, and keeps its counts."""
        if not self.config.input.is_exact:
            for _ in batches.iterator:
                pass
        self._counts = {batches.epoch: batches.counts}

    def compare_begun(self) -> None:
        """Compares shards that were read in part with their checksums, once a run.

        Raises:
            InputDataError: One is not the file that was written.
        """
        compare_begun(DamagePolicy(self.config.input.on_corrupt, checks=self._checks))

    def keep_counts(self, batches: EpochBatches) -> None:
        """Keeps the counts of an epoch that ends before its batches do."""
        self._counts = {batches.epoch: batches.counts}

    def read_batch(self, position: Position) -> Batch:
        """Reads the batch of one step, over all replicas, once more."""
        batch: Batch = next(iter(self.build_dataset(position, InputCounts()).take(1)))
        return batch

    def count_left_out(self, epoch: int) -> InputCounts:
        """Returns what the input left out of an epoch whose steps are done.

        Where another process has done them, the epoch is read once more.

        Raises:
            InputDataError: A record is damaged.
        """
        if epoch not in self._counts:
            counts = InputCounts()
            dataset = self.build_dataset(Position(epoch, self.steps_per_epoch), counts)
            with input_errors(self.data.version_dir, self.data.manifest, "train"):
                self.finish(EpochBatches(epoch, iter(dataset), counts))
        return self._counts[epoch]

    def describe_tables(self) -> dict[str, dict[str, int]]:
        """Returns what has happened to the keys of each dynamic table in this epoch."""
        return {part.space.label: part.space.describe() for part in self.inputs.keyed}

    def render_tables(self) -> list[str]:
        """Returns `describe_tables` in words, for tables with rules or without room."""
        return [line for part in self.inputs.keyed for line in part.space.render()]

    @contextmanager
    def step_errors(self, position: Position, steps: int) -> Iterator[None]:
        """Turns errors of steps that come from the dataset into errors that name the cause.

        Args:
            position: The batch of the first step.
            steps: How many steps run inside the block.

        Raises:
            InputDataError: The split has fewer rows than were counted, an id is beyond its
                vocabulary, or a vector has not the length that the model reads.
        """
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
            if is_carried(error):
                raise
            again = self.build_dataset(position, InputCounts()).take(steps)
            stray = find_unknown_id(again, self.data.manifest, self.inputs.features)
            if stray is None:
                raise
            raise stray from error

    def build_dataset(self, position: Position, counts: InputCounts) -> tf.data.Dataset:
        """Builds the epoch's batches from a position on, as they are read from the shards.

        Args:
            position: The first batch.
            counts: Receives what the input leaves out.
        """
        return build_train_dataset(
            self.data.version_dir,
            self.data.manifest,
            self.config.input,
            epoch=position.epoch,
            seed=self.config.seed,
            features=self.inputs.features,
            start_batch=position.batch,
            options=InputOptions(
                binary_labels=self.inputs.binary_labels, counts=counts, checks=self._checks
            ),
        )


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

"""Runs the steps of an epoch from any batch on, some per compiled call."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tensorflow as tf

from conf.manifest import Manifest
from conf.training import TrainConfig
from training.input import Batch, build_train_dataset
from training.input_errors import input_errors
from training.position import Position
from training.step import RunSteps
from training.strategy import distribute_batches


@dataclass(frozen=True)
class TrainingData:
    """What a run reads.

    Attributes:
        version_dir: Directory of the dataset version.
        manifest: Its manifest.
    """

    version_dir: Path
    manifest: Manifest

    def steps_per_epoch(self, batch_size: int) -> int:
        """Whole batches in the train split; the rows left over are drawn anew each epoch."""
        return self.manifest.split("train").rows // batch_size


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
        inputs: Features that a step reads.
        run_steps: The compiled steps.
    """

    def __init__(
        self,
        config: TrainConfig,
        data: TrainingData,
        strategy: tf.distribute.Strategy,
        inputs: Sequence[str],
        run_steps: RunSteps,
    ) -> None:
        self.config, self.data = config, data
        self.steps_per_epoch = data.steps_per_epoch(config.input.batch_size)
        self._strategy, self._inputs, self._run_steps = strategy, inputs, run_steps

    def run(self, position: Position) -> Generator[Chunk, None, None]:
        """Runs the steps from a position to the end of its epoch.

        Raises:
            InputDataError: A record is damaged.
        """
        fit = self.config.fit
        dataset = self._open(position)
        with input_errors(self.data.version_dir, self.data.manifest, "train"):
            iterator = iter(distribute_batches(dataset, self._strategy))
            while position.batch < self.steps_per_epoch:
                steps = plan_chunk(
                    position, self.steps_per_epoch, fit.steps_per_loop, fit.checkpoint.every_steps
                )
                result = self._run_steps(iterator, tf.constant(steps))
                yield Chunk(result.losses.numpy(), float(result.wait_s))
                position = Position(position.epoch, position.batch + steps)

    def read_batch(self, position: Position) -> Batch:
        """Reads the batch of one step, over all replicas, once more."""
        batch: Batch = next(iter(self._open(position).take(1)))
        return batch

    def _open(self, position: Position) -> tf.data.Dataset:
        return build_train_dataset(
            self.data.version_dir,
            self.data.manifest,
            self.config.input,
            epoch=position.epoch,
            seed=self.config.seed,
            features=self._inputs,
            start_batch=position.batch,
        )

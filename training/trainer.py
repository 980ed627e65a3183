"""The training loop: epochs, validation, early stopping, checkpoints, history."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import tensorflow as tf

from conf.errors import ConfigError, TrainingDivergedError
from conf.manifest import Manifest
from conf.run import LOGS_DIR
from conf.training import TrainConfig
from training.checkpoint import Checkpoints
from training.history import (
    LOSS_METRIC,
    EpochRecord,
    find_best_epoch,
    read_resumed_history,
    should_stop,
    write_history,
)
from training.input import build_train_dataset, check_train_rows
from training.input_errors import input_errors
from training.models import build_model
from training.models.base import RetrievalModel
from training.objective import build_objective
from training.optimizers import Optimizers
from training.progress import StepStatus, TrainingProgress
from training.step import TrainStep, build_loss_scale, build_run_steps, build_step_options
from training.strategy import check_batch_size, distribute_batches
from training.tensorboard import ScalarLog

Validate = Callable[[RetrievalModel], dict[str, float]]


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
class TrainingResult:
    """How a run ended.

    Attributes:
        best_epoch: One-based epoch whose weights are kept as the best.
        epochs: Epochs that ran, those before a resume included.
        steps: Updates in all.
        stopped_early: Whether early stopping ended the run.
    """

    best_epoch: int
    epochs: int
    steps: int
    stopped_early: bool


class Trainer:
    """Trains one model.

    Args:
        config: The resolved config.
        data: What to train on.
        strategy: Devices to train on.
        progress: Where to tell how it goes.

    Raises:
        ConfigError: The config does not fit the dataset or the devices. Nothing was written.
        InputDataError: The train split is smaller than a batch, or damaged.
    """

    def __init__(
        self,
        config: TrainConfig,
        data: TrainingData,
        strategy: tf.distribute.Strategy,
        progress: TrainingProgress,
    ) -> None:
        self._config, self._data = config, data
        self._strategy, self._progress = strategy, progress
        batch_size = config.input.batch_size
        check_batch_size(batch_size, strategy)
        check_train_rows(data.manifest, batch_size)
        self._metric = selection_metric(config)
        self.steps_per_epoch = data.steps_per_epoch(batch_size)
        options = build_step_options(config, strategy)
        with strategy.scope():
            self.model = build_model(config.model, data.manifest, config.seed)
            self._optimizers = Optimizers(
                config.optimizer,
                self.model,
                self.steps_per_epoch * config.fit.epochs,
                build_loss_scale(config.compute),
            )
        part_size = batch_size // self._optimizers.accumulate_steps
        objective = build_objective(
            config.model, data.version_dir, data.manifest, self.model, part_size
        )
        self._inputs = tuple(
            dict.fromkeys((*self.model.user_inputs, *self.model.item_inputs, *objective.inputs))
        )
        step = TrainStep(self.model, objective, self._optimizers, options)
        self._run_steps = build_run_steps(strategy, step)

    def fit(self, run: Path, validate: Validate | None) -> TrainingResult:
        """Trains until the last epoch or until the metric no longer improves.

        Goes on after the last finished epoch where the run directory has a checkpoint.

        Args:
            run: Directory of the run; it exists.
            validate: Returns the validation metrics of the model, or None where there is no
                validation split.

        Raises:
            TrainingDivergedError: The loss or a weight is no finite number.
            InputDataError: A record is damaged, or the run's history or checkpoints are.
            InternalError: The run directory cannot be written.
        """
        checkpoints, history = self._restore(run)
        metric = self._metric if validate is not None or self._metric == LOSS_METRIC else None
        stopping = self._config.fit.early_stopping if metric is not None else None
        if self._metric is not None and metric is None:
            self._progress.message(
                "the dataset has no validation split: no early stopping, the last epoch is kept"
            )
        log = ScalarLog(run / LOGS_DIR)
        while len(history) < self._config.fit.epochs and not should_stop(history, stopping):
            record = self._run_epoch(len(history), validate)
            history.append(record)
            # The last checkpoint comes last: it is what says that the epoch is done.
            write_history(run, history)
            best = find_best_epoch(history, metric) == record.epoch
            if best:
                checkpoints.save_best(record.epoch)
            checkpoints.save_last(record.epoch)
            log.write(record, int(self._optimizers.step.numpy()))
            self._progress.epoch(record, best and metric is not None)
        log.close()
        return TrainingResult(
            best_epoch=find_best_epoch(history, metric),
            epochs=len(history),
            steps=int(self._optimizers.step.numpy()),
            stopped_early=len(history) < self._config.fit.epochs,
        )

    def _restore(self, run: Path) -> tuple[Checkpoints, list[EpochRecord]]:
        """Opens a run's checkpoints; returns them and the history of the finished epochs.

        The history is as long as the restored weights are old, so the loop may count by it.
        """
        with self._strategy.scope():
            checkpoints = Checkpoints(run, self.model, self._optimizers)
        finished = checkpoints.restore_last(self._progress.message)
        history = read_resumed_history(run, finished, checkpoints.newest_epoch)
        if finished:
            self._progress.message(f"resuming after epoch {finished}", finished_epochs=finished)
        return checkpoints, history

    def _run_epoch(self, epoch: int, validate: Validate | None) -> EpochRecord:
        started = time.monotonic()
        done, loss_sum, wait_s = 0, 0.0, 0.0
        for steps, chunk_loss, chunk_wait in self._chunks(epoch):
            done, loss_sum, wait_s = done + steps, loss_sum + chunk_loss, wait_s + chunk_wait
            self._check_finite(chunk_loss, epoch, done)
            self._report(epoch, done, loss_sum / done, wait_s, time.monotonic() - started)
        seconds = time.monotonic() - started
        self._check_weights(epoch)
        examples = done * self._config.input.batch_size
        return EpochRecord(
            epoch=epoch + 1,
            loss=loss_sum / done,
            seconds=seconds,
            examples=examples,
            examples_per_s=examples / seconds,
            input_wait_share=min(1.0, wait_s / seconds),
            validation={} if validate is None else dict(validate(self.model)),
        )

    def _chunks(self, epoch: int) -> Iterator[tuple[int, float, float]]:
        """Runs an epoch, some steps per compiled call; yields steps, sum of losses, wait."""
        data, config = self._data, self._config
        dataset = build_train_dataset(
            data.version_dir,
            data.manifest,
            config.input,
            epoch=epoch,
            seed=config.seed,
            features=self._inputs,
        )
        with input_errors(data.version_dir, data.manifest, "train"):
            iterator = iter(distribute_batches(dataset, self._strategy))
            left = self.steps_per_epoch
            while left:
                steps = min(left, config.fit.steps_per_loop)
                loss_sum, wait_s = self._run_steps(iterator, tf.constant(steps))
                left -= steps
                yield steps, float(loss_sum), float(wait_s)

    def _check_finite(self, loss: float, epoch: int, step: int) -> None:
        if not math.isfinite(loss):
            raise self._diverged(f"loss {loss}", epoch, f"step {step}")

    def _check_weights(self, epoch: int) -> None:
        for variable in self.model.trainable_variables:
            if not bool(tf.reduce_all(tf.math.is_finite(variable))):
                raise self._diverged(f"{variable.name} is not finite", epoch, "its end")

    def _diverged(self, received: str, epoch: int, where: str) -> TrainingDivergedError:
        return TrainingDivergedError(
            f"training diverged in epoch {epoch + 1}, at {where}",
            received=received,
            allowed="finite numbers",
            fix="lower optimizer.learning_rate, set optimizer.clip_norm, or raise "
            f"model.temperature; checkpoints up to epoch {epoch} are untouched",
        )

    def _report(self, epoch: int, done: int, loss: float, wait_s: float, seconds: float) -> None:
        epochs, steps = self._config.fit.epochs, self.steps_per_epoch
        left = steps * (epochs - epoch) - done
        self._progress.step(
            StepStatus(
                epoch=epoch + 1,
                epochs=epochs,
                step=done,
                steps=steps,
                loss=loss,
                examples_per_s=done * self._config.input.batch_size / seconds,
                input_wait_share=min(1.0, wait_s / seconds),
                eta_s=left * seconds / done,
            )
        )


def selection_metric(config: TrainConfig) -> str | None:
    """Returns the metric that chooses the epoch, or None: the last one is kept.

    Raises:
        ConfigError: The metric's cut-off is not evaluated.
    """
    stopping = config.fit.early_stopping
    if stopping is None:
        return None
    cut_off = stopping.metric.partition("@")[2]
    if cut_off and int(cut_off) not in config.evaluation.ks:
        raise ConfigError(
            "fit.early_stopping.metric has a cut-off that is not evaluated",
            received=stopping.metric,
            allowed=f"cut-offs of evaluation.ks: {config.evaluation.ks}",
            fix=f"add {cut_off} to evaluation.ks, or choose another metric",
        )
    return stopping.metric

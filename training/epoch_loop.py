"""The steps of an epoch, with what happens between them: records, checkpoints, signals, guard."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np

from conf.errors import TrainingDivergedError
from training.checkpoint import Checkpoints
from training.chunks import Chunk, ChunkRunner
from training.divergence import Divergence, build_divergence_error, write_divergence
from training.interruption import StopRequest
from training.position import EpochSums, Position, Standing
from training.progress import StepStatus, TrainingProgress
from training.step_log import StepLog, StepRecord
from training.workers import Unwritten, Workers

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
    checkpoints: Checkpoints
    steps: StepLog | Unwritten


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
        runner: ChunkRunner,
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

    def run(self, standing: Standing) -> Standing:
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

    def save(self, standing: Standing, *, best: bool = False) -> None:
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

    def save_and_stop(self, standing: Standing) -> NoReturn:
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

    def _advance(self, standing: Standing, chunk: Chunk, seconds: float) -> Standing:
        """Accounts for a chunk, and saves where that is due."""
        before, sums = standing.position, standing.sums
        if not math.isfinite(chunk.losses[-1]):
            last, loss = len(chunk.losses) - 1, float(chunk.losses[-1])
            suffix = " (or a gradient)" if self._runner.config.fit.check_gradients else ""
            self._diverge(Position(before.epoch, before.batch + last), loss, f"loss {loss}{suffix}")
        position = Position(before.epoch, before.batch + len(chunk.losses))
        loss = float(np.sum(chunk.losses, dtype=np.float64))
        standing = Standing(
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
        divergence = Divergence(position, position.step(self._runner.steps_per_epoch) + 1, loss)
        if not self._workers.is_chief:
            raise error
        try:
            batch = self._runner.read_batch(position)
            manifest = self._runner.data.manifest
            where = write_divergence(self._files.run, divergence, batch, manifest)
            self._progress.message(f"the batch is in {where}", diverged=str(where))
        except OSError as failure:  # It must not hide what went wrong first.
            self._progress.message(f"the batch could not be written: {failure}")
        raise error

    def _record(self, position: Position, loss: float, chunk: Chunk, seconds: float) -> None:
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

    def _report(self, standing: Standing) -> None:
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

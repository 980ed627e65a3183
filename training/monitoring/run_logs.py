"""Logs of a run: lines by step, TensorBoard's scalars, profiles of steps."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TextIO, TypeVar

import numpy as np
import tensorflow as tf

from conf.artefacts.run import STEPS_FILE, VALIDATIONS_FILE
from conf.storage.atomic_output import write_text_atomic
from conf.training.train import StepRange
from training.distribution.strategy import RunSteps, StepsResult
from training.distribution.workers import disk_errors
from training.monitoring.epoch_records import EpochRecord, StepValidation
from training.monitoring.progress import TrainingProgress


@dataclass(frozen=True)
class StepRecord:
    """Loss and speed of some steps.

    Attributes:
        step: Steps of the run so far.
        epoch: One-based epoch.
        loss: Mean loss of these steps.
        examples_per_s: Rows per second of these steps.
        input_wait_share: Share of the time that they waited for their batches, in [0, 1].
    """

    step: int
    epoch: int
    loss: float
    examples_per_s: float
    input_wait_share: float


Record = TypeVar("Record", StepRecord, StepValidation)


class RecordLog(Generic[Record]):
    """Appends records to a file of a run, one JSON object per line.

    Args:
        file: The file.
        kind: Class of the records.
        finished_steps: Steps that the run goes on after: later lines are of a run that was
            killed, whose steps are done again.

    Raises:
        InternalError: The file cannot be written.
    """

    def __init__(self, file: Path, kind: type[Record], finished_steps: int) -> None:
        self._file = file
        with self._errors():
            _truncate(file, kind, finished_steps)
            self._handle: TextIO = file.open("a", encoding="utf-8")

    def write(self, record: Record) -> None:
        """Appends a line, which a kill of the process does not lose."""
        with self._errors():
            self._handle.write(_render_line(record))
            self._handle.flush()

    def sync(self) -> None:
        """Brings all lines through to the disk."""
        with self._errors():
            os.fsync(self._handle.fileno())

    def close(self) -> None:
        """Ends the file."""
        with self._errors():
            self._handle.close()

    def _errors(self) -> AbstractContextManager[None]:
        return disk_errors(
            f"cannot write {self._file}; the checkpoints are untouched",
            "free some space (or check the permissions), then go on with --resume",
        )


class StepLog(RecordLog[StepRecord]):
    """Appends to a run's `metrics.jsonl`; see `RecordLog`.

    Args:
        run: Directory of the run.
        finished_steps: Steps that the run goes on after.
    """

    def __init__(self, run: Path, finished_steps: int) -> None:
        super().__init__(run / STEPS_FILE, StepRecord, finished_steps)


class StepValidationLog(RecordLog[StepValidation]):
    """Appends to a run's `validations.jsonl`, each line through to the disk; see `RecordLog`.

    Args:
        run: Directory of the run.
        finished_steps: Steps that the run goes on after.
    """

    def __init__(self, run: Path, finished_steps: int) -> None:
        super().__init__(run / VALIDATIONS_FILE, StepValidation, finished_steps)

    def write(self, record: StepValidation) -> None:
        """Appends a line that no later checkpoint is without."""
        super().write(record)
        self.sync()


def read_steps(run: Path) -> list[StepRecord]:
    """Reads `metrics.jsonl`; a last line that was cut off is left out."""
    return _read_records(run / STEPS_FILE, StepRecord)


def read_step_validations(run: Path) -> list[StepValidation]:
    """Reads `validations.jsonl`; a last line that was cut off is left out."""
    return _read_records(run / VALIDATIONS_FILE, StepValidation)


def _read_records(file: Path, kind: type[Record]) -> list[Record]:
    if not file.exists():
        return []
    records = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            records.append(kind(**json.loads(line)))
        except (ValueError, TypeError):
            break  # Lines are in order: what follows a damaged one is of no use.
    return records


def _render_line(record: StepRecord | StepValidation) -> str:
    return json.dumps(asdict(record)) + "\n"


def _truncate(file: Path, kind: type[Record], finished_steps: int) -> None:
    if not file.exists():
        return
    kept = [record for record in _read_records(file, kind) if record.step <= finished_steps]
    write_text_atomic(file, "".join(map(_render_line, kept)))


class EpochLog:
    """Writes one point per epoch and metric.

    Args:
        directory: Directory of the event files.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        with self._errors():
            self._writer = tf.summary.create_file_writer(str(directory))

    def write(self, record: EpochRecord, step: int) -> None:
        """Writes an epoch, through to the disk.

        Args:
            record: The epoch.
            step: Updates so far.

        Raises:
            InternalError: The event file cannot be written.
        """
        with self._errors():
            with self._writer.as_default(step=step):
                tf.summary.scalar("train/loss", record.loss)
                tf.summary.scalar("train/examples_per_s", record.examples_per_s)
                tf.summary.scalar("train/input_wait_share", record.input_wait_share)
                for name, value in record.validation.items():
                    tf.summary.scalar(f"validation/{name}", value)
                for table, counts in record.tables.items():
                    for name, count in counts.items():
                        tf.summary.scalar(f"tables/{table}/{name}", count)
            self._writer.flush()

    def write_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Writes numbers of a step.

        Args:
            step: Steps of the run so far.
            values: By tag.

        Raises:
            InternalError: The event file cannot be written.
        """
        with self._errors(), self._writer.as_default(step=step):
            for tag, value in values.items():
                tf.summary.scalar(tag, value)

    def close(self) -> None:
        """Ends the event file."""
        with self._errors():
            self._writer.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        with disk_errors(
            f"cannot write the TensorBoard log {self._directory}; the checkpoints are untouched",
            "free some space (or check the permissions), then go on with --resume",
        ):
            yield


PROFILE_PLUGIN = "tensorboard-plugin-profile"


class StepProfiler:
    """Runs steps as another function does, and profiles those of a range.

    Compiled calls that reach over an end of the range are cut in two there, so it is exact; steps
    give the same losses and weights either way.

    Args:
        run_steps: Runs steps in one compiled call.
        wanted: Steps to profile.
        progress: Receives a message about the profile.
    """

    def __init__(self, run_steps: RunSteps, wanted: StepRange, progress: TrainingProgress) -> None:
        self._run_steps, self._wanted, self._progress = run_steps, wanted, progress
        self._logs: Path | None = None
        self._step = 0
        self._started_at: int | None = None

    def begin(self, logs: Path, step: int) -> closing[StepProfiler]:
        """Says where the run stands and where to write; leaving the context ends the profile.

        Args:
            logs: Directory of TensorBoard's files.
            step: Steps of the run so far.
        """
        self._logs, self._step = logs, step
        return closing(self)

    def __call__(self, iterator: Any, steps: tf.Tensor) -> StepsResult:
        """Runs the steps, one call for each part on either side of the range."""
        left, results = int(steps), list[StepsResult]()
        while left:
            self._start_or_stop()
            ends = [e - self._step for e in (self._wanted.start, self._wanted.end)]
            part = min([left, *(end for end in ends if end > 0)])
            result = self._run_steps(iterator, tf.constant(part))
            results.append(result)
            losses = result.losses.numpy()
            self._step += len(losses)
            left -= part
            if not np.isfinite(losses[-1]):
                break
        self._start_or_stop()
        if len(results) == 1:
            return results[0]
        return StepsResult(
            tf.concat([result.losses for result in results], axis=0),
            tf.add_n([result.wait_s for result in results]),
        )

    def close(self) -> None:
        """Ends the profile where the run has ended inside of the range."""
        if self._started_at is not None:
            self._stop()
        elif self._logs is not None:
            self._progress.message(
                f"nothing was profiled: this process has run no step of "
                f"{self._wanted.start}:{self._wanted.end}"
            )

    def _start_or_stop(self) -> None:
        if self._started_at is None and self._wanted.start <= self._step < self._wanted.end:
            tf.profiler.experimental.start(str(self._logs))
            self._started_at = self._step
        elif self._started_at is not None and self._step >= self._wanted.end:
            self._stop()

    def _stop(self) -> None:
        tf.profiler.experimental.stop()
        first, logs = self._started_at, self._logs
        self._started_at = self._logs = None
        self._progress.message(
            f"profiled steps {(first or 0) + 1} to {self._step}: tensorboard --logdir {logs} "
            f"(tab Profile, by the plugin {PROFILE_PLUGIN})",
            profile=str(logs),
        )

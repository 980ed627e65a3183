"""Records and logs of a run: its epochs, steps and validations, TensorBoard, a profile.

history.json        one entry per epoch
metrics.jsonl       one line per compiled call of steps
validations.jsonl   one line per validation between the ends of epochs
logs/               TensorBoard's files
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, TextIO, TypeVar

import numpy as np
import tensorflow as tf

from conf.artefacts.run import HISTORY_FILE, STEPS_FILE, VALIDATIONS_FILE
from conf.errors import ConfigError, InputDataError, did_you_mean
from conf.metrics import LOSS_METRIC, OWN_PREFIX, find_family
from conf.storage.atomic_output import write_text_atomic
from conf.training.train import StepRange
from training.distribution.strategy import RunSteps, StepsResult
from training.distribution.workers import disk_errors
from training.monitoring.progress import TrainingProgress


@dataclass(frozen=True)
class EpochRecord:
    """One epoch, from 1: mean loss over its rows, wall time of its training, what validation found.

    `left_out` counts what the input left out (`bad_records`, `shards`, `filtered_rows`). `tables`
    tells of dynamic ones: their `keys` and `bytes` at the end of the epoch; with rules also keys
    `waiting`, `admitted` and `evicted`, and lookups `rejected` and (of a full table) `refused`; of
    two tiers rows found on the device (`device_hits`), those `swapped` in, and `device_bytes`.
    """

    epoch: int
    loss: float
    seconds: float
    examples: int
    examples_per_s: float
    input_wait_share: float
    validation: Mapping[str, float]
    left_out: Mapping[str, int] = field(default_factory=dict)
    tables: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def value(self, name: str) -> float:
        """Returns a metric; the loss is that of held-out rows where they give one."""
        return _find_value(name, {LOSS_METRIC: self.loss, **self.validation})


@dataclass(frozen=True)
class StepValidation:
    """What a validation after so many steps of a run found, in a one-based epoch."""

    step: int
    epoch: int
    validation: Mapping[str, float]

    def value(self, name: str) -> float:
        """Returns a metric as it was measured."""
        return _find_value(name, self.validation)


def _find_value(name: str, found: Mapping[str, float]) -> float:
    """The metric; NaN where one of user code, whose name was checked before, is not defined."""
    if find_family(name).startswith(OWN_PREFIX):
        return found.get(name, math.nan)
    if name not in found:
        names = sorted(found)
        advice = did_you_mean(name, names) + "; cut-offs are set by evaluation.ks"
        if find_family(name) in ("auc", "gauc"):
            advice = "labels of one class have no pairs: set fit.early_stopping.metric=log_loss"
        raise ConfigError(
            "fit.early_stopping.metric is not among the validation metrics",
            received=name,
            allowed=", ".join(names),
            fix=advice,
        )
    return found[name]


@dataclass(frozen=True)
class TrainingResult:
    """How a run ended; what ran before a resume is included.

    The best epoch (from 1), and the step where steps were validated, are those whose weights are
    kept by the metric `selected_by`, or the last ones. `left_out` is of the last epoch.
    """

    best_epoch: int
    epochs: int
    steps: int
    stopped_early: bool
    left_out: Mapping[str, int]
    best_step: int | None = None
    selected_by: str | None = None


def write_history(run: Path, history: Sequence[EpochRecord]) -> None:
    """Writes `history.json` atomically."""
    entries = [asdict(record) for record in history]
    write_text_atomic(run / HISTORY_FILE, json.dumps(entries, indent=1) + "\n")


def read_history(run: Path) -> list[EpochRecord]:
    """Reads `history.json`; a run that has not ended an epoch has an empty one."""
    file = run / HISTORY_FILE
    if not file.exists():
        return []
    try:
        return [EpochRecord(**entry) for entry in json.loads(file.read_text(encoding="utf-8"))]
    except (ValueError, TypeError) as error:
        raise InputDataError(f"{file} is damaged", received=repr(error)) from error


def read_resumed_history(run: Path, finished: int) -> list[EpochRecord]:
    """Reads the entries of so many epochs; later ones are of lost checkpoints, or of none yet."""
    records = read_history(run)[:finished]
    if [record.epoch for record in records] != [*range(1, finished + 1)]:
        raise InputDataError(
            "the history of this run does not fit its checkpoints",
            received=f"{run / HISTORY_FILE} with {len(records)} epochs",
            allowed=f"epochs 1 to {finished}",
            fix="restore the missing files, or train again without --resume",
        )
    return records


@dataclass(frozen=True)
class StepRecord:
    """Mean loss and speed of the last steps of a run; `step` counts all steps so far."""

    step: int
    epoch: int
    loss: float
    examples_per_s: float
    input_wait_share: float


Record = TypeVar("Record", StepRecord, StepValidation)


def _writing(place: Path) -> AbstractContextManager[None]:
    return disk_errors(
        f"cannot write {place}; the checkpoints are untouched",
        "free some space (or check the permissions), then go on with --resume",
    )


class RecordLog(Generic[Record]):
    """Appends records to a file of a run, one JSON object per line.

    Lines after the steps that the run goes on from are of a run that was killed, whose steps are
    done again: they are cut off.
    """

    def __init__(self, file: Path, kind: type[Record], finished_steps: int) -> None:
        self._file = file
        with _writing(file):
            if file.exists():
                kept = [one for one in _read_records(file, kind) if one.step <= finished_steps]
                write_text_atomic(file, "".join(map(_render_line, kept)))
            self._handle: TextIO = file.open("a", encoding="utf-8")

    def write(self, record: Record) -> None:
        """Appends a line, which a kill of the process does not lose."""
        with _writing(self._file):
            self._handle.write(_render_line(record))
            self._handle.flush()

    def sync(self) -> None:
        with _writing(self._file):
            os.fsync(self._handle.fileno())

    def close(self) -> None:
        with _writing(self._file):
            self._handle.close()


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


class EpochLog:
    """Writes TensorBoard's scalars into a directory: one point per epoch and metric."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        with _writing(directory):
            self._writer = tf.summary.create_file_writer(str(directory))

    def write(self, record: EpochRecord, step: int) -> None:
        """Writes an epoch, which ends after so many steps of the run, through to the disk."""
        scalars = {
            "train/loss": record.loss,
            "train/examples_per_s": record.examples_per_s,
            "train/input_wait_share": record.input_wait_share,
        }
        scalars |= {f"validation/{name}": value for name, value in record.validation.items()}
        for table, counts in record.tables.items():
            scalars |= {f"tables/{table}/{name}": count for name, count in counts.items()}
        self.write_scalars(step, scalars)
        with _writing(self._directory):
            self._writer.flush()

    def write_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Writes numbers of a step of the run, by tag."""
        with _writing(self._directory), self._writer.as_default(step=step):
            for tag, value in values.items():
                tf.summary.scalar(tag, value)

    def close(self) -> None:
        with _writing(self._directory):
            self._writer.close()


class StepProfiler:
    """Runs steps as another function does, and profiles exactly those of a range.

    Compiled calls that reach over an end of it are cut there, with the same losses and weights.
    """

    def __init__(self, run_steps: RunSteps, wanted: StepRange, progress: TrainingProgress) -> None:
        self._run_steps, self._wanted, self._progress = run_steps, wanted, progress
        self._logs: Path | None = None
        self._step = 0
        self._started_at: int | None = None

    def begin(self, logs: Path, step: int) -> closing[StepProfiler]:
        """Says where to write, and after which step the run is; leaving the context ends it."""
        self._logs, self._step = logs, step
        return closing(self)

    def __call__(self, iterator: Any, steps: tf.Tensor) -> StepsResult:
        end, results = self._step + int(steps), list[StepsResult]()
        ends = {e for e in (self._wanted.start, self._wanted.end) if self._step < e < end}
        for part_end in sorted({*ends, end}):
            self._start_or_stop()
            results.append(self._run_steps(iterator, tf.constant(part_end - self._step)))
            losses = results[-1].losses.numpy()
            self._step += len(losses)
            if not np.isfinite(losses).all():
                break
        self._start_or_stop()
        return StepsResult(
            tf.concat([result.losses for result in results], axis=0),
            tf.add_n([result.wait_s for result in results]),
        )

    def close(self) -> None:
        """Ends the profile where the run has ended inside of the range."""
        if self._started_at is not None:
            self._stop()
        elif self._logs is not None:
            wanted = f"{self._wanted.start}:{self._wanted.end}"
            self._progress.message(f"nothing was profiled: no step of {wanted} was run here")

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
            "(tab Profile, by the plugin tensorboard-plugin-profile)",
            profile=str(logs),
        )

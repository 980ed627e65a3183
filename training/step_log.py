"""`metrics.jsonl`: one line per compiled loop of steps, for plots and for comparing runs."""

from __future__ import annotations

import json
import os
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from conf.dataset import write_text_atomic
from conf.run import STEPS_FILE
from training.disk_errors import disk_errors


@dataclass(frozen=True)
class StepRecord:
    """What some steps gave.

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


class StepLog:
    """Appends to a run's `metrics.jsonl`.

    Args:
        run: Directory of the run.
        finished_steps: Steps that the run goes on after: later lines are of a run that was
            killed, whose steps are done again.

    Raises:
        InternalError: The file cannot be written.
    """

    def __init__(self, run: Path, finished_steps: int) -> None:
        self._file = run / STEPS_FILE
        with self._errors():
            _truncate(self._file, finished_steps)
            self._handle: TextIO = self._file.open("a", encoding="utf-8")

    def write(self, record: StepRecord) -> None:
        """Appends a line, which a kill of the process does not lose."""
        with self._errors():
            self._handle.write(json.dumps(asdict(record)) + "\n")
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


def read_steps(run: Path) -> list[StepRecord]:
    """Reads `metrics.jsonl`; a last line that was cut off is left out."""
    file = run / STEPS_FILE
    if not file.exists():
        return []
    records = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            records.append(StepRecord(**json.loads(line)))
        except (ValueError, TypeError):
            break  # Lines are in order: what follows a damaged one is of no use.
    return records


def _truncate(file: Path, finished_steps: int) -> None:
    if not file.exists():
        return
    kept = [record for record in read_steps(file.parent) if record.step <= finished_steps]
    write_text_atomic(file, "".join(json.dumps(asdict(record)) + "\n" for record in kept))

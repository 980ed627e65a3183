"""Calibrations of a run's kept checkpoints: `calibration.json` of its directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.artefacts.run import CALIBRATION_FILE, read_json, write_json
from conf.errors import InputDataError, UpstreamNotReadyError
from conf.schema import fingerprint
from conf.training.models import ModelConfig, RankingConfig
from training.checkpoint.resume_state import Position
from training.models.calibration import Calibration

FORMAT_VERSION = 1


@dataclass(frozen=True)
class CheckpointCalibration:
    """What was fitted to the weights of a checkpoint.

    Attributes:
        position: Where training was.
        rows: Rows that it was fitted to.
        tasks: By task; none of one that is better left as it is.
    """

    position: Position
    rows: int
    tasks: Mapping[str, Calibration]


def requires_fit(config: ModelConfig) -> bool:
    """Whether training ends with a fit of calibrations."""
    return isinstance(config, RankingConfig) and config.calibration is not None


def write_calibrations(run: Path, fitted: Sequence[CheckpointCalibration]) -> None:
    """Writes what was fitted to a run's kept checkpoints."""
    content: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "checkpoints": [
            {
                "epoch": found.position.epoch,
                "batch": found.position.batch,
                "rows": found.rows,
                "tasks": {name: task.to_json() for name, task in found.tasks.items()},
            }
            for found in fitted
        ],
    }
    write_json(run / CALIBRATION_FILE, {**content, "fingerprint": fingerprint(content)})


def read_calibrations(run: Path, position: Position) -> dict[str, Calibration]:
    """Returns the calibration of each task that was fitted to a checkpoint.

    Args:
        run: Directory of the run.
        position: Where training was when the checkpoint was saved.

    Raises:
        UpstreamNotReadyError: Training has not come to its end, which is when it is fitted.
        InputDataError: The file is damaged, or is of other checkpoints.
    """
    file = run / CALIBRATION_FILE
    if not file.is_file():
        raise UpstreamNotReadyError(
            "this run has no calibration yet: it is fitted when training has ended",
            received=file,
            fix="let the training finish, by --resume if it was interrupted",
        )
    content = read_json(file)
    expected = content.pop("fingerprint", None)
    if fingerprint(content) != expected:
        raise _refuse(file, "it is not what was written")
    try:
        for found in content["checkpoints"]:
            if (found["epoch"], found["batch"]) == (position.epoch, position.batch):
                tasks = dict(found["tasks"])
                return {name: Calibration.from_json(task) for name, task in tasks.items()}
    except (KeyError, TypeError, ValueError) as error:
        raise _refuse(file, repr(error)) from error
    raise _refuse(file, f"nothing of epoch {position.epoch}, batch {position.batch}")


def _refuse(file: Path, received: str) -> InputDataError:
    return InputDataError(
        f"{file} does not fit the checkpoint, or is damaged",
        received=received,
        fix="restore the file, or train again",
    )

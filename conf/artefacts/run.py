"""Paths of training runs, and the run card that explains each.

<root>/<name>/runs/<id>/run_card.json     config, versions, status, timings, metrics
                        history.json      one entry per epoch
                        metrics.jsonl     one line per compiled loop of steps
                        validations.jsonl one line per validation between the ends of epochs
                        checkpoints/      the state of training, best and last
                        input_counts.json rows that the input leaves, where they had to be counted
                        warm_start.json   what came over from an earlier run
                        calibration.json  from log-odds of the kept checkpoints to those of labels
                        mlflow.json       what an MLflow server has of the run
                        logs/             TensorBoard
                        metrics.json      evaluation against the baselines
                        export/           versions of the SavedModel, embeddings
                        delta/            what has changed of them since an earlier run
                        recommendations.json.gz
                        scores.parquet    of rows, by a ranking model
                        report.html
<root>/<name>/CURRENT                     id of the last run that finished training
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.artefacts.entries import EntryKind, check_entry_name, resolve_entry
from conf.errors import InputDataError, UpstreamNotReadyError
from conf.json_text import parse_json
from conf.local_paths import local_path
from conf.paths import CURRENT_FILE, ReadablePath
from conf.storage.atomic_output import write_text_atomic
from conf.storage.processes import hold_file_lock

RUN_CARD_FILE = "run_card.json"
RUN_CARD_LOCK = ".run_card.lock"
STATUS_TRAINING = "training"
STATUS_TRAINED = "trained"
STATUS_FAILED = "failed"
STATUS_INTERRUPTED = "interrupted"
HISTORY_FILE = "history.json"
METRICS_FILE = "metrics.json"
REPORT_FILE = "report.html"
RECOMMENDATIONS_FILE = "recommendations.json.gz"
SCORES_FILE = "scores.parquet"
CHECKPOINTS_DIR = "checkpoints"
LAST_DIR, BEST_DIR = "last", "best"
"""Its folders: checkpoints to go on from, and those of the best epoch."""
CHECKPOINT_FILE = "checkpoint.json"
"""Of one checkpoint: it is written last, with the sizes and sums of the others."""
STEPS_FILE = "metrics.jsonl"
VALIDATIONS_FILE = "validations.jsonl"
INPUT_COUNTS_FILE = "input_counts.json"
WARM_START_FILE = "warm_start.json"
CALIBRATION_FILE = "calibration.json"
MLFLOW_FILE = "mlflow.json"
LOGS_DIR = "logs"
EXPORT_DIR = "export"
DELTA_DIR = "delta"
RUNS_DIR = "runs"
RUN = EntryKind("finished training run", RUNS_DIR, RUN_CARD_FILE, "train one by `sluice train`")


@dataclass(frozen=True)
class RunPaths:
    """The paths of one named series of runs."""

    root: Path
    name: str

    def __post_init__(self) -> None:
        """Refuses a name that could leave the root.

        Raises:
            ConfigError: The name is not a plain file name.
        """
        check_entry_name("run", self.name)

    @property
    def base(self) -> Path:
        """Directory of the series."""
        return self.root / self.name

    @property
    def runs(self) -> Path:
        """Directory of all runs."""
        return self.base / RUNS_DIR

    @property
    def current(self) -> Path:
        """File that names the last finished run."""
        return self.base / CURRENT_FILE

    def run(self, run_id: str) -> Path:
        """Directory of one run."""
        return self.runs / run_id


def resolve_run(path: str) -> Path:
    """Returns the directory of the run that a path names.

    Args:
        path: A series (`<root>/<name>`: its last finished run) or one run's directory.

    Raises:
        UpstreamNotReadyError: No run has finished there.
        InputDataError: `CURRENT` names a run that does not exist.
    """
    return resolve_entry(local_path(path), RUN)


def read_json(path: ReadablePath) -> dict[str, Any]:
    """Reads one of a run's JSON files, wherever it lies.

    Raises:
        UpstreamNotReadyError: It does not exist.
        InputDataError: It is not a JSON object.
    """
    try:
        data = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UpstreamNotReadyError("a file of this run is missing", received=path) from error
    except ValueError as error:  # not JSON, or not even text
        raise InputDataError(f"{path} is not valid JSON", received=str(error)) from error
    if not isinstance(data, dict):
        raise InputDataError(f"{path} must hold an object", received=type(data).__name__)
    return data


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Writes a JSON file atomically, keys in their order: a config's first task stays first."""
    write_text_atomic(path, json.dumps(data, indent=1, allow_nan=False) + "\n")


def update_run_card(run: Path, **parts: Any) -> None:
    """Sets top-level parts of a run's card; dictionaries are merged one level deep."""
    file = run / RUN_CARD_FILE
    with hold_file_lock(run / RUN_CARD_LOCK):  # several jobs may add their part at the same time
        card = read_json(file) if file.exists() else {}
        for key, value in parts.items():
            old = card.get(key)
            if isinstance(old, dict) and isinstance(value, dict):
                value = {**old, **value}
            card[key] = value
        write_json(file, card)

"""Where a sweep lies.

<root>/<name>/sweeps/<UTC time>-<hash>/sweep.json       the space and the config that it starts from
                                       study.sqlite3    the trials, for Optuna and its dashboard
                                       trials.json      the trials, for people and scripts
                                       best.yaml        config of the best trial
                                       trials/<number>/runs/<id>/   a run as any other
"""

from __future__ import annotations

from pathlib import Path

from conf.run import read_json, write_json
from conf.schema import fingerprint
from conf.training import TrainConfig
from conf.training.sweep import SweepConfig
from training.run_directory import make_entry, run_paths

SWEEPS_DIR = "sweeps"
SWEEP_FILE = "sweep.json"
TRIALS_FILE = "trials.json"
BEST_FILE = "best.yaml"
TRIALS_DIR = "trials"


def open_sweep(config: TrainConfig, sweep: SweepConfig, resume: bool) -> Path:
    """Returns the directory of a sweep: a new one, or on resuming the newest of the same space.

    The number of trials is not part of what makes two sweeps the same: with more of them a
    finished sweep goes on.

    Raises:
        InternalError: The directory cannot be made.
        InputDataError: A `sweep.json` is damaged.
    """
    parent = run_paths(config).base / SWEEPS_DIR
    space = sweep.model_dump(mode="json", exclude={"trials"})
    content = {"config": config.resolved(), "sweep": space}
    sha256 = fingerprint(content)
    if resume and parent.is_dir():
        for found in sorted(parent.iterdir(), key=lambda path: path.name, reverse=True):
            file = found / SWEEP_FILE
            if file.is_file() and read_json(file).get("sha256") == sha256:
                return found
    directory = make_entry(parent, sha256)
    write_json(directory / SWEEP_FILE, {**content, "sha256": sha256})
    return directory

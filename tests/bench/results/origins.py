"""Origins of runs: the commit and the machine that train one, noted before it begins.

A run that has ended keeps its origin whatever checkout reads it. Where the origin is not known, or
another commit would train the rest, the run is refused: a record names one commit for each seed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from conf.artefacts.run import RUN_CARD_FILE, read_json
from conf.storage.atomic_output import write_text_atomic
from conf.training.train import TrainConfig
from tests.bench.results.records import RefusedError, digest_splits
from training.checkpoint.restore import manifest_sha256
from training.reader.training_data import TrainingData, read_current_data, read_current_mixed
from training.run_directory import config_sha256, find_finished_run, find_unfinished_run, run_paths

ORIGIN_SUFFIX = ".origin.json"


def note_origin(config: TrainConfig, here: dict[str, Any]) -> Path:
    """Notes what trains the run of a config, unless it has ended or goes on.

    Args:
        config: The resolved config of the run.
        here: Commit and processor of this checkout.

    Returns:
        The file of the run's origin.

    Raises:
        RefusedError: There is a run, and it would get a commit that has not trained all of it.
    """
    data = read_current_data(config)
    file = _name_file(config, data)
    ended = find_finished_run(config, data.manifest, read_current_mixed(config))
    if ended is not None:
        _read_origin(file, ended)
    elif (begun := find_unfinished_run(config)) is not None:
        _write(file, _go_on(file, begun, data, here))
    else:
        file.parent.mkdir(parents=True, exist_ok=True)
        _write(file, here)
    return file


def keep_origin(file: Path, run: Path) -> dict[str, Any]:
    """Returns the origin of a run that has ended, and names the run in it: later ones have others.

    Raises:
        RefusedError: It is that of another run.
    """
    origin = {**_read_origin(file, run), "run": run.name}
    _write(file, origin)
    return origin


def _name_file(config: TrainConfig, data: TrainingData) -> Path:
    """By config and rows: a run that is trained anew because either changed has its own origin."""
    digests = config_sha256(config)[:8], digest_splits(data.manifest)[:8]
    return run_paths(config).root / ("-".join((config.name, *digests)) + ORIGIN_SUFFIX)


def _read_origin(file: Path, run: Path) -> dict[str, Any]:
    origin: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    if not origin or origin.get("run", run.name) != run.name:
        raise _refuse(run, f"{file.name} does not say which commit and machine trained it")
    return origin


def _go_on(file: Path, run: Path, data: TrainingData, here: dict[str, Any]) -> dict[str, Any]:
    """The origin of a run that this checkout trains the rest of."""
    card = read_json(run / RUN_CARD_FILE)
    if (card.get("dataset") or {}).get("manifest_sha256") != manifest_sha256(data.manifest):
        raise _refuse(run, "it has not ended, and began on another version of its dataset")
    origin = _read_origin(file, run)
    if (began := origin["commit"]) != here["commit"]:
        raise _refuse(run, f"it has not ended, and began at commit {began}", f"check out {began}")
    machines = origin["processor"].split(" and ")
    if here["processor"] not in machines:
        machines.append(here["processor"])
    return {**origin, "processor": " and ".join(machines)}


def _refuse(run: Path, why: str, *ways: str) -> RefusedError:
    how = ", ".join((*ways, "give another --work to train it anew, or remove the run"))
    return RefusedError(f"{run}: {why}; {how}")


def _write(file: Path, origin: dict[str, Any]) -> None:
    write_text_atomic(file, json.dumps(origin) + "\n")

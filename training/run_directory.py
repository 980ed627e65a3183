"""Run directories: creating, locking and finding them; the run card, written and read."""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pyarrow as pa
import tensorflow as tf

from conf.artefacts.run import (
    INPUT_COUNTS_FILE,
    RUN_CARD_FILE,
    STATUS_FAILED,
    STATUS_INTERRUPTED,
    STATUS_TRAINED,
    STATUS_TRAINING,
    RunPaths,
    read_json,
    update_run_card,
)
from conf.errors import (
    ConfigError,
    InternalError,
    SluiceError,
    TrainingInterruptedError,
    UpstreamNotReadyError,
    read_code_version,
)
from conf.manifest import MANIFEST_FILE, Manifest
from conf.publication.entries import set_pointer
from conf.publication.working_copy import find_working_path
from conf.schema import fingerprint
from conf.storage.locations import find_path
from conf.storage.processes import hold_file_lock
from conf.training.train import TrainConfig
from training.checkpoint.restore import RunReference, manifest_sha256, read_run_manifest
from training.distribution.workers import Workers, peak_device_memory_bytes, peak_memory_bytes
from training.models.model import Model
from training.monitoring.progress import TrainingProgress
from training.monitoring.run_logs import TrainingResult
from training.reader.training_data import (
    TrainingData,
    pin_mixed,
    read_current_data,
    read_current_mixed,
)

LOCK_FILE = ".lock"
ONCE_LOCK_FILE = ".once.lock"
# What says where a process writes, and not what it computes.
_OF_PROCESS = {"root", "mlflow"}

_log = logging.getLogger("sluice.training.run_directory")


def run_paths(config: TrainConfig) -> RunPaths:
    return RunPaths(find_working_path(config.root), config.name)


def config_sha256(config: TrainConfig) -> str:
    """Returns the fingerprint of the resolved config, wherever the run is logged."""
    return fingerprint({key: value for key, value in config.resolved().items() if key != "mlflow"})


def create_run(config: TrainConfig, now: datetime | None = None) -> Path:
    """Makes the directory `<UTC time>-<config hash>` of a new run; older runs are untouched."""
    return make_entry(run_paths(config).runs, config_sha256(config), now)


def make_entry(parent: Path, sha256: str, now: datetime | None = None) -> Path:
    """Makes a new directory `<UTC time>-<first digits of a hash>`."""
    stamp = (now or datetime.now(UTC)).strftime("%Y%m%dT%H%M%SZ")
    entry = parent / f"{stamp}-{sha256[:8]}"
    with _root_errors():
        parent.mkdir(parents=True, exist_ok=True)
        attempt = 1
        while True:
            try:
                entry.mkdir()
                return entry
            except FileExistsError:  # Another one of the same config began within this second.
                attempt += 1
                entry = parent / f"{stamp}-{sha256[:8]}-{attempt}"


@contextmanager
def _root_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InternalError(
            "cannot make a run directory",
            received=f"{error.filename}: {error.strerror}",
            fix="set `root` to a directory that you may write to",
        ) from error


def publish_run(config: TrainConfig, run: Path) -> None:
    set_pointer(run_paths(config).base, run.name)


def find_unfinished_run(config: TrainConfig) -> Path | None:
    """Returns the newest run of the same resolved config if it has not finished, else None."""
    newest = _find_newest_run(config)
    return None if newest is None or newest[1].get("status") == STATUS_TRAINED else newest[0]


def find_finished_run(
    config: TrainConfig, manifest: Manifest, mixed: Sequence[TrainingData] = ()
) -> Path | None:
    """Returns the newest run of the same resolved config if it has finished on given versions."""
    newest = _find_newest_run(config)
    return newest[0] if newest and is_trained_on(newest[1], manifest, mixed) else None


def is_trained_on(
    card: Mapping[str, Any], manifest: Manifest, mixed: Sequence[TrainingData]
) -> bool:
    """Whether a card is that of a run that has finished on a version and those of `input.mix`."""
    trained_on = (card.get("dataset") or {}).get("manifest_sha256")
    mixed_in = [part.get("manifest_sha256") for part in card.get("mixed") or ()]
    wanted = [manifest_sha256(data.manifest) for data in mixed]
    is_same = trained_on == manifest_sha256(manifest) and mixed_in == wanted
    return is_same and card.get("status") == STATUS_TRAINED


def _find_newest_run(config: TrainConfig) -> tuple[Path, dict[str, Any]] | None:
    """Returns the newest run of a config and its card; passes over cards that cannot be read."""
    runs, wanted = run_paths(config).runs, config_sha256(config)
    for card_file in sorted(runs.glob(f"*/{RUN_CARD_FILE}"), reverse=True):
        try:
            card = read_json(card_file)
        except (SluiceError, OSError, ValueError) as error:
            _log.warning("passing over run %s, its card cannot be read: %s", card_file, error)
            continue
        if card.get("config_sha256") == wanted:
            return card_file.parent, card
    return None


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """Holds a run for this process; the lock ends with the process, however it ends."""
    refusal = UpstreamNotReadyError(
        "another process is training in this run's directory",
        received=str(run),
        fix="wait for it, or start a new run without --resume",
    )
    with hold_file_lock(run / LOCK_FILE, refusal):
        yield


@contextmanager
def recorded_status(run: Path) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        what = error.what if isinstance(error, SluiceError) else repr(error)
        interrupted = isinstance(error, TrainingInterruptedError)
        status = STATUS_INTERRUPTED if interrupted else STATUS_FAILED
        with suppress(OSError):  # A full disk must not hide what went wrong first.
            update_run_card(run, status=status, error=what)
        raise


@contextmanager
def counted_seconds(run: Path) -> Iterator[None]:
    """Adds the time of the block, of the wall and of this process's CPUs, to the card's."""
    clocks = {"train_seconds": time.monotonic, "train_cpu_seconds": time.process_time}
    started = {name: clock() for name, clock in clocks.items()}
    try:
        yield
    finally:
        with suppress(OSError):  # A full disk must not hide what went wrong first.
            before = read_json(run / RUN_CARD_FILE)["timing"]
            spent = {name: clock() - started[name] for name, clock in clocks.items()}
            total = {name: before.get(name, 0.0) + seconds for name, seconds in spent.items()}
            update_run_card(run, timing=total)


def describe_start(
    run: Path, start: RunStart, model: Model, devices: dict[str, Any]
) -> dict[str, Any]:
    config, data = start.config, start.data
    return {
        "status": STATUS_TRAINING,
        "error": None,
        "name": config.name,
        "run_id": run.name,
        "config": config.resolved(),
        "config_sha256": config_sha256(config),
        "dataset": _describe_dataset(data),
        "mixed": [_describe_dataset(part) for part in start.mixed],
        "versions": {
            "python": platform.python_version(),
            "sluice": read_code_version(),
            **{module.__name__: module.__version__ for module in (tf, keras, np, pa)},
        },
        "devices": devices,
        "model": {
            "name": config.model.name,
            "parameters": model.parameter_count,
            "tables": _describe_tables(model),
            "weights": _describe_weights(model),
            "kind": config.model.kind,
            "inputs": model.describe_inputs(),
            "specs": [data.manifest.schema[name].to_json() for name in model.inputs],
        },
        "timing": {"training_started_at": _now()},
    }


def describe_end(result: TrainingResult, model: Model) -> dict[str, Any]:
    return {
        "status": STATUS_TRAINED,
        # Dynamic tables have grown.
        "model": {"parameters": model.parameter_count, "tables": _describe_tables(model)},
        "timing": {"training_finished_at": _now()},
        "training": {
            **asdict(result),
            "peak_memory_bytes": peak_memory_bytes(),
            "peak_device_memory_bytes": peak_device_memory_bytes(),
        },
    }


def _describe_dataset(data: TrainingData) -> dict[str, Any]:
    return {
        "path": str(data.version_dir.resolve()),
        "name": data.manifest.dataset_name,
        "version": data.manifest.dataset_version,
        "manifest_sha256": manifest_sha256(data.manifest),
        "rows": {split.name: split.rows for split in data.manifest.splits},
    }


def _describe_tables(model: Model) -> dict[str, list[int]]:
    return {name: [table.vocabulary_size, table.dim] for name, table in model.tables.items()}


def _describe_weights(model: Model) -> dict[str, list[int]]:
    tables = {id(variable) for variable in model.table_variables}
    found = model.named_variables.items()
    return {name: v.shape.as_list() for name, v in found if id(v) not in tables}


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@contextmanager
def only_one(config: TrainConfig) -> Iterator[None]:
    """Lets one process at a time train a config once."""
    base = run_paths(config).base
    with _root_errors():
        base.mkdir(parents=True, exist_ok=True)
    refusal = UpstreamNotReadyError(
        "another process is training this series of runs with --once",
        received=base,
        fix="wait for it to end, then run again",
    )
    with hold_file_lock(base / ONCE_LOCK_FILE, refusal):
        yield


@dataclass(frozen=True)
class RunStart:
    """Where a run starts; `mixed` are the versions of the datasets of `input.mix`."""

    config: TrainConfig
    data: TrainingData
    unfinished: Path | None = None
    finished: Path | None = None
    mixed: tuple[TrainingData, ...] = ()

    def pin(self) -> TrainConfig:
        """Returns the config with the versions of `input.mix` in the place of the datasets."""
        return pin_mixed(self.config, [str(data.version_dir.absolute()) for data in self.mixed])


def choose_start(
    config: TrainConfig,
    progress: TrainingProgress,
    workers: Workers,
    *,
    resume: bool = False,
    once: bool = False,
) -> RunStart:
    """Chooses dataset version and run, as `fit_run` says; every process takes the chief's."""
    if workers.count == 1:
        return _find_start(config, progress, resume, once)
    require_same_config(config, workers)

    def find() -> dict[str, Any]:
        start = _find_start(config, progress, resume, once)
        runs = {"unfinished": start.unfinished, "finished": start.finished}
        return {
            "versions": [
                [str(data.version_dir.absolute()), manifest_sha256(data.manifest)]
                for data in (start.data, *start.mixed)
            ],
            **{name: None if run is None else str(run) for name, run in runs.items()},
        }

    found = workers.share(find)
    data, *mixed = (_read_version(config, place, sha) for place, sha in found["versions"])
    unfinished, finished = (found[n] and Path(found[n]) for n in ("unfinished", "finished"))
    # The others may not see the run; what they count is the same.
    counts_file = unfinished / INPUT_COUNTS_FILE if unfinished and workers.is_chief else None
    data = replace(data, counts_file=counts_file)
    return RunStart(config, data, unfinished, finished, tuple(mixed))


def _read_version(config: TrainConfig, place: str, sha256: str) -> TrainingData:
    version_dir = find_path(place)
    tolerates = config.input.tolerates
    return TrainingData(version_dir, read_run_manifest(version_dir, sha256, tolerates=tolerates))


def require_same_config(config: TrainConfig, workers: Workers) -> None:
    """Refuses processes that would not take the same steps; each may have a root of its own."""
    own = {key: value for key, value in config.resolved().items() if key not in _OF_PROCESS}
    chief = workers.share(lambda: own)
    differing = [key for key in sorted({*own, *chief}) if own.get(key) != chief.get(key)]
    if workers.any(bool(differing)):
        shown = ", ".join(f"{key}: {own.get(key)}, not {chief.get(key)}" for key in differing)
        raise ConfigError(
            "the workers of a run have different configs",
            received=f"worker {workers.index}: {shown or 'as the chief, and another one differs'}",
            allowed="one config; root and mlflow may differ",
            fix="start the same command in each process, with TF_CONFIG alone different",
        )


def _find_start(
    config: TrainConfig, progress: TrainingProgress, resume: bool, once: bool
) -> RunStart:
    new: RunStart | None = None
    if once:
        new = _start_anew(config)
        if (finished := find_finished_run(config, new.data.manifest, new.mixed)) is not None:
            progress.message(f"trained already, nothing to do: run {finished}", run=str(finished))
            return replace(new, finished=finished)
    run = find_unfinished_run(config) if resume or once else None
    if run is None:
        if resume and not once:
            progress.message("no unfinished run of this config: starting a new one")
        return new or _start_anew(config)
    # On with the versions that the run began with, even if newer ones are current by now.
    reference = RunReference.read(run)
    for version_dir in (reference.version_dir, *(place for place, _ in reference.mixed)):
        if not (version_dir / MANIFEST_FILE).is_file():
            progress.message(
                f"the dataset version of the unfinished run {run.name} is gone "
                f"({version_dir}): starting a new run"
            )
            return new or _start_anew(config)
    mixed = [_read_version(config, str(place), sha256) for place, sha256 in reference.mixed]
    manifest = reference.read_manifest()
    data = TrainingData(reference.version_dir, manifest, run / INPUT_COUNTS_FILE)
    return RunStart(config, data, run, mixed=tuple(mixed))


def _start_anew(config: TrainConfig) -> RunStart:
    return RunStart(config, read_current_data(config), mixed=read_current_mixed(config))

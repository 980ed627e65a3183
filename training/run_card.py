"""What the card of a training run says of it."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from conf.manifest import Manifest
from conf.place import Place
from conf.run import RUN_CARD_FILE, read_json, update_run_card
from conf.training import TrainConfig
from training.checkpoint import manifest_sha256
from training.chunks import TrainingData
from training.device_memory import peak_device_memory_bytes
from training.models.base import RetrievalModel
from training.result import TrainingResult
from training.run_directory import (
    STATUS_TRAINED,
    STATUS_TRAINING,
    config_sha256,
    describe_versions,
)
from training.strategy import Devices
from training.workers import Workers

KIBIBYTE = 1024


def describe_start(
    config: TrainConfig,
    run: Path,
    data: TrainingData,
    model: RetrievalModel,
    devices: Devices,
) -> dict[str, Any]:
    """Returns what the card of a run says from its start on."""
    return {
        "status": STATUS_TRAINING,
        "error": None,
        "name": config.name,
        "run_id": run.name,
        "config": config.resolved(),
        "config_sha256": config_sha256(config),
        "dataset": _describe_dataset(data.version_dir, data.manifest),
        "versions": describe_versions(),
        "devices": devices.to_json(),
        "model": {
            "name": config.model.name,
            "parameters": model.parameter_count,
            "tables": describe_tables(model),
            "user_inputs": list(model.user_inputs),
            "item_inputs": list(model.item_inputs),
            "specs": [
                data.manifest.schema[name].to_json()
                for name in dict.fromkeys((*model.user_inputs, *model.item_inputs))
            ],
        },
        "timing": {"training_started_at": _now()},
    }


def _describe_dataset(version_dir: Place, manifest: Manifest) -> dict[str, Any]:
    return {
        "path": str(version_dir.resolve()),
        "name": manifest.dataset_name,
        "version": manifest.dataset_version,
        "manifest_sha256": manifest_sha256(manifest),
        "rows": {split.name: split.rows for split in manifest.splits},
    }


def describe_tables(model: RetrievalModel) -> dict[str, list[int]]:
    """Returns rows and row length of each table."""
    return {name: [table.vocabulary_size, table.dim] for name, table in model.tables.items()}


@contextmanager
def counted_seconds(run: Path, workers: Workers) -> Iterator[None]:
    """Adds the time of the block to the card: a resumed run counts the time of all its parts."""
    if not workers.is_chief:
        yield
        return
    started = time.monotonic()
    try:
        yield
    finally:
        with suppress(OSError):  # A full disk must not hide what went wrong first.
            before = read_json(run / RUN_CARD_FILE)["timing"].get("train_seconds", 0.0)
            seconds = before + time.monotonic() - started
            update_run_card(run, timing={"train_seconds": seconds})


def describe_end(result: TrainingResult, model: RetrievalModel) -> dict[str, Any]:
    """Returns what the card says once the run is trained and published."""
    return {
        "status": STATUS_TRAINED,
        # Dynamic tables have grown.
        "model": {"parameters": model.parameter_count, "tables": describe_tables(model)},
        "timing": {"training_finished_at": _now()},
        "training": {
            "best_epoch": result.best_epoch,
            "epochs": result.epochs,
            "steps": result.steps,
            "stopped_early": result.stopped_early,
            "left_out": dict(result.left_out),
            "peak_memory_bytes": peak_memory_bytes(),
            "peak_device_memory_bytes": peak_device_memory_bytes(),
        },
    }


def peak_memory_bytes() -> int:
    """Returns the most memory that this process has held, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * KIBIBYTE


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

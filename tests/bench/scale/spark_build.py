"""A build of a generated log, and a training on what it made: CPU time, memory, bytes on disk."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from conf.artefacts.run import RUN_CARD_FILE, read_json, resolve_run
from tests.bench.clock import REPOSITORY, run_driver_process, time_tree
from tests.bench.etl.driver import EtlJob, LogSize

HISTORY_LEN, COMPRESSION = 10, "gzip"
"""Of the series: a hundred million events then fit on a small disk."""
SHUFFLE_PARTITIONS_EVENTS = 1_000_000
LEAST_PARTITIONS = 8
_SAMPLE_S = 1.0
_SPENT = {
    "internal.metrics.shuffle.write.bytesWritten": "shuffle_bytes",
    "internal.metrics.diskBytesSpilled": "spill_bytes",
}
_KINDS = {"jvm": "jvm_peak_bytes", "python_worker": "worker_peak_bytes",
          "driver_python": "driver_peak_bytes"}  # fmt: skip


class PeakDisk:
    """Samples the bytes of all files of a folder while a block runs.

    Attributes:
        bytes: The most that there were.

    Args:
        folder: Where they are.
    """

    def __init__(self, folder: Path) -> None:
        self.bytes, self._folder, self._stop = 0, folder, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakDisk:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.bytes = max(self.bytes, count_bytes(self._folder))

    def _watch(self) -> None:
        while not self._stop.wait(_SAMPLE_S):
            self.bytes = max(self.bytes, count_bytes(self._folder))


def count_bytes(folder: Path) -> int:
    """Returns the bytes of all files below a folder; files may come and go meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue
    return total


def measure_build(
    events: int, work: Path, driver_memory: str, history_len: int
) -> dict[str, float]:
    """Generates a log and builds a version of it by a driver that starts cold.

    The version stays, for a training on it; the log goes.

    Args:
        events: Of the log.
        work: Folder of the log, of Spark's files and of the version.
        driver_memory: Heap of Spark's JVM, such as "2g".
        history_len: Items of a history at most.

    Raises:
        RuntimeError: A driver failed.
    """
    folder = work / f"events-{events}-{history_len}"
    shutil.rmtree(folder, ignore_errors=True)
    logs, local, told = folder / "logs", folder / "spark", folder / "told"
    for made in (local, told):
        made.mkdir(parents=True)
    conf = {
        "spark.local.dir": str(local), "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": told.as_uri(), "spark.eventLog.compress": "false",
        "spark.eventLog.rolling.enabled": "false",
    }  # fmt: skip
    job = EtlJob(
        "generate", events, False, str(logs), str(folder / "out"), "local[2]", driver_memory,
        max(LEAST_PARTITIONS, events // SHUFFLE_PARTITIONS_EVENTS),
        is_warm=False, history_len=history_len, compression=COMPRESSION,
    )  # fmt: skip
    log_bytes = _run(job)["input_bytes"]
    with PeakDisk(folder) as disk:
        found = _run(EtlJob(**{**asdict(job), "task": "build", "conf": conf}))
    (log,) = told.iterdir()
    peaks = {name: found["peak_rss_bytes"][kind] for kind, name in _KINDS.items()}
    figures = {
        "cpu_s": found["process_cpu_s"], "wall_s": found["wall_s"], "log_bytes": log_bytes,
        "version_bytes": found["output_bytes"], "disk_peak_bytes": disk.bytes,
        "tokens": LogSize(events).users + LogSize(events).items, **read_event_log(log), **peaks,
    }  # fmt: skip
    for made in (logs, local, told):
        shutil.rmtree(made)
    return figures


def _run(job: EtlJob) -> dict[str, Any]:
    done = run_driver_process("tests.bench.etl.driver", asdict(job))
    if done.returncode:
        raise RuntimeError(f"{job.task} of {job.rows:,} events failed:\n{done.errors[-3000:]}")
    return done.value


def read_event_log(path: Path) -> dict[str, float]:
    """Sums what the stages of an application shuffled and spilled, by Spark's own counters.

    Args:
        path: Log of Spark's events: JSON on each line.
    """
    totals = dict.fromkeys(_SPENT.values(), 0.0)
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            event = json.loads(line)
            if event["Event"] != "SparkListenerStageCompleted":
                continue
            for counter in event["Stage Info"]["Accumulables"]:
                if (name := _SPENT.get(counter["Name"])) is not None:
                    totals[name] += int(counter["Value"])
    return totals


BATCH, DIM, HIDDEN_UNITS = 2048, 32, 64


def measure_train(events: int, work: Path) -> dict[str, float]:
    """Trains an epoch of two towers on the version that `measure_build` has left.

    Args:
        events: Of the log that the version was made of.
        work: As for `measure_build`.

    Raises:
        FileNotFoundError: There is no version.
        RuntimeError: The training failed.
    """
    folder = work / f"events-{events}-{HISTORY_LEN}"
    dataset = folder / "out" / "bench"
    if not dataset.exists():
        raise FileNotFoundError(
            f"{dataset} does not exist: run `measure build --size {events}` with the same --work"
        )
    shutil.rmtree(folder / "runs", ignore_errors=True)
    config = folder / "train.yaml"
    config.write_text(yaml.safe_dump(describe_training(dataset, folder / "runs")), "utf-8")
    command = [sys.executable, "-m", "jobs.cli", "train", str(config), "--once", "--no-report"]
    errors = folder / "train.log"

    def train() -> None:
        with errors.open("w", encoding="utf-8") as out:
            done = subprocess.run(command, cwd=REPOSITORY, stdout=out, stderr=out, check=False)
        if done.returncode:
            raise RuntimeError(errors.read_text(encoding="utf-8")[-3000:])

    times = time_tree(train)
    run = resolve_run(str(folder / "runs" / "scale"))
    card = read_json(run / RUN_CARD_FILE)
    return {
        "cpu_s": times.cpu_s, "wall_s": times.wall_s,
        "examples": card["training"]["steps"] * BATCH,
        "peak_bytes": card["training"]["peak_memory_bytes"],
        "run_bytes": count_bytes(run),
    }  # fmt: skip


def describe_training(dataset: Path, runs: Path) -> dict[str, object]:
    """Returns the config of the training: users and items in dynamic tables, Adam, one epoch."""
    return {
        "name": "scale", "dataset": str(dataset), "root": str(runs),
        "model": {
            "name": "dssm", "embedding_dim": DIM, "user_hidden_units": [HIDDEN_UNITS],
            "objective": {"kind": "binary"},
            "user_features": ["user_id", "country", "age", "history"],
            "item_features": ["item_id", "category", "tags"],
            "embeddings": {
                "user_id": "dynamic",
                "items": {"kind": "dynamic", "features": ["item_id", "history"]},
            },
        },
        "input": {"batch_size": BATCH},
        "optimizer": {"sparse": {"kind": "adam"}},
        "fit": {"epochs": 1, "early_stopping": None},
    }  # fmt: skip

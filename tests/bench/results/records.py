"""Records of results: what finished runs wrote, with the commit and the machine that made them."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from conf.artefacts.dataset import (
    VERSIONS_DIR,
    published_versions,
    read_manifest,
    resolve_version,
)
from conf.artefacts.run import METRICS_FILE, RUN_CARD_FILE, STATUS_TRAINED, read_json
from conf.load import apply_override, read_yaml
from conf.manifest import Manifest
from conf.schema import fingerprint
from tests.bench.results.experiments import Experiment, Metric

FOLDER = Path(__file__).with_name("measured")
OTHER_SETUP = "rows, settings or metrics"


class RefusedError(Exception):
    """What no record can be made of as it is; the message says how to go on."""


class UnfinishedRunError(RefusedError):
    """A run that says nothing about its preset: it has not ended, or not by its own plan."""


@dataclass(frozen=True)
class SeedResult:
    """What one seed gave.

    Attributes:
        seed: Of the run.
        figures: By title of the metric.
        popularity: The same of popularity, or of a constant; empty where there is neither.
        epochs: That were trained.
        best_epoch: Whose weights were measured; None: the last.
        plan_epochs: That the preset allows.
        cpu_seconds: Of all processes that trained the run.
        peak_memory_bytes: Of the process that ended it, where it was resumed; runs keep no other.
        commit: Of the code that trained.
        processor: Of the machine that trained; of several, joined by `and`.
        finished_on: Day, as in 2026-11-26.
    """

    seed: int
    figures: dict[str, float]
    popularity: dict[str, float]
    epochs: int
    best_epoch: int | None
    plan_epochs: int
    cpu_seconds: float
    peak_memory_bytes: int
    commit: str
    processor: str
    finished_on: str


@dataclass(frozen=True)
class Record:
    """What an experiment gave.

    Attributes:
        experiment: Its name.
        split_sha256: Of the rows that were trained on and measured on.
        setup_sha256: Of the settings, and of what is read of the runs; see `digest_setup`.
        seeds: One result each, by seed.
    """

    experiment: str
    split_sha256: str
    setup_sha256: str
    seeds: tuple[SeedResult, ...]

    def takes_seeds_of(self, other: Record) -> bool:
        """Whether the seeds of both may stand in one record."""
        return replace(other, seeds=self.seeds) == self

    def mean(self, title: str) -> float:
        """Mean of a metric over the seeds."""
        return statistics.fmean(seed.figures[title] for seed in self.seeds)

    def deviation(self, title: str) -> float | None:
        """Standard deviation of a metric over the seeds; None for a single one."""
        if len(self.seeds) < 2:
            return None
        return statistics.stdev(seed.figures[title] for seed in self.seeds)


def digest_splits(manifest: Manifest) -> str:
    """SHA-256 over the rows and checksums of all shards that training and evaluation read."""
    lines = [
        f"{split.name} {shard.rows} {shard.crc32c}\n"
        for split in manifest.splits
        for shard in split.shards
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def digest_setup(experiment: Experiment) -> str:
    """SHA-256 over what a preset sets, what is set beside it, and which figures are read how.

    Defaults are those of the code: each seed names its commit.
    """
    settings = read_yaml("training", experiment.preset)
    for setting in experiment.settings:
        apply_override(settings, setting)
    return fingerprint([settings, [asdict(metric) for metric in experiment.metrics]])


def find_oldest_of_same_rows(dataset: Path) -> str:
    """Returns the id of the oldest version with the shards that the current version has."""
    rows = digest_splits(read_manifest(resolve_version(dataset)))
    versions = (dataset / VERSIONS_DIR / version for version in published_versions(dataset))
    return next(v.name for v in versions if digest_splits(read_manifest(v)) == rows)


def read_seed(experiment: Experiment, run: Path, origin: dict[str, Any]) -> SeedResult:
    """Reads what a finished and evaluated run wrote.

    Args:
        experiment: Whose preset was trained.
        run: Directory of the run.
        origin: Commit and processor that the run was made by.

    Raises:
        UnfinishedRunError: It has not ended by its plan or by its patience.
    """
    card, measured = read_json(run / RUN_CARD_FILE), read_json(run / METRICS_FILE)
    training, plan = card.get("training", {}), card["config"]["fit"]["epochs"]
    if card["status"] != STATUS_TRAINED:
        raise UnfinishedRunError(f"{run}: {card['status']}")
    if training["epochs"] < plan and not training["stopped_early"]:
        raise UnfinishedRunError(f"{run}: {training['epochs']} of {plan} epochs")
    if measured["split"] != "test":
        raise UnfinishedRunError(f"{run}: measured on {measured['split']}, not on test")
    model, floor = _find_systems(experiment, measured)
    return SeedResult(
        seed=card["config"]["seed"],
        figures={metric.title: _round(model[metric.key]) for metric in experiment.metrics},
        popularity={m.title: _round(floor[m.key]) for m in experiment.metrics if m.key in floor},
        epochs=training["epochs"],
        best_epoch=training["best_epoch"],
        plan_epochs=plan,
        cpu_seconds=round(card["timing"]["train_cpu_seconds"]),
        peak_memory_bytes=training["peak_memory_bytes"],
        commit=origin["commit"],
        processor=origin["processor"],
        finished_on=card["timing"]["training_finished_at"][:10],
    )


def _find_systems(
    experiment: Experiment, measured: dict[str, Any]
) -> tuple[dict[str, float], dict[str, float]]:
    """Figures of the model, and of what knows nothing of the row."""
    if "tasks" in measured:
        (task,) = measured["tasks"].values()
        return task, task.get("constant", {})
    name = experiment.metrics[0].protocol or measured["headline"]
    (protocol,) = [found for found in measured["protocols"] if found["name"] == name]
    return protocol["systems"]["model"], protocol["systems"].get("popularity", {})


def _round(value: float) -> float:
    return round(value, 5)


def build_record(
    experiment: Experiment, version: Path, seeds: Collection[SeedResult] = ()
) -> Record:
    """Puts the results of several seeds on one dataset version together."""
    ordered = tuple(sorted(seeds, key=lambda result: result.seed))
    rows = digest_splits(read_manifest(version))
    return Record(experiment.name, rows, digest_setup(experiment), ordered)


def find_other_seeds(record: Record, seeds: Collection[int]) -> tuple[SeedResult, ...]:
    """Returns what the stored record of an experiment has beside some seeds.

    Args:
        record: Of the same experiment, on the rows and with the settings of now.
        seeds: That are, or are about to be, measured.

    Raises:
        RefusedError: The stored ones are of other rows or settings, and would be lost.
    """
    stored = read_records().get(record.experiment)
    if stored is None:
        return ()
    others = tuple(result for result in stored.seeds if result.seed not in seeds)
    if others and not record.takes_seeds_of(stored):
        numbers = " ".join(str(number) for number in sorted({s.seed for s in others} | {*seeds}))
        raise RefusedError(
            f"{record.experiment}: its record is of other {OTHER_SETUP}; measure all of its seeds "
            f"anew (--seeds {numbers}), or remove {_find_file(record)}"
        )
    return others


def write_record(record: Record) -> Path:
    """Writes a record beside the others and returns its file; its other seeds stay in it.

    Raises:
        RefusedError: Other seeds would be lost.
    """
    others = find_other_seeds(record, [result.seed for result in record.seeds])
    seeds = sorted((*others, *record.seeds), key=lambda result: result.seed)
    FOLDER.mkdir(exist_ok=True)
    file = _find_file(record)
    text = json.dumps(asdict(replace(record, seeds=tuple(seeds))), indent=1)
    file.write_text(text + "\n", encoding="utf-8")
    return file


def _find_file(record: Record) -> Path:
    return FOLDER / f"{record.experiment}.json"


def read_records() -> dict[str, Record]:
    """Returns all records, by name of the experiment."""
    found = {}
    for file in sorted(FOLDER.glob("*.json")):
        data = json.loads(file.read_text(encoding="utf-8"))
        seeds = tuple(SeedResult(**seed) for seed in data.pop("seeds"))
        found[data["experiment"]] = Record(**data, seeds=seeds)
    return found


def format_figure(record: Record, metric: Metric) -> str:
    """A metric as pages say it: `0.4868`, or `0.4868 ± 0.0007` over several seeds."""
    deviation = record.deviation(metric.title)
    mean = f"{record.mean(metric.title):.4f}"
    return mean if deviation is None else f"{mean} ± {deviation:.4f}"

"""The data of a run: a dataset version, its splits as they are read, their rows and steps.

The manifest's counts tell rows and steps, unless rows are left out. Then the split is counted once,
reading only what the filter looks at; the number is kept per process, and beside the run.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.artefacts.dataset import read_manifest, resolve_version
from conf.errors import ConfigError, InputDataError, TooFewRowsError
from conf.manifest import Manifest
from conf.manifest_checks import count_most_rows, find_ratio
from conf.paths import ReadablePath, open_sizes
from conf.schema import fingerprint
from conf.storage.atomic_output import write_text_atomic
from conf.storage.locations import find_path
from conf.training.input import FilterConfig, InputConfig
from training.reader.epoch_plan import divide_shards
from training.reader.feature_columns import FeatureColumn, plan_columns, select_features
from training.reader.filters import build_row_filter
from training.reader.shards import (
    DamagePolicy,
    InputCounts,
    ShardChecks,
    filled_shards,
    list_shards,
)
from training.reader.shuffle_buffer import ReadPlan, read_epoch

if TYPE_CHECKING:
    from conf.training.train import TrainConfig

WHICH_ROWS = ("filter", "validation", "on_corrupt")
"""Keys of `input` that decide which rows an epoch has."""
SHUFFLED_ONLY = ("class_balance", "mix", "bucket_boundaries", "sparse")
"""Keys of `input` that rows in their order know nothing of."""
_MAX_THREADS = 8


@dataclass(frozen=True)
class InputOptions:
    """What a run asks of the input beside its config."""

    binary_labels: tuple[str, ...] = ()  # their values must be 0 or 1
    # This worker and how many there are: each reads its own files, for its part of the batch.
    worker: tuple[int, int] = (0, 1)
    counts: InputCounts = field(default_factory=InputCounts)
    checks: ShardChecks = field(default_factory=ShardChecks)  # over all epochs
    threads: int | None = None  # None: one per core, at most 8


@dataclass(frozen=True)
class SplitSource:
    """A split to read; `is_held_out`: of its rows those that `config.validation` keeps apart."""

    version_dir: ReadablePath
    manifest: Manifest
    split: str
    config: InputConfig
    options: InputOptions = field(default_factory=InputOptions)
    is_held_out: bool = False

    def __post_init__(self) -> None:
        """Refuses held-out rows that nothing holds out."""
        if self.is_held_out and (self.config.validation is None or self.split != "train"):
            raise ConfigError(
                "no rows are held out",
                received=f"split={self.split!r}, validation={self.config.validation}",
                allowed="split='train' and validation={'hash_of': FEATURE, 'share': SHARE}",
            )

    @property
    def batch_size(self) -> int:
        """Rows of a batch that this worker makes."""
        workers = self.options.worker[1]
        if self.config.batch_size % workers:
            raise ConfigError(
                "input.batch_size must be a multiple of the number of workers",
                received=f"{self.config.batch_size} rows on {workers} workers",
                allowed=f"a multiple of {workers}",
            )
        return self.config.batch_size // workers

    def ranges(self, worker: int) -> tuple[tuple[int, int], ...]:
        """First record and number of records that a worker reads of each filled shard."""
        return divide_shards(self._possible_rows, worker, self.options.worker[1])

    @functools.cached_property
    def _possible_rows(self) -> list[int]:
        """Records of each filled shard: at most what it holds, and one where it is missing."""
        shards = filled_shards(self.manifest, self.split)
        if self.config.on_corrupt == "fail":
            return [shard.rows for shard in shards]
        find_bytes, ratio = open_sizes(self.version_dir), find_ratio(self.manifest.compression)
        most = [count_most_rows(find_bytes(shard.path) or 0, ratio) for shard in shards]
        return [min(s.rows, max(1, rows)) for s, rows in zip(shards, most, strict=True)]

    def replacing(self, **options: Any) -> SplitSource:
        """The same split with some other options."""
        return replace(self, options=replace(self.options, **options))

    def in_order(self, buffer_rows: int | None = None) -> SplitSource:
        """The split in the order of its records, of which so many are decoded at a time."""
        plain = {name: InputConfig.model_fields[name].default for name in SHUFFLED_ONLY}
        plain["shuffle_buffer"] = buffer_rows or self.config.shuffle_buffer
        return replace(self, config=self.config.model_copy(update=plain))

    def plan(self, columns: Sequence[FeatureColumn], seed: int | None = None) -> ReadPlan:
        """Plans how rows are read; without a seed in their order, as `in_order` has it."""
        config, manifest, options = self.config, self.manifest, self.options
        balance = config.class_balance
        if balance is not None and balance.feature not in [column.name for column in columns]:
            specs = select_features(manifest, [balance.feature])
            columns = (*columns, *plan_columns(manifest, specs))
        has_affinity = hasattr(os, "sched_getaffinity")
        cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
        return ReadPlan(
            columns=tuple(columns),
            shards=list_shards(self.version_dir, manifest, self.split),
            ranges=self.ranges(options.worker[0]),
            seed=seed,
            buffer_rows=config.shuffle_buffer,
            interleave=1 if seed is None else config.interleave_shards,
            batch_size=self.batch_size,
            is_exact=config.is_exact,
            balance=balance,
            row_filter=build_row_filter(manifest, config, self.is_held_out),
            record_type=manifest.record_type,
            threads=options.threads or min(_MAX_THREADS, cores),
            damage=DamagePolicy(config.on_corrupt, options.counts, options.checks),
            binary_labels=options.binary_labels,
            has_lengths=config.bucket_boundaries is not None,
            slots=manifest.slots,
        )


def count_rows(source: SplitSource, file: Path | None = None) -> int:
    """Returns how many rows a source gives to all its workers; the file keeps counts."""
    return sum(_count_workers(source, file))


def count_steps(source: SplitSource, file: Path | None = None) -> int:
    """The steps of an epoch: whole batches, of which each worker makes its part."""
    steps = min(rows // source.batch_size for rows in _count_workers(source, file))
    if source.config.mix:
        steps = int(steps / source.config.mix_shares[0])
    if not steps:
        raise build_size_error(source, count_rows(source, file))
    return steps


def build_size_error(source: SplitSource, rows: int | None, ranks: int = 1) -> InputDataError:
    """The error of a split whose rows (None: not counted) fill no batch, or give ranks none."""
    listed = source.manifest.split(source.split).rows
    kind = TooFewRowsError if listed else InputDataError
    return kind(
        f"the {source.split} split is {'empty' if rows == 0 else 'smaller than one batch'}",
        received=f"{'too few' if rows is None else rows} rows, of {listed} in the dataset",
        allowed=f"at least input.batch_size = {source.config.batch_size} rows"
        + (f", and one for each of {ranks} ranks" if ranks > 1 else ""),
        fix="set input.batch_size lower, let input.filter, input.validation and input.on_corrupt "
        "leave more rows, or build the dataset with more rows in this split",
    )


_COUNTED: dict[str, int] = {}


def _count_workers(source: SplitSource, file: Path | None) -> Sequence[int]:
    workers = range(source.options.worker[1])
    if source.config.is_exact:
        return [sum(rows for _, rows in source.ranges(worker)) for worker in workers]
    return [_count_kept(source, worker, file) for worker in workers]


def _count_kept(source: SplitSource, worker: int, file: Path | None) -> int:
    config = source.config
    # Not the path: a run that goes on elsewhere keeps its number of steps.
    key = fingerprint(
        {
            "shards": [[s.path, s.crc32c] for s in source.manifest.split(source.split).shards],
            "version": f"{source.manifest.dataset_name}/{source.manifest.dataset_version}",
            **config.model_dump(mode="json", include=set(WHICH_ROWS)),
            "held_out": source.is_held_out,
            "worker": [worker, source.options.worker[1]],
        }
    )
    kept: dict[str, int] = {}
    if file is not None and file.exists():
        kept = json.loads(file.read_text(encoding="utf-8"))
    own = f"{source.version_dir}\0{key}"
    if key in kept:
        _COUNTED[own] = kept[key]
    elif own not in _COUNTED:
        _COUNTED[own] = _read_through(source, worker)
    if file is not None and key not in kept:
        write_text_atomic(file, json.dumps({**kept, key: _COUNTED[own]}, indent=1) + "\n")
    return _COUNTED[own]


def _read_through(source: SplitSource, worker: int) -> int:
    options = InputOptions(worker=(worker, source.options.worker[1]))
    counted = replace(source.in_order(), options=options)
    return sum(rows.count for rows in read_epoch(counted.plan(()), 0))


@dataclass(frozen=True)
class TrainingData:
    """A dataset version that a run trains on."""

    version_dir: ReadablePath
    manifest: Manifest
    counts_file: Path | None = None  # keeps how many rows the input leaves, once counted

    def steps_per_epoch(self, config: InputConfig) -> int:
        """Whole batches of an epoch; the rows left over are drawn anew each epoch."""
        source = SplitSource(self.version_dir, self.manifest, "train", config)
        return count_steps(source, self.counts_file)

    def held_out_rows(
        self, config: InputConfig, evaluation_filter: tuple[FilterConfig, ...] = ()
    ) -> int:
        """Rows of train that `config.validation` keeps apart, and that pass `evaluation.filter`."""
        own = config.model_copy(update={"filter": (*config.filter, *evaluation_filter)})
        source = SplitSource(self.version_dir, self.manifest, "train", own, is_held_out=True)
        return count_rows(source, self.counts_file)

    def filtered_rows(self, split: str, evaluation_filter: tuple[FilterConfig, ...]) -> int:
        """Rows of a split that pass `evaluation.filter`."""
        config = InputConfig(filter=evaluation_filter)
        source = SplitSource(self.version_dir, self.manifest, split, config)
        return count_rows(source, self.counts_file)


def open_version(dataset: str | Path, config: InputConfig) -> tuple[ReadablePath, Manifest]:
    """Directory and manifest of a dataset's current version, or of the one that is named."""
    version_dir = resolve_version(find_path(dataset))
    return version_dir, read_manifest(version_dir, config.tolerates)


def read_current_data(config: TrainConfig) -> TrainingData:
    """Reads the manifest of the dataset version that a new run of a config trains on."""
    return TrainingData(*open_version(config.dataset, config.input))


def read_current_mixed(config: TrainConfig) -> tuple[TrainingData, ...]:
    """Reads the manifests of the versions that a new run mixes in."""
    return tuple(TrainingData(*open_version(p.dataset, config.input)) for p in config.input.mix)


def pin_mixed(config: TrainConfig, versions: Sequence[str]) -> TrainConfig:
    """The config with versions in the place of the datasets of `input.mix`."""
    parts = zip(config.input.mix, versions, strict=True)
    mix = tuple(part.model_copy(update={"dataset": version}) for part, version in parts)
    return config.model_copy(update={"input": config.input.model_copy(update={"mix": mix})})

"""A split to read: which records, rows and steps an epoch has, and how they are read.

The manifest's counts tell rows and steps without reading anything, unless rows are left out:
by a filter, a held-out share, or because they are damaged. Then the split is counted once,
reading only what the filter looks at; the number is kept per process, and beside the run
where a file is given.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from conf.errors import ConfigError, InputDataError, TooFewRowsError
from conf.manifest import Manifest
from conf.manifest_checks import count_most_rows, find_ratio
from conf.paths import ReadablePath, open_sizes
from conf.schema import canonical_json, fingerprint
from conf.storage.atomic_output import write_text_atomic
from conf.training.input import ClassBalanceConfig, FilterConfig, InputConfig
from training.reader.damage import DamagePolicy, InputCounts, ShardChecks, warn_unlisted
from training.reader.decoded_rows import DecodedRows
from training.reader.epoch_plan import limit_rows
from training.reader.feature_columns import FeatureColumn
from training.reader.filters import build_row_filter
from training.reader.row_sampling import balance_classes
from training.reader.shards import WIRE_COMPRESSIONS, Shard, ShardCache, check_format, filled_shards
from training.reader.shares import divide_shards
from training.reader.shuffle_buffer import ReadPlan, read_epoch

MAX_THREADS = 8


@dataclass(frozen=True)
class InputOptions:
    """What a run asks of the input beside its config.

    Attributes:
        binary_labels: Features whose values must be 0 or 1.
        worker: Number of this worker and of all of them: each reads its own files and makes its
            part of the global batch.
        counts: Counts what is left out.
        evaluation_filter: What rows must pass beside the config's own filter: `evaluation.filter`.
        checks: Notes which shards were compared with their checksums, over all epochs.
    """

    binary_labels: tuple[str, ...] = ()
    worker: tuple[int, int] = (0, 1)
    counts: InputCounts = field(default_factory=InputCounts)
    evaluation_filter: tuple[FilterConfig, ...] = ()
    checks: ShardChecks = field(default_factory=ShardChecks)


@dataclass(frozen=True)
class SplitSource:
    """A split to read.

    Attributes:
        version_dir: Directory of the dataset version.
        manifest: Its manifest.
        split: Name of the split.
        config: How it is read.
        options: What the run asks for beside.
        is_held_out: Whether the rows that `config.validation` keeps apart are the ones to read.
    """

    version_dir: ReadablePath
    manifest: Manifest
    split: str
    config: InputConfig
    options: InputOptions = field(default_factory=InputOptions)
    is_held_out: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether the manifest's counts alone tell how many rows there are."""
        return self.config.is_exact and not self.options.evaluation_filter

    @property
    def batch_size(self) -> int:
        """Rows of a batch that this worker makes.

        Raises:
            ConfigError: The workers cannot share a batch evenly.
        """
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
        rows = limit_rows(self._possible_rows, self.config.take)
        return divide_shards(rows, worker, self.options.worker[1])

    @cached_property
    def _possible_rows(self) -> list[int]:
        """Records of each filled shard, no more than it can hold where damage is tolerated.

        The manifest may say anything of a shard that is missing or of another size. One that is
        missing has a record, so that it is looked for.
        """
        shards = filled_shards(self.manifest, self.split)
        if self.config.on_corrupt == "fail":
            return [shard.rows for shard in shards]
        find_bytes, ratio = open_sizes(self.version_dir), find_ratio(self.manifest.compression)
        most = [count_most_rows(find_bytes(shard.path) or 0, ratio) for shard in shards]
        return [min(s.rows, max(1, rows)) for s, rows in zip(shards, most, strict=True)]

    def plan(
        self, columns: Sequence[FeatureColumn], seed: int | None, buffer_rows: int | None = None
    ) -> ReadPlan:
        """Plans how rows are read.

        Args:
            columns: Features to deliver.
            seed: The run's seed; None keeps the order of the records.
            buffer_rows: Records that are decoded together; None: as the config says.

        Raises:
            InputDataError: No such split or feature, or records that training does not read.
            ConfigError: The config does not fit the features.
        """
        config, manifest, options = self.config, self.manifest, self.options
        is_shuffled = seed is not None
        check_format(manifest)
        warn_unlisted(str(self.version_dir), manifest)
        row_filter = build_row_filter(manifest, config, self.is_held_out, options.evaluation_filter)
        balance = config.class_balance if is_shuffled else None
        plan = ReadPlan(
            columns=tuple(columns),
            shards=list_shards(self.version_dir, manifest, self.split),
            ranges=self.ranges(options.worker[0]),
            seed=seed,
            buffer_rows=buffer_rows or config.shuffle_buffer,
            interleave=config.interleave_shards if is_shuffled else 1,
            batch_size=self.batch_size,
            is_exact=config.is_exact and row_filter is None,
            redraw=None if balance is None else _build_redraw(balance),
            row_filter=row_filter,
            record_type=manifest.record_type,
            threads=config.parallel_parses or min(MAX_THREADS, _cores()),
            damage=DamagePolicy(config.on_corrupt, options.counts, options.checks),
            binary_labels=options.binary_labels,
            has_lengths=is_shuffled and config.bucket_boundaries is not None,
            slots=manifest.slots,
        )
        return replace(plan, cache=_build_cache(config, manifest, plan))


def list_shards(version_dir: ReadablePath, manifest: Manifest, split: str) -> tuple[Shard, ...]:
    """The filled shards of a split, as readers take them."""
    compression = WIRE_COMPRESSIONS[manifest.compression]
    return tuple(
        Shard(f"{version_dir}/{shard.path}", shard.rows, shard.crc32c, compression)
        for shard in filled_shards(manifest, split)
    )


def _build_cache(config: InputConfig, manifest: Manifest, plan: ReadPlan) -> ShardCache | None:
    if config.cache is None:
        return None
    wires = [[f.name, f.kind, f.is_list, f.is_sequence] for f in plan.features]
    scope = canonical_json([wires, manifest.record_type, config.on_corrupt])
    return ShardCache(scope, None if config.cache_dir is None else Path(config.cache_dir))


def _build_redraw(
    balance: ClassBalanceConfig,
) -> Callable[[DecodedRows, Sequence[int]], DecodedRows]:
    return lambda rows, seed: balance_classes(rows, balance.feature, balance.shares, seed)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


_COUNTED: dict[str, int] = {}


def count_rows(source: SplitSource, file: Path | None = None) -> int:
    """Returns how many rows a source gives to all its workers.

    Args:
        source: The split, as it is read.
        file: Where counts are kept from process to process; made if it is not there.

    Raises:
        InputDataError: A shard is damaged or missing where that is not to be passed over.
    """
    return sum(_count_workers(source, file))


def count_steps(source: SplitSource, file: Path | None = None) -> int:
    """Returns the steps of an epoch: whole batches, of which each worker makes its part.

    Args:
        source: The train split, as it is read.
        file: As for `count_rows`.

    Raises:
        InputDataError: There is no whole batch, or as for `count_rows`.
    """
    steps = min(rows // source.batch_size for rows in _count_workers(source, file))
    if source.config.mix:
        steps = int(steps / source.config.mix_shares[0])
    if not steps:
        raise build_size_error(source, count_rows(source, file))
    return steps


def build_size_error(source: SplitSource, rows: int) -> InputDataError:
    """Returns the error of a split that does not fill one batch.

    Args:
        source: The split, as it is read.
        rows: Rows that it gives.
    """
    listed = source.manifest.split(source.split).rows
    if rows:
        fix = f"set input.batch_size to {rows} or less, or add data"
    elif listed:
        fix = "let input.filter, input.validation and input.on_corrupt leave rows"
    else:
        fix = "build the dataset with rows in this split, or train on another version"
    kind = TooFewRowsError if listed else InputDataError
    return kind(
        f"the {source.split} split is {'smaller than one batch' if rows else 'empty'}",
        received=f"{rows} rows" + ("" if rows == listed else f" that the input leaves of {listed}"),
        allowed=f"at least input.batch_size = {source.config.batch_size} rows",
        fix=fix,
    )


def _count_workers(source: SplitSource, file: Path | None) -> Sequence[int]:
    workers = source.options.worker[1]
    if source.is_exact:
        return [sum(rows for _, rows in source.ranges(worker)) for worker in range(workers)]
    return [_count_kept(source, worker, file) for worker in range(workers)]


def _count_kept(source: SplitSource, worker: int, file: Path | None) -> int:
    config = source.config
    # Not the path: a run that goes on elsewhere keeps its number of steps.
    key = fingerprint(
        {
            "shards": [[s.path, s.crc32c] for s in source.manifest.split(source.split).shards],
            "version": f"{source.manifest.dataset_name}/{source.manifest.dataset_version}",
            "filter": [
                item.model_dump(mode="json")
                for item in (*config.filter, *source.options.evaluation_filter)
            ],
            "validation": config.validation and config.validation.model_dump(mode="json"),
            "held_out": source.is_held_out,
            "take": config.take,
            "on_corrupt": config.on_corrupt,
            "worker": [worker, source.options.worker[1]],
        }
    )
    kept, own = _read_counts(file), f"{source.version_dir}\0{key}"
    if key in kept:
        _COUNTED[own] = kept[key]
    elif own not in _COUNTED:
        _COUNTED[own] = _read_through(source, worker)
    if file is not None and key not in kept:
        write_text_atomic(file, json.dumps({**kept, key: _COUNTED[own]}, indent=1) + "\n")
    return _COUNTED[own]


def _read_through(source: SplitSource, worker: int) -> int:
    workers = source.options.worker[1]
    options = InputOptions(
        worker=(worker, workers),
        counts=InputCounts(),
        evaluation_filter=source.options.evaluation_filter,
    )
    plain = source.config.model_copy(update={"cache": None, "cache_dir": None, "mix": ()})
    counted = SplitSource(
        source.version_dir, source.manifest, source.split, plain, options, source.is_held_out
    )
    return sum(rows.count for rows in read_epoch(counted.plan((), None), 0))


def _read_counts(file: Path | None) -> dict[str, int]:
    if file is None or not file.exists():
        return {}
    try:
        counts = dict(json.loads(file.read_text(encoding="utf-8")))
        return {str(key): int(rows) for key, rows in counts.items()}
    except (ValueError, TypeError):  # damaged: count again
        return {}

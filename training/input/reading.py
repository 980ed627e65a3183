"""From a config and a manifest to what a stream of rows is made of."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from conf.errors import ConfigError
from conf.manifest import Manifest
from conf.place import Place
from conf.schema import canonical_json
from conf.training.input import InputConfig
from training.input.columns import Column
from training.input.damage import DamagePolicy, InputCounts, tell_unlisted
from training.input.epoch_plan import limit_rows, shard_for
from training.input.filters import build_row_filter
from training.input.pool_config import PoolConfig
from training.input.rows import Rows
from training.input.sampling import balance_classes
from training.input.shard_cache import ShardCache
from training.input.shard_reader import Shard
from training.input.stream import StreamConfig
from training.shards import WIRE_COMPRESSIONS, check_format, filled_shards

MOST_THREADS = 8


@dataclass(frozen=True)
class ReadOptions:
    """What a run asks of the input beside its config.

    Attributes:
        binary_label: Feature whose values must be 0 or 1; None checks none.
        worker: Number of this worker and of all of them: each reads its own files and makes its
            part of the global batch.
        epochs: Epochs that the dataset runs through, each in another order.
        counts: Is told what was left out.
    """

    binary_label: str | None = None
    worker: tuple[int, int] = (0, 1)
    epochs: int = 1
    counts: InputCounts = field(default_factory=InputCounts)


@dataclass(frozen=True)
class Source:
    """A split to read.

    Attributes:
        version_dir: Directory of the dataset version.
        manifest: Its manifest.
        split: Name of the split.
        config: How it is read.
        options: What the run asks for beside.
        is_held_out: Whether the rows that `config.validation` keeps apart are the ones to read.
    """

    version_dir: Place
    manifest: Manifest
    split: str
    config: InputConfig
    options: ReadOptions = field(default_factory=ReadOptions)
    is_held_out: bool = False

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
        shards = filled_shards(self.manifest, self.split)
        rows = limit_rows([shard.rows for shard in shards], self.config.take)
        return shard_for(rows, worker, self.options.worker[1])


def build_stream(source: Source, columns: Sequence[Column], seed: int | None) -> StreamConfig:
    """Builds what a stream of rows is made of.

    Args:
        source: The split to read.
        columns: Features to deliver.
        seed: The run's seed; None keeps the order of the records.

    Raises:
        InputDataError: No such split or feature, or records that training does not read.
        ConfigError: The config does not fit the features.
    """
    config, manifest, options = source.config, source.manifest, source.options
    check_format(manifest)
    tell_unlisted(str(source.version_dir), manifest)
    row_filter = build_row_filter(manifest, config, source.is_held_out)
    balance = config.class_balance if seed is not None else None
    pools = PoolConfig(
        columns=tuple(columns),
        row_filter=row_filter,
        record_type=manifest.record_type,
        decoder=config.decoder,
        threads=config.parallel_parses or min(MOST_THREADS, _cores()),
        damage=DamagePolicy(config.on_corrupt, options.counts),
        binary_label=options.binary_label,
        has_lengths=seed is not None and config.bucket_boundaries is not None,
        slots=manifest.slots,
    )
    redraw = None
    if balance is not None:
        name, shares = balance.feature, balance.shares

        def redraw(rows: Rows, seed: Sequence[int]) -> Rows:
            return balance_classes(rows, name, shares, seed)

    return StreamConfig(
        shards=list_shards(source.version_dir, manifest, source.split),
        ranges=source.ranges(options.worker[0]),
        pools=_with_cache(pools, config),
        pool_rows=config.shuffle_buffer,
        interleave=config.interleave_shards if seed is not None else 1,
        batch_size=source.batch_size,
        seed=seed,
        is_exact=config.is_exact and row_filter is None,
        redraw=redraw,
    )


def list_shards(version_dir: Place, manifest: Manifest, split: str) -> tuple[Shard, ...]:
    """The filled shards of a split, as readers take them."""
    compression = WIRE_COMPRESSIONS[manifest.compression]
    return tuple(
        Shard(f"{version_dir}/{shard.path}", shard.rows, shard.crc32c, compression)
        for shard in filled_shards(manifest, split)
    )


def _with_cache(pools: PoolConfig, config: InputConfig) -> PoolConfig:
    if config.cache is None:
        return pools
    wires = [[f.name, f.kind, f.is_list, f.is_sequence] for f in pools.features]
    scope = canonical_json([wires, pools.decoder, pools.record_type, config.on_corrupt])
    directory = None if config.cache_dir is None else Path(config.cache_dir)
    return replace(pools, cache=ShardCache(scope, directory))


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

"""The record stage of a build: makes records of events, writes them, adds the kept partitions."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from conf.dates import DateRange
from conf.encoders import ENCODERS_DIR
from conf.etl.build import BuildConfig
from conf.manifest import FileInfo, Manifest, SplitInfo
from conf.splits import CATALOG, TRAIN, USERS
from etl.encoders.joined_vocabulary import join_vocabularies, plan_joins, read_tokens
from etl.events.most_frequent import add_most_frequent
from etl.features.plan import FeaturePlan
from etl.quality.statistics import merge_statistics, summarize_statistics
from etl.quality.version_view import write_statistics
from etl.records.fitted_encoders import FittedEncoders
from etl.records.kept_partitions import (
    link_shards,
    read_shard_statistics,
    select_kept,
    write_shard_statistics,
)
from etl.records.samples import (
    add_raw_values,
    add_train_folds,
    build_catalog,
    build_users,
    raw_columns,
)
from etl.records.sharding import (
    ShardPlan,
    add_keys,
    assign_shards,
    needs_row_counts,
    plan_from_config,
    plan_from_counts,
)
from etl.records.train_counts import CountsRequest, count_kept, merge_counts, write_counts
from etl.records.write import RecordFormat, VersionShard, estimate_bytes_per_row, write_splits
from etl.sources.source import Source

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


logger = logging.getLogger("sluice.build")

_PARTS_DIR = ".train_counts"
_SERVED_SPLITS = (CATALOG, USERS)
"""Splits that hold what serving knows at the end of the log."""


@dataclass(frozen=True)
class WrittenRecords:
    """What the stage left in the version.

    Attributes:
        splits: All splits, kept partitions included.
        built: The splits without these: what this run has made.
        statistics: Statistics by split and feature, of all records.
        statistics_file: The file with all of them, unabridged.
        reused_rows: Kept records by split; empty where all were built.
        exports: Further files.
        train_counts: Files that count the keys of the train split.
    """

    splits: tuple[SplitInfo, ...]
    built: tuple[SplitInfo, ...]
    statistics: dict[str, dict[str, Any]]
    statistics_file: FileInfo
    reused_rows: Mapping[str, int]
    exports: tuple[FileInfo, ...] = ()
    train_counts: Mapping[str, FileInfo] = field(default_factory=dict)


@dataclass(frozen=True)
class RecordInputs:
    """What records are made of.

    Attributes:
        samples: Rows of the event splits: kept events, and drawn negatives.
        log: Every event, those that are left out with their reason.
        sources: The sources as read.
        newest_ts_ms: Time of the last event; None: events have no time.
    """

    samples: DataFrame
    log: DataFrame
    sources: Mapping[str, Source]
    newest_ts_ms: int | None = None


@dataclass(frozen=True)
class RecordStage:
    """Makes and writes the records.

    Attributes:
        spark: Session.
        config: The build's config.
        plan: Its features.
        staging: Directory of the version.
        dates: Days whose events become samples, or None for all.
    """

    spark: SparkSession
    config: BuildConfig
    plan: FeaturePlan
    staging: Path
    dates: DateRange | None = None

    def write(
        self,
        rows: RecordInputs,
        encoders: FittedEncoders,
        base: tuple[Path, Manifest] | None = None,
    ) -> WrittenRecords:
        """Writes the records, and links the partitions that are kept.

        Args:
            rows: What the records are made of.
            encoders: The encoders.
            base: Version whose other days are kept, or None.
        """
        encoders_dir = self.staging / ENCODERS_DIR
        joined = plan_joins(encoders_dir, encoders.plan, self.config.spark.vocabulary_bytes)
        records_format = RecordFormat(encoders_dir, encoders.plan.schema, self.config, joined)
        keeps_served = base is not None and _ends_before(rows, base[1])
        if keeps_served:
            logger.info(
                "items and users stay as the version before has them: its events reach further"
            )
        made = self._build_records(rows, encoders, with_served=not keeps_served)
        records = add_raw_values(made, self.config, self.plan)
        records = add_train_folds(records, self.config, self.plan)
        keyed = add_keys(records, self.config)
        columns = (*raw_columns(self.plan), *(column.name for column in joined))
        shards = self._plan_shards(keyed, records_format, columns)
        with_ids = join_vocabularies(keyed, joined)
        arranged = assign_shards(with_ids, self.config, columns, shards)
        counts = self._plan_counts(encoders)
        built = write_splits(arranged, records_format, self.staging, shards, counts)
        kept = {} if base is None else self._link(*base, with_served=keeps_served)
        train_counts = self._write_counts(counts, built[TRAIN], kept.get(TRAIN, ()), base)
        written = self._summarize(built, kept)
        return replace(written, train_counts=train_counts)

    def _plan_counts(self, encoders: FittedEncoders) -> CountsRequest:
        parts = self.staging / _PARTS_DIR
        parts.mkdir()
        schema = encoders.plan.schema
        return CountsRequest.build(str(parts), self.plan.keys, schema, self.config.resolved())

    def _write_counts(
        self,
        request: CountsRequest,
        built: Sequence[VersionShard],
        kept: Sequence[VersionShard],
        base: tuple[Path, Manifest] | None,
    ) -> dict[str, FileInfo]:
        """Adds up what the tasks have counted, and what the kept shards hold."""
        files = [request.collect([shard.info for shard in built])]
        if base is not None:
            files.append(count_kept(*base, [shard.info for shard in kept]))
        # An attempt that Spark gave up on may still be leaving files there.
        shutil.rmtree(request.directory, ignore_errors=True)
        return write_counts(self.staging, merge_counts(files))

    def _plan_shards(
        self, keyed: DataFrame, records_format: RecordFormat, columns: Sequence[str]
    ) -> ShardPlan:
        if not needs_row_counts(self.config):
            return plan_from_config(self.config)
        sizes: dict[str, float] = {}
        if self.config.output.shard_bytes is not None:
            sizes = estimate_bytes_per_row(keyed, records_format, columns, self.staging)
        return plan_from_counts(keyed, self.config, sizes)

    def _build_records(
        self, rows: RecordInputs, encoders: FittedEncoders, *, with_served: bool
    ) -> DataFrame:
        config, plan, records = self.config, self.plan, rows.samples
        served = self._served_splits if with_served else ()
        if encoders.items is not None and CATALOG in served:
            directory = self.staging / ENCODERS_DIR
            tokens = read_tokens(self.spark, directory, encoders.items).select("token")
            self._warn_of_unknown_items(rows.sources, tokens)
            catalog = build_catalog(rows.log, config, plan, rows.sources, tokens)
            records = records.unionByName(catalog, allowMissingColumns=True)
        if USERS in served:
            users = build_users(rows.log, config, plan, rows.sources)
            records = records.unionByName(users, allowMissingColumns=True)
        return add_most_frequent(records, config, self.staging / ENCODERS_DIR)

    def _warn_of_unknown_items(self, sources: Mapping[str, Source], tokens: DataFrame) -> None:
        """Says how many items are in lists alone, though events without an entry are dropped."""
        item = self.config.events.item or ""
        shared = [v for v in self.plan.vocabularies if item in v.columns and len(v.columns) > 1]
        for join in self.config.joins if shared else ():
            if join.column != item or join.unmatched != "drop" or join.as_of is not None:
                continue
            key = self.config.sources[join.source].key or ""
            known = sources[join.source].good.select(F.col(key).alias(tokens.columns[0]))
            unknown = tokens.join(known, tokens.columns[0], "left_anti").count()
            if unknown:
                logger.warning(
                    "%d of %d items of the catalogue are in no row of %s: lists of the log name "
                    "them, and they may be recommended without features",
                    unknown, tokens.count(), join.source,
                )  # fmt: skip

    @property
    def _served_splits(self) -> tuple[str, ...]:
        return tuple(split for split in _SERVED_SPLITS if split in self.config.record_splits)

    def _link(
        self, base: Path, manifest: Manifest, *, with_served: bool
    ) -> dict[str, list[VersionShard]]:
        if self.dates is None:
            return {}
        statistics = read_shard_statistics(base)
        selected = select_kept(manifest, self.dates)
        for split in self._served_splits if with_served else ():
            selected[split] = manifest.split(split).shards
        return {
            split: link_shards(base, self.staging, shards, statistics)
            for split, shards in selected.items()
        }

    def _summarize(
        self,
        built: Mapping[str, list[VersionShard]],
        kept: Mapping[str, list[VersionShard]],
    ) -> WrittenRecords:
        together = {
            split: sorted((*built[split], *kept.get(split, ())), key=lambda s: s.info.path)
            if kept
            else built[split]
            for split in built
        }
        unabridged = {
            split: merge_statistics([shard.statistics for shard in shards])
            for split, shards in together.items()
        }
        exports: tuple[FileInfo, ...] = ()
        if self.config.output.partition_by:
            every = [shard for shards in together.values() for shard in shards]
            exports = (write_shard_statistics(self.staging, every),)
        return WrittenRecords(
            splits=_split_infos(together),
            built=_split_infos(built),
            statistics={
                split: summarize_statistics(merged) for split, merged in unabridged.items()
            },
            statistics_file=write_statistics(self.staging, unabridged),
            reused_rows={split: sum(s.info.rows for s in shards) for split, shards in kept.items()},
            exports=exports,
        )


def _ends_before(rows: RecordInputs, base: Manifest) -> bool:
    """Whether a version knows later events: what it serves stands where they end."""
    span = base.source.event_ts_ms_range
    return span is not None and rows.newest_ts_ms is not None and rows.newest_ts_ms < span[1]


def _split_infos(shards: Mapping[str, list[VersionShard]]) -> tuple[SplitInfo, ...]:
    return tuple(SplitInfo(split, tuple(shard.info for shard in shards[split])) for split in shards)

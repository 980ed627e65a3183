"""The records of a version: made of samples, placed in shards, encoded and written in one pass."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.artefacts.train_counts import add_up, find_counted
from conf.dates import DateRange
from conf.encoders import ENCODERS_DIR
from conf.etl.build import BuildConfig
from conf.etl.spark_session import read_vocabulary_bytes
from conf.manifest import FileInfo, Manifest, SplitInfo
from conf.splits import CATALOG, TRAIN, USERS
from etl.encoders.feature_plan import FeaturePlan
from etl.encoders.joined_vocabulary import join_vocabularies, plan_joins
from etl.quality.label_statistics import LabelFocus
from etl.quality.statistics import merge_statistics, summarize_statistics
from etl.quality.version_view import write_statistics
from etl.records.fitted_encoders import FittedEncoders
from etl.records.kept_partitions import link_kept, write_shard_statistics
from etl.records.record_encoder import RecordEncoder
from etl.records.samples import EventRows, build_record_rows, raw_columns
from etl.records.sharding import (
    ShardPlan,
    add_keys,
    assign_shards,
    needs_row_counts,
    plan_from_config,
    plan_from_counts,
)
from etl.records.train_counts import (
    CountedColumns,
    check_rows,
    count_kept,
    merge_files,
    write_counts,
)
from etl.records.write import VersionShard, estimate_bytes_per_row, write_records

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

logger = logging.getLogger("sluice.build")

_COUNTS_DIR = ".train_counts"
_SERVED_SPLITS = (CATALOG, USERS)
"""Splits that hold what serving knows at the end of the log."""
SplitShards = Mapping[str, Sequence[VersionShard]]


@dataclass(frozen=True)
class VersionPlan:
    """What a version is made by, before anything is read.

    Attributes:
        config: The build's config.
        features: Its features.
        staging: Directory of the version.
        dates: Days whose events become samples; None: all.
        base: Version whose other days are kept; None: all is built.
    """

    config: BuildConfig
    features: FeaturePlan
    staging: Path
    dates: DateRange | None = None
    base: tuple[Path, Manifest] | None = None


@dataclass(frozen=True)
class WrittenRecords:
    """What was written.

    Attributes:
        splits: All splits, kept days included.
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


def write_version_records(
    version: VersionPlan, rows: EventRows, encoders: FittedEncoders
) -> WrittenRecords:
    """Writes the records, and links the days that are kept."""
    config, base, staging = version.config, version.base, version.staging
    served = [split for split in _SERVED_SPLITS if split in config.record_splits]
    kept_served = served if _ends_before(rows, base) else []
    if kept_served:
        logger.info("items and users stay as the version before has them: its events reach further")
    made = [split for split in served if split not in kept_served]
    records = build_record_rows(
        rows, config, version.features, encoders.items, made, staging / ENCODERS_DIR
    )
    encoder = _plan_encoder(version, encoders)
    built = _write(version, add_keys(records, config), encoder)
    kept: SplitShards = {}
    if base is not None and version.dates is not None:
        kept = link_kept(base, version.dates, kept_served, staging)
    counts = _write_counts(version, encoder, built[TRAIN], kept.get(TRAIN, ()))
    return _summarize(version, built, kept, counts)


def _ends_before(rows: EventRows, base: tuple[Path, Manifest] | None) -> bool:
    """Whether the base knows later events: what it serves stands where they end."""
    span = None if base is None else base[1].source.event_ts_ms_range
    return span is not None and rows.newest_ts_ms is not None and rows.newest_ts_ms < span[1]


def _plan_encoder(version: VersionPlan, encoders: FittedEncoders) -> RecordEncoder:
    config, schema = version.config, encoders.plan.schema
    lists: tuple[str, ...] = ()
    if config.output.record_type == "SequenceExample":
        every = tuple(spec.name for spec in schema.features if spec.is_list)
        lists = every if config.output.feature_lists is None else config.output.feature_lists
    counts_dir = version.staging / _COUNTS_DIR
    counts_dir.mkdir()
    counted = find_counted(version.features.keys, schema, config.resolved())
    return RecordEncoder(
        encoders=str((version.staging / ENCODERS_DIR).absolute()),
        feature_lists=lists,
        focus=_find_focus(config),
        counted=CountedColumns.build(counted, schema),
        counts_dir=str(counts_dir.absolute()),
        joined=plan_joins(
            version.staging / ENCODERS_DIR, encoders.plan, read_vocabulary_bytes(config.spark)
        ),
    )


def _find_focus(config: BuildConfig) -> LabelFocus | None:
    """The label that statistics compare features with, None where there is none."""
    if config.label_name is None:
        return None
    labels = tuple(
        dict.fromkeys((config.label_name, *(label.name for label in config.further_labels)))
    )
    return LabelFocus(config.label_name, tuple(config.contract.slices), config.weight_name, labels)


def _write(
    version: VersionPlan, keyed: DataFrame, encoder: RecordEncoder
) -> dict[str, list[VersionShard]]:
    config, staging = version.config, version.staging
    columns = (*raw_columns(version.features), *(column.name for column in encoder.joined))
    shards = _plan_shards(version, keyed, encoder, columns)
    rows = assign_shards(join_vocabularies(keyed, encoder.joined), config, columns, shards)
    ranges = [part.files for part in shards.partitions]
    built: dict[str, list[VersionShard]] = {split: [] for split in config.record_splits}
    for shard in write_records(rows, encoder, config.output, staging, ranges):
        built[shard.split].append(shard)
    for split in built:
        (staging / split).mkdir(exist_ok=True)
    return built


def _plan_shards(
    version: VersionPlan, keyed: DataFrame, encoder: RecordEncoder, columns: Sequence[str]
) -> ShardPlan:
    config = version.config
    if not needs_row_counts(config):
        return plan_from_config(config)
    sizes: dict[str, float] = {}
    if config.output.shard_bytes is not None:
        sizes = estimate_bytes_per_row(keyed, columns, encoder, config.output, version.staging)
    return plan_from_counts(keyed, config, sizes)


def _write_counts(
    version: VersionPlan,
    encoder: RecordEncoder,
    built: Sequence[VersionShard],
    kept: Sequence[VersionShard],
) -> Mapping[str, FileInfo]:
    """Adds up what the tasks have counted, and what the kept shards hold."""
    files = [shard.counts_file for shard in built if shard.counts_file is not None]
    counts = merge_files(Path(encoder.counts_dir), files, encoder.counted.keys)
    check_rows(counts, sum(shard.info.rows for shard in built))
    # An attempt that Spark gave up on may still be leaving files there.
    shutil.rmtree(encoder.counts_dir, ignore_errors=True)
    if version.base is not None:
        of_kept = count_kept(*version.base, [shard.info for shard in kept])
        counts = {part: add_up([found, of_kept[part]]) for part, found in counts.items()}
    return write_counts(version.staging, counts)


def _summarize(
    version: VersionPlan, built: SplitShards, kept: SplitShards, counts: Mapping[str, FileInfo]
) -> WrittenRecords:
    together = built
    if kept:
        together = {
            split: sorted((*built[split], *kept.get(split, ())), key=lambda shard: shard.info.path)
            for split in built
        }
    unabridged = {
        split: merge_statistics([shard.statistics for shard in shards])
        for split, shards in together.items()
    }
    exports: tuple[FileInfo, ...] = ()
    if version.config.output.partition_by:
        every = [shard for shards in together.values() for shard in shards]
        exports = (write_shard_statistics(version.staging, every),)
    return WrittenRecords(
        splits=_split_infos(together),
        built=_split_infos(built),
        statistics={split: summarize_statistics(merged) for split, merged in unabridged.items()},
        statistics_file=write_statistics(version.staging, unabridged),
        reused_rows={split: sum(s.info.rows for s in shards) for split, shards in kept.items()},
        exports=exports,
        train_counts=counts,
    )


def _split_infos(shards: SplitShards) -> tuple[SplitInfo, ...]:
    return tuple(SplitInfo(split, tuple(shard.info for shard in shards[split])) for split in shards)

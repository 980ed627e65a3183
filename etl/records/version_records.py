"""The records of a version: made of samples, placed in shards, encoded and written in one pass.

A run may build the given days alone: the shards of the others are hard-linked from the version
before, so that either version may be removed without the other noticing, and readers find every
file below the version.
"""

from __future__ import annotations

import gzip
import json
import logging
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from conf.artefacts.train_counts import KeyCounts, add_up, find_counted
from conf.dates import DateRange
from conf.etl.build import BuildConfig
from conf.etl.output import DATE_PARTITION, OutputConfig
from conf.etl.spark_session import read_vocabulary_bytes
from conf.manifest import FileInfo, Manifest, ShardInfo, SplitInfo
from conf.splits import ALL_SPLITS, CATALOG, EVENT_SPLITS, TRAIN, USERS
from conf.storage.atomic_output import link_file, sync_directory, write_bytes_atomic
from conf.storage.locations import Compression
from etl.encoders.joined_vocabulary import join_vocabularies, plan_joins
from etl.events.columns import SPLIT_COLUMN
from etl.quality.label_statistics import LabelFocus
from etl.quality.statistics import merge_statistics, summarize_statistics
from etl.quality.version_view import write_statistics
from etl.records.fitted_encoders import FittedEncoders
from etl.records.jvm_connector import write_by_connector
from etl.records.record_encoder import TASK_COUNTS_DIR, RecordEncoder
from etl.records.samples import EventRows, VersionPlan, build_record_rows, raw_columns
from etl.records.sharding import (
    HASH_COLUMN,
    Partition,
    PartitionShards,
    add_keys,
    assign_shards,
    list_partitions,
    plan_shards,
)
from etl.records.train_counts import (
    CountedColumns,
    count_kept,
    merge_task_counts,
    write_counts,
)
from etl.tfrecord.codec.crc32c import describe_file, read_described
from etl.tfrecord.files.data_files import ShardRange, parse_partition_path
from etl.tfrecord.spark.options import WriteOptions
from etl.tfrecord.spark.write_job import plan_write, run_write

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

logger = logging.getLogger("sluice.build")

SHARD_STATISTICS_FILE = "shard_statistics.json.gz"
SAMPLE_ROWS = 4096
"""Records per split that are written to estimate their size, about."""
_SAMPLE_DIR = "sample"
_COMPRESSIONS: Mapping[str | None, Compression] = {"gzip": "GZIP", "zlib": "ZLIB"}


@dataclass(frozen=True)
class VersionShard:
    """A shard of the version, with statistics of its features, which merge.

    `counts` names what a task has counted of it; None: it is not counted.
    """

    info: ShardInfo
    statistics: Mapping[str, Any]
    counts: str | None = None

    @property
    def split(self) -> str:
        """The split that holds it."""
        return self.info.path.partition("/")[0]


SplitShards = Mapping[str, Sequence[VersionShard]]


@dataclass(frozen=True)
class WrittenRecords:
    """What was written, in this run and in those whose days are kept."""

    built: Mapping[str, int]  # rows by split that this run has made
    reused: Mapping[str, int]  # kept rows by split; empty where all were built
    splits: tuple[SplitInfo, ...]
    statistics: dict[str, dict[str, Any]]  # by split and feature
    files: dict[str, Any]  # the manifest's fields of further files


def write_version_records(
    version: VersionPlan, rows: EventRows, encoders: FittedEncoders
) -> WrittenRecords:
    """Writes the records, and links the days that are kept."""
    config, base = version.config, version.base
    served = [split for split in (CATALOG, USERS) if split in config.record_splits]
    taken = served if _ends_before(rows, base) else []
    if taken:
        logger.info("items and users stay as the version before has them: its events reach further")
    made = [split for split in served if split not in taken]
    records = build_record_rows(version, rows, encoders.items, made)
    encoder = _plan_encoder(version, encoders)
    built = _write(version, add_keys(records, config), encoder)
    kept: SplitShards = {}
    if base is not None and version.dates is not None:
        kept = _link_kept(base, version.dates, taken, version.staging)
    counts = _merge_counts(version, encoder, built[TRAIN], kept.get(TRAIN, ()))
    return _summarize(version, built, kept, write_counts(version.staging, counts))


def _ends_before(rows: EventRows, base: tuple[Path, Manifest] | None) -> bool:
    """Whether the base knows later events: what it serves stands where they end."""
    span = None if base is None else base[1].source.event_ts_ms_range
    return span is not None and rows.newest_ts_ms is not None and rows.newest_ts_ms < span[1]


def _plan_encoder(version: VersionPlan, encoders: FittedEncoders) -> RecordEncoder:
    config, plan, staging = version.config, encoders.plan, version.staging
    lists: tuple[str, ...] = ()
    if config.output.record_type == "SequenceExample":
        every = tuple(spec.name for spec in plan.schema.features if spec.is_list)
        lists = every if config.output.feature_lists is None else config.output.feature_lists
    (staging / TASK_COUNTS_DIR).mkdir()
    counted = find_counted(version.features.keys, plan.schema, config.resolved())
    return RecordEncoder(
        version=staging,
        feature_lists=lists,
        focus=_find_focus(config),
        counted=CountedColumns.build(counted, plan.schema),
        joined=plan_joins(version.encoders, plan, read_vocabulary_bytes(config.spark)),
    )


def _find_focus(config: BuildConfig) -> LabelFocus | None:
    """The label that statistics compare features with, None where there is none."""
    label = config.label_name
    if label is None:
        return None
    labels = dict.fromkeys((label, *(further.name for further in config.further_labels)))
    return LabelFocus(label, tuple(config.contract.slices), config.weight_name, tuple(labels))


def _write(
    version: VersionPlan, keyed: DataFrame, encoder: RecordEncoder
) -> dict[str, list[VersionShard]]:
    config = version.config
    columns = (*raw_columns(version.features), *(column.name for column in encoder.joined))
    shards = _plan_shards(config, keyed, encoder, columns)
    rows = assign_shards(join_vocabularies(keyed, encoder.joined), config, columns, shards)
    ranges = [own.files for own in shards]
    built: dict[str, list[VersionShard]] = {split: [] for split in config.record_splits}
    for shard in _write_records(rows, encoder, config.output, ranges):
        built[shard.split].append(shard)
    for split in built:
        (version.staging / split).mkdir(exist_ok=True)
    return built


def _plan_shards(
    config: BuildConfig, keyed: DataFrame, encoder: RecordEncoder, columns: Sequence[str]
) -> list[PartitionShards]:
    parts, sizes = list_partitions(keyed, config), dict[str, float]()
    if config.output.shard_bytes is not None:
        sizes = _estimate_bytes(keyed, columns, encoder, config.output, parts)
    return plan_shards(keyed, config, parts, sizes)


def _estimate_bytes(
    keyed: DataFrame,
    columns: Sequence[str],
    encoder: RecordEncoder,
    output: OutputConfig,
    parts: Iterable[Partition],
) -> dict[str, float]:
    """Estimates the stored bytes of a record, by split.

    The sample is chosen by a hash of the content and written as one shard per split: the same
    records give the same estimate, however they are partitioned.
    """
    sample = join_vocabularies(_choose_sample(keyed, parts), encoder.joined)
    place = F.array_position(F.array(*map(F.lit, ALL_SPLITS)), F.col(SPLIT_COLUMN)) - 1
    placed = sample.repartitionById(len(ALL_SPLITS), place.cast("int"))
    ordered = placed.sortWithinPartitions(HASH_COLUMN).select(*columns)
    target, ranges = encoder.version / _SAMPLE_DIR, [ShardRange("", 0, len(ALL_SPLITS))]
    try:
        entries = _write_natively(ordered, encoder, output, target, ranges)
    finally:
        shutil.rmtree(target, ignore_errors=True)
    sizes = {ALL_SPLITS[e["partition"]]: e["bytes"] / e["rows"] for e in entries}
    logger.info(
        "bytes per record, from a sample: %s",
        ", ".join(f"{name} {size:.0f}" for name, size in sizes.items()),
    )
    # A split too small for the sample to have met it has one shard whatever its records take.
    return {name: sizes.get(name, 0.0) for name in ALL_SPLITS}


def _choose_sample(keyed: DataFrame, parts: Iterable[Partition]) -> DataFrame:
    rows = dict.fromkeys(ALL_SPLITS, 0)
    for part in parts:
        rows[part.split] += part.rows
    # Hashed again: a record's shard follows from the hash itself.
    again, chosen = F.xxhash64(F.col(HASH_COLUMN)), F.lit(False)
    for split, count in rows.items():
        is_chosen = F.pmod(again, F.lit(max(1, count // SAMPLE_ROWS))) == 0
        chosen = F.when(F.col(SPLIT_COLUMN) == split, is_chosen).otherwise(chosen)
    return keyed.where(chosen)


def _write_records(
    rows: DataFrame, encoder: RecordEncoder, output: OutputConfig, ranges: Sequence[ShardRange]
) -> list[VersionShard]:
    """Encodes rows and writes one shard per Spark partition that holds any."""
    if output.writer == "connector":
        entries = write_by_connector(rows, encoder, output.compression, ranges)
    else:
        entries = _write_natively(rows, encoder, output, encoder.version, ranges)
    return [
        VersionShard(
            ShardInfo(entry["path"], entry["rows"], entry["bytes"], entry["crc32c"]),
            entry["statistics"]["features"],
            entry["statistics"]["train_counts"],
        )
        for entry in entries
    ]


def _write_natively(
    rows: DataFrame,
    encoder: RecordEncoder,
    output: OutputConfig,
    target: Path,
    ranges: Sequence[ShardRange],
) -> list[dict[str, Any]]:
    options = WriteOptions(
        directory=str(target),
        mode="overwrite",
        record_type=output.record_type,
        compression=_COMPRESSIONS.get(output.compression),
        deterministic_names=True,
        shard_ranges=tuple(ranges),
    )
    written = run_write(rows, plan_write(rows.schema, options, encoder))
    return [] if written is None else [vars(shard) for shard in written.shards]


def _link_kept(
    base: tuple[Path, Manifest], dates: DateRange, whole: Sequence[str], staging: Path
) -> dict[str, list[VersionShard]]:
    """Links the shards of other days, and of whole splits, into the version that is built."""
    folder, manifest = base
    replaced = {str(day) for day in dates.days()}
    [listed] = manifest.exports
    statistics = json.loads(gzip.decompress(read_described(folder, listed)))
    kept: dict[str, list[VersionShard]] = {}
    for split in manifest.splits:
        shards: Sequence[ShardInfo] = split.shards
        if split.name in EVENT_SPLITS:
            shards = [shard for shard in shards if _day_of(shard.path) not in replaced]
        elif split.name not in whole:
            continue
        _link(folder, staging, [shard.path for shard in shards])
        kept[split.name] = [VersionShard(shard, statistics[shard.path]) for shard in shards]
    return kept


def _day_of(path: str) -> str | None:
    return parse_partition_path(path.rpartition("/")[0]).get(DATE_PARTITION)


def _link(base: Path, staging: Path, paths: Sequence[str]) -> None:
    for path in paths:
        (staging / path).parent.mkdir(parents=True, exist_ok=True)
        link_file(base / path, staging / path)
    for folder in {(staging / path).parent for path in paths}:
        sync_directory(folder)


def _merge_counts(
    version: VersionPlan,
    encoder: RecordEncoder,
    built: Sequence[VersionShard],
    kept: Sequence[VersionShard],
) -> KeyCounts:
    """Adds up what the tasks have counted, and what the kept shards hold."""
    directory = encoder.version / TASK_COUNTS_DIR
    names = [shard.counts for shard in built if shard.counts is not None]
    counts = merge_task_counts(directory, names, encoder.counted.keys)
    # An attempt that Spark gave up on may still be leaving files there.
    shutil.rmtree(directory, ignore_errors=True)
    if version.base is None:
        return counts
    of_kept = count_kept(*version.base, [shard.info for shard in kept])
    return {part: add_up([found, of_kept[part]]) for part, found in counts.items()}


def _summarize(
    version: VersionPlan, built: SplitShards, kept: SplitShards, counts: Mapping[str, FileInfo]
) -> WrittenRecords:
    together = {
        split: sorted((*shards, *kept.get(split, ())), key=lambda shard: shard.info.path)
        for split, shards in built.items()
    }
    unabridged = {
        split: merge_statistics([shard.statistics for shard in shards])
        for split, shards in together.items()
    }
    files: dict[str, Any] = {"train_counts": counts}
    files["statistics_file"] = write_statistics(version.staging, unabridged)
    if version.config.output.partition_by:
        files["exports"] = (_write_shard_statistics(version.staging, together),)
    return WrittenRecords(
        built=_count_rows(built),
        reused=_count_rows(kept),
        splits=tuple(
            SplitInfo(split, tuple(shard.info for shard in shards))
            for split, shards in together.items()
        ),
        statistics={split: summarize_statistics(merged) for split, merged in unabridged.items()},
        files=files,
    )


def _count_rows(shards: SplitShards) -> dict[str, int]:
    return {split: sum(shard.info.rows for shard in listed) for split, listed in shards.items()}


def _write_shard_statistics(staging: Path, shards: SplitShards) -> FileInfo:
    """Writes what a later version needs to merge these shards with its own."""
    path = staging / SHARD_STATISTICS_FILE
    # In the order of the features, which merging compares.
    every = (shard for listed in shards.values() for shard in listed)
    data = json.dumps({shard.info.path: shard.statistics for shard in every})
    write_bytes_atomic(path, gzip.compress(data.encode(), mtime=0))
    return describe_file(staging, path)

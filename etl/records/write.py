"""The write of every split: one pass that encodes and writes, and the shards that it leaves.

Where shards have a target size, the bytes of a record are estimated from a sample that is
written as the records will be.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from conf.etl.build import BuildConfig
from conf.manifest import ShardInfo
from conf.schema import FeatureSchema
from conf.splits import ALL_SPLITS
from conf.storage.locations import Compression
from etl.events.columns import SPLIT_COLUMN
from etl.quality.label_statistics import LabelFocus
from etl.records.jvm_connector import ConnectorWrite
from etl.records.record_hooks import RecordHooks
from etl.records.sharding import HASH_COLUMN, ShardPlan
from etl.records.train_counts import CountsRequest
from etl.tfrecord.files.data_files import ShardRange
from etl.tfrecord.spark.options import WriteOptions
from etl.tfrecord.spark.write_job import plan_write, run_write

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


_COMPRESSIONS: Mapping[str | None, Compression | None] = {
    None: None, "gzip": "GZIP", "zlib": "ZLIB",
}  # fmt: skip


@dataclass(frozen=True)
class VersionShard:
    """A shard in the version, and the statistics of its features, which merge."""

    info: ShardInfo
    statistics: Mapping[str, Any]


@dataclass(frozen=True)
class RecordFormat:
    """How records become shards.

    Attributes:
        encoders: Directory of the fitted encoders.
        schema: Features of the records.
        config: The build's config; its `output` says the rest.
    """

    encoders: Path
    schema: FeatureSchema
    config: BuildConfig

    @property
    def feature_lists(self) -> tuple[str, ...]:
        """Features that go into the feature lists of a SequenceExample."""
        output = self.config.output
        if output.record_type != "SequenceExample":
            return ()
        lists = tuple(spec.name for spec in self.schema.features if spec.is_list)
        return lists if output.feature_lists is None else output.feature_lists


def write_splits(
    records: DataFrame,
    records_format: RecordFormat,
    staging: Path,
    plan: ShardPlan,
    counts: CountsRequest,
) -> dict[str, list[VersionShard]]:
    """Writes the shards of every split.

    Args:
        records: Raw columns, partitioned by shard (`etl.records.sharding`).
        records_format: How records become shards.
        staging: Directory of the version, which gets a folder per split.
        plan: The shards.
        counts: What is counted of the train split.

    Returns:
        The shards that hold records, by split, in the order of their Spark partitions.
    """
    config = records_format.config
    write = _write_by_connector if config.output.writer == "connector" else write_natively
    ranges = [part.files for part in plan.partitions]
    entries = write(records, records_format, staging, ranges, counts)
    written: dict[str, list[VersionShard]] = {split: [] for split in config.record_splits}
    for split in written:
        (staging / split).mkdir(exist_ok=True)
    for entry in sorted(entries, key=lambda entry: int(entry["partition"])):
        info = ShardInfo(entry["path"], entry["rows"], entry["bytes"], entry["crc32c"])
        split = info.path.partition("/")[0]
        written[split].append(VersionShard(info, entry["statistics"]))
    return written


def write_natively(
    records: DataFrame,
    records_format: RecordFormat,
    target: Path,
    ranges: Sequence[ShardRange],
    counts: CountsRequest | None = None,
) -> list[dict[str, Any]]:
    """Writes one shard per partition that holds records.

    Args:
        records: Raw columns, partitioned by shard.
        records_format: How records become shards.
        target: Directory that nobody reads yet.
        ranges: Where the shards go below it.
        counts: What is counted of the train split; None: nothing.

    Returns:
        One entry per shard: `path` (relative to the target), `rows`, `bytes`, `crc32c`,
        `partition`, `statistics`.
    """
    output, encoders = records_format.config.output, str(records_format.encoders.absolute())
    focus = _find_focus(records_format.config)
    options = WriteOptions(
        directory=str(target.absolute()),
        mode="overwrite",
        record_type=output.record_type,
        compression=_COMPRESSIONS[output.compression],
        deterministic_names=True,
        shard_ranges=tuple(ranges),
    )
    hooks = RecordHooks(encoders, records_format.feature_lists, focus, counts)
    plan = plan_write(records.schema, options, hooks)
    written = run_write(records, plan)
    return [] if written is None else [vars(shard) for shard in written.shards]


def _find_focus(config: BuildConfig) -> LabelFocus | None:
    """The label that statistics compare features with, None where there is none."""
    if config.label_name is None:
        return None
    labels = tuple(
        dict.fromkeys((config.label_name, *(label.name for label in config.further_labels)))
    )
    return LabelFocus(config.label_name, tuple(config.contract.slices), config.weight_name, labels)


def _write_by_connector(
    records: DataFrame,
    records_format: RecordFormat,
    target: Path,
    ranges: Sequence[ShardRange],
    counts: CountsRequest,
) -> list[dict[str, Any]]:
    config, encoders = records_format.config, str(records_format.encoders)
    compression = config.output.compression
    write = ConnectorWrite(encoders, compression, _find_focus(config), tuple(ranges), counts)
    return write.write(records, target)


logger = logging.getLogger("sluice.build")

SAMPLE_ROWS = 4096
"""Records per split that are written, about."""
_SAMPLE_DIR = "sample"


def estimate_bytes_per_row(
    keyed: DataFrame, records_format: RecordFormat, columns: Sequence[str], staging: Path
) -> dict[str, float]:
    """Estimates the stored bytes of a record, by split.

    The sample is chosen by a hash of the content and written as one shard per split: the same
    records give the same estimate, however they are partitioned.

    Args:
        keyed: Records with their keys.
        records_format: How records become shards.
        columns: Raw columns of the features.
        staging: Where a folder for the sample may be made.
    """
    counts = _count(keyed)
    sample = keyed.where(_is_sampled(counts))
    split = F.lit(None).cast("int")
    for place, name in enumerate(ALL_SPLITS):
        split = F.when(F.col(SPLIT_COLUMN) == name, F.lit(place)).otherwise(split)
    placed = sample.withColumn("__place", split).repartitionById(len(ALL_SPLITS), F.col("__place"))
    ordered = placed.sortWithinPartitions(HASH_COLUMN).select(*columns)
    target = staging / _SAMPLE_DIR
    try:
        ranges = [ShardRange("", 0, len(ALL_SPLITS))]
        entries = write_natively(ordered, records_format, target, ranges)
    finally:
        shutil.rmtree(target, ignore_errors=True)
    sizes = {ALL_SPLITS[e["partition"]]: e["bytes"] / e["rows"] for e in entries}
    logger.info(
        "bytes per record, from a sample: %s",
        ", ".join(f"{name} {size:.0f}" for name, size in sizes.items()),
    )
    # A split too small for the sample to have met it has one shard whatever its records take.
    return {name: sizes.get(name, 0.0) for name in ALL_SPLITS}


def _count(keyed: DataFrame) -> dict[str, int]:
    rows = keyed.groupBy(SPLIT_COLUMN).count().collect()
    return {row[SPLIT_COLUMN]: row["count"] for row in rows}


def _is_sampled(counts: Mapping[str, int]) -> Column:
    # Hashed again: a record's shard follows from the hash itself.
    again = F.xxhash64(F.col(HASH_COLUMN))
    chosen = F.lit(False)
    for split, rows in counts.items():
        step = max(1, rows // SAMPLE_ROWS)
        chosen = F.when(F.col(SPLIT_COLUMN) == split, F.pmod(again, F.lit(step)) == 0).otherwise(
            chosen
        )
    return chosen

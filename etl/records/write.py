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

from conf.etl.output import OutputConfig
from conf.manifest import ShardInfo
from conf.splits import ALL_SPLITS
from conf.storage.locations import Compression
from etl.encoders.joined_vocabulary import join_vocabularies
from etl.events.columns import SPLIT_COLUMN
from etl.records.jvm_connector import write_by_connector
from etl.records.record_encoder import RecordEncoder
from etl.records.sharding import HASH_COLUMN
from etl.tfrecord.files.data_files import ShardRange
from etl.tfrecord.spark.options import WriteOptions
from etl.tfrecord.spark.write_job import plan_write, run_write

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

logger = logging.getLogger("sluice.build")

_COMPRESSIONS: Mapping[str | None, Compression | None] = {
    None: None, "gzip": "GZIP", "zlib": "ZLIB",
}  # fmt: skip
SAMPLE_ROWS = 4096
"""Records per split that are written to estimate their size, about."""
_SAMPLE_DIR = "sample"


@dataclass(frozen=True)
class VersionShard:
    """A shard of the version.

    Attributes:
        info: Path, rows, bytes and checksum.
        statistics: Of its features; they merge.
        counts_file: File with its train counts, in the write's folder of counts; None: not counted.
    """

    info: ShardInfo
    statistics: Mapping[str, Any]
    counts_file: str | None = None

    @property
    def split(self) -> str:
        """The split that holds it."""
        return self.info.path.partition("/")[0]


def write_records(
    rows: DataFrame,
    encoder: RecordEncoder,
    output: OutputConfig,
    target: Path,
    ranges: Sequence[ShardRange],
) -> list[VersionShard]:
    """Encodes rows and writes one shard per Spark partition that holds any.

    Args:
        rows: Raw columns, partitioned by shard (`etl.records.sharding`).
        encoder: How rows become records.
        output: The output of the config.
        target: Directory that nobody reads yet.
        ranges: Where the shards go below it.

    Returns:
        The shards in the order of their Spark partitions.
    """
    if output.writer == "connector":
        entries = write_by_connector(rows, encoder, output.compression, target, ranges)
    else:
        entries = _write_natively(rows, encoder, output, target, ranges)
    return [
        VersionShard(
            ShardInfo(entry["path"], entry["rows"], entry["bytes"], entry["crc32c"]),
            entry["statistics"]["features"],
            entry["statistics"]["train_counts"],
        )
        for entry in sorted(entries, key=lambda entry: int(entry["partition"]))
    ]


def _write_natively(
    rows: DataFrame,
    encoder: RecordEncoder,
    output: OutputConfig,
    target: Path,
    ranges: Sequence[ShardRange],
) -> list[dict[str, Any]]:
    options = WriteOptions(
        directory=str(target.absolute()),
        mode="overwrite",
        record_type=output.record_type,
        compression=_COMPRESSIONS[output.compression],
        deterministic_names=True,
        shard_ranges=tuple(ranges),
    )
    written = run_write(rows, plan_write(rows.schema, options, encoder))
    return [] if written is None else [vars(shard) for shard in written.shards]


def estimate_bytes_per_row(
    keyed: DataFrame,
    columns: Sequence[str],
    encoder: RecordEncoder,
    output: OutputConfig,
    staging: Path,
) -> dict[str, float]:
    """Estimates the stored bytes of a record, by split.

    The sample is chosen by a hash of the content and written as one shard per split: the same
    records give the same estimate, however they are partitioned.
    """
    counts = {r[SPLIT_COLUMN]: r["count"] for r in keyed.groupBy(SPLIT_COLUMN).count().collect()}
    sample = join_vocabularies(keyed.where(_is_sampled(counts)), encoder.joined)
    split = F.lit(None).cast("int")
    for place, name in enumerate(ALL_SPLITS):
        split = F.when(F.col(SPLIT_COLUMN) == name, F.lit(place)).otherwise(split)
    placed = sample.withColumn("__place", split).repartitionById(len(ALL_SPLITS), F.col("__place"))
    ordered = placed.sortWithinPartitions(HASH_COLUMN).select(*columns)
    target, ranges = staging / _SAMPLE_DIR, [ShardRange("", 0, len(ALL_SPLITS))]
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

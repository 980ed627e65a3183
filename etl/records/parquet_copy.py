"""The encoded records as Parquet, shard by shard, and files as the manifest lists them.

Runs in executors: without pydantic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from conf.manifest import FileInfo
from conf.storage.atomic_output import atomic_file
from etl.tfrecord.codec.crc32c import describe_file
from etl.tfrecord.types.features import RecordType, WireFeature

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


PARQUET_DIR = "parquet"


@dataclass(frozen=True)
class ParquetExport:
    """What is exported.

    Attributes:
        version: Directory of the version.
        features: Features of the records.
        record_type: Record type of the shards.
    """

    version: str
    features: tuple[WireFeature, ...]
    record_type: RecordType


def export_parquet(
    spark: SparkSession, export: ParquetExport, shards: Sequence[str]
) -> tuple[FileInfo, ...]:
    """Writes one Parquet file per shard, with the same rows in the same order.

    The executors read the shards back, so that the file holds what a reader of the shard gets.

    Args:
        spark: Session.
        export: What is exported.
        shards: Paths of the shards, relative to the version.

    Returns:
        The files, `parquet/<split>/…`.
    """
    for folder in {parquet_path(shard).rpartition("/")[0] for shard in shards}:
        (Path(export.version) / folder).mkdir(parents=True, exist_ok=True)
    if not shards:
        return ()
    paths = spark.sparkContext.parallelize(list(shards), len(shards))
    return tuple(paths.map(lambda shard: write_parquet(export, shard)).collect())


def parquet_path(shard: str) -> str:
    """Path of the Parquet file that belongs to a shard."""
    return f"{PARQUET_DIR}/{shard.rpartition('.tfrecord')[0]}.parquet"


def write_parquet(export: ParquetExport, shard: str) -> FileInfo:
    """Writes one shard as Parquet; the file appears whole or not at all.

    Raises:
        CorruptRecordError: The shard is damaged.
        OSError: The file cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from etl.tfrecord.codec.decode import build_decoder, read_batches
    from etl.tfrecord.types.conversions import flatten_lists

    root = Path(export.version)
    target = root / parquet_path(shard)
    features, record_type = export.features, export.record_type
    # Feature lists of one value per step are lists again, as in the other record type.
    lists = [feature.name for feature in features if feature.is_sequence]
    empty = pa.RecordBatch.from_pylist([], schema=build_decoder(features, record_type).schema)
    schema = flatten_lists(empty, lists).schema
    with atomic_file(target) as unfinished, pq.ParquetWriter(unfinished, schema) as writer:
        for batch in read_batches(root / shard, features, record_type=record_type):
            writer.write_batch(flatten_lists(batch, lists))
    return describe_file(root, target)

"""The JVM connector `spark-tfrecord` as a back end of a build, where it is on the class path."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from conf.errors import ConfigError, InternalError
from conf.local_paths import is_hidden
from conf.storage.atomic_output import atomic_file
from conf.storage.locations import Compression
from etl.encoders.pipeline import read_pipeline
from etl.quality.label_statistics import LabelFocus
from etl.quality.raw_statistics import RawAccumulator
from etl.quality.statistics import StatisticsAccumulator
from etl.records.train_counts import CountsRequest, ShardCounts
from etl.tfrecord.codec.crc32c import describe_file
from etl.tfrecord.codec.decode import build_decoder
from etl.tfrecord.codec.framing import read_record_blocks
from etl.tfrecord.files.data_files import ShardRange, find_stem, make_folders
from etl.tfrecord.types.features import Kind, WireFeature

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

CONNECTOR_CLASS = "com.linkedin.spark.datasources.tfrecord.DefaultSource"
CONNECTOR_PACKAGE = "com.linkedin.sparktfrecord:spark-tfrecord_2.13:0.7.0"
GZIP_CODEC = "org.apache.hadoop.io.compress.GzipCodec"

_PART = re.compile(r"part-(\d+)-")


def has_connector(spark: SparkSession) -> bool:
    """Whether the connector's class is on the session's class path."""
    from py4j.protocol import Py4JJavaError

    jvm: Any = spark.sparkContext._jvm
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    try:
        # Looked up by the constructor's name only: nothing of the class runs here.
        jvm.java.lang.Class.forName(CONNECTOR_CLASS, False, loader)
    except Py4JJavaError:
        return False
    return True


def check_connector(spark: SparkSession) -> None:
    """Refuses a session that cannot write by the connector.

    Raises:
        ConfigError: Its class is not on the class path.
    """
    if not has_connector(spark):
        raise ConfigError(
            "output.writer is `connector`, but the connector is not on Spark's class path",
            received=f"no class {CONNECTOR_CLASS}",
            allowed="output.writer: native, or a session that loads the connector's jar",
            fix="add `spark: {conf: {spark.jars.packages: "
            f"'{CONNECTOR_PACKAGE}'}}}}` to the config (spark.jars takes a file; under "
            "spark-submit it is --packages or --jars), or set output.writer: native",
        )


@dataclass(frozen=True)
class ConnectorWrite:
    """How records are written by the connector.

    Attributes:
        directory: Output directory, which must not exist.
        encoders: Directory of the fitted encoders.
        compression: Compression of the shards, or None.
        focus: The label that the statistics compare features with, or None.
        ranges: Where the shards go in the version.
        counts: What is counted of the train split; None: nothing.
        raw_directory: Directory, there already, for what is known of the raw columns; None: they
            have no statistics.
    """

    directory: str
    encoders: str
    compression: Compression | None
    focus: LabelFocus | None = None
    ranges: tuple[ShardRange, ...] = ()
    counts: CountsRequest | None = None
    raw_directory: str | None = None

    def open_counts(self, partition: int) -> ShardCounts | None:
        """Returns what counts the shard of a partition, or None where nothing of it is counted."""
        return None if self.counts is None else self.counts.open(find_stem(self.ranges, partition))

    def raw_file(self, partition: int) -> Path | None:
        """Where the raw statistics of a partition go, or None where none are kept."""
        return None if self.raw_directory is None else Path(self.raw_directory, f"{partition}.json")


@dataclass(frozen=True)
class _GatheredRaw:
    """Raw statistics that were gathered before the connector wrote; its files hold features."""

    found: dict[str, dict[str, Any]]

    def update(self, source: pa.RecordBatch, records: pa.RecordBatch) -> None:
        """Nothing is added: all rows are in."""

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Returns the statistics by feature."""
        return self.found


def write_with_connector(records: DataFrame, write: ConnectorWrite) -> list[dict[str, Any]]:
    """Encodes records in Python, writes them by the connector, and reads back what it wrote.

    Each partition becomes one shard in the partition's order, as with the native writer; an empty
    one leaves no shard.

    Args:
        records: Raw columns, partitioned by shard and sorted within.
        write: Where and how.

    Returns:
        One entry per shard: `path` (relative to the directory), `rows`, `bytes`, `crc32c`,
        `partition`, `statistics`.

    Raises:
        InternalError: The connector's files are not one per partition.
    """
    from pyspark.sql.pandas.types import from_arrow_schema

    schema = read_pipeline(write.encoders).output_schema

    def encode(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return _encode(batches, write)

    # By its class name: the short name may belong to another source.
    writer = (
        records.mapInArrow(encode, from_arrow_schema(schema))
        .write.format(CONNECTOR_CLASS)
        .mode("errorifexists")
        .option("recordType", "Example")
        .option("maxRecordsPerFile", 0)
    )
    if write.compression is not None:
        writer = writer.option("codec", GZIP_CODEC)
    writer.save(write.directory)
    return _summarize(records.sparkSession, write, schema)


def _encode(batches: Iterator[pa.RecordBatch], write: ConnectorWrite) -> Iterator[pa.RecordBatch]:
    """Encodes a partition, and leaves what is known of its raw columns in a file."""
    from pyspark import TaskContext

    pipeline, context = read_pipeline(write.encoders), TaskContext.get()
    raw = RawAccumulator(pipeline.plan, pipeline.output_schema.names)
    for batch in batches:
        records = pipeline.apply(batch)
        raw.update(batch, records)
        yield records
    file = None if context is None else write.raw_file(context.partitionId())
    if file is not None:
        with atomic_file(file, durable=False) as target:
            target.write_text(json.dumps(raw.to_dict()), encoding="utf-8")


def _summarize(
    spark: SparkSession, write: ConnectorWrite, schema: pa.Schema
) -> list[dict[str, Any]]:  # fmt: skip
    """Reads every file back, in Spark, for what the manifest says about it."""
    files = find_parts(Path(write.directory))
    features, compression, focus = wire_features(schema), write.compression, write.focus
    pairs = [(partition, str(path)) for partition, path in sorted(files.items())]
    if not pairs:
        return []

    def inspect(pair: tuple[int, str]) -> dict[str, Any]:
        file = write.raw_file(pair[0])
        return summarize_file(
            *pair,
            features,
            compression,
            focus,
            counts=write.open_counts(pair[0]),
            # Of a partition without rows, the connector may leave a file all the same.
            raw=None if file is None or not file.is_file() else json.loads(file.read_text("utf-8")),
        )

    entries = spark.sparkContext.parallelize(pairs, len(pairs)).map(inspect).collect()
    return [entry for entry in entries if entry["rows"]]


def find_parts(directory: Path) -> dict[int, Path]:
    """The connector's files by the Spark partition that each came from.

    Raises:
        InternalError: A file's name does not tell, or a partition has several.
    """
    parts: dict[int, Path] = {}
    for path in sorted(directory.iterdir()):
        if is_hidden(path.name):
            continue
        match = _PART.match(path.name)
        partition = int(match[1]) if match else -1
        if partition < 0 or partition in parts:
            raise InternalError(
                "the connector's files are not one per partition",
                received=path.name,
                allowed="part-NNNNN-… once per partition",
                fix="set output.writer: native",
            )
        parts[partition] = path
    return parts


def move_shards(
    entries: Sequence[Mapping[str, Any]],
    directory: Path,
    target: Path,
    ranges: Sequence[ShardRange],
) -> list[dict[str, Any]]:
    """Moves the connector's files to their places in the version.

    Args:
        entries: What `write_with_connector` returned.
        directory: Where it wrote.
        target: Directory of the version.
        ranges: Where the shards go below it.

    Returns:
        The entries, their paths relative to the target.
    """
    moved = []
    for entry in entries:
        # From the extension on: a name may hold other dots.
        suffix = ".tfrecord" + entry["path"].rpartition(".tfrecord")[2]
        path = find_stem(ranges, entry["partition"]) + suffix
        make_folders(target, [path])
        (directory / entry["path"]).rename(target / path)
        moved.append({**entry, "path": path})
    return moved


def wire_features(schema: pa.Schema) -> tuple[WireFeature, ...]:
    """Features that encoded columns become on the wire."""
    features = []
    for field in schema:
        is_list = pa.types.is_list(field.type)
        value_type = field.type.value_type if is_list else field.type
        kind: Kind = "bytes"
        if pa.types.is_integer(value_type):
            kind = "int64"
        elif pa.types.is_floating(value_type):
            kind = "float32"
        features.append(WireFeature(field.name, kind, is_list))
    return tuple(features)


def summarize_file(
    partition: int,
    path: str,
    features: tuple[WireFeature, ...],
    compression: Compression | None,
    focus: LabelFocus | None = None,
    counts: ShardCounts | None = None,
    raw: dict[str, dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Reads one file for its rows, size, checksum and statistics.

    Args:
        partition: Spark partition that it came from.
        path: TFRecord file.
        features: All features that its records may hold.
        compression: Of the file.
        focus: The label that the statistics compare features with, or None.
        counts: What counts its keys, or None.
        raw: Statistics of the raw columns by feature, or None.

    Returns:
        The shard's entry; see `write_with_connector`.

    Raises:
        CorruptRecordError: The connector wrote what cannot be read.
    """
    decoder, rows = build_decoder(features), 0
    gathered = None if raw is None else _GatheredRaw(raw)
    accumulator = StatisticsAccumulator(decoder.schema, focus, gathered)
    for block in read_record_blocks(path, compression=compression):
        batch = decoder.decode_block(block, path)
        accumulator.update(batch)
        if counts is not None:
            counts.counter.update(batch)
        rows += batch.num_rows
    if counts is not None and rows:
        counts.write()
    return {
        **asdict(describe_file(Path(path).parent, Path(path))),
        "rows": rows,
        "partition": partition,
        "statistics": accumulator.to_dict(),
    }

"""`format("tfrecord")` for Spark: TFRecord files in and out through the Python Data Source API."""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    WriterCommitMessage,
)
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import StructType

from conf.manifest import ShardInfo
from etl.tfrecord.commit import (
    PartitionResult,
    create_temporary,
    discard,
    hold_temporary,
    publish,
)
from etl.tfrecord.encode import build_encoder
from etl.tfrecord.options import WriteOptions, parse_write_options
from etl.tfrecord.read_options import parse_read_options
from etl.tfrecord.spark_reader import TFRecordReader, infer_schema
from etl.tfrecord.writer import ShardOptions, ShardWriter

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass
class PartitionMessage(WriterCommitMessage):
    """Carries a task's result to the driver-side commit."""

    result: PartitionResult


def _arrow_schema(schema: StructType) -> pa.Schema:
    """Arrow form of a Spark schema; a type without one becomes null, which the wire refuses."""
    fields = []
    for field in schema.fields:
        try:
            arrow_type = to_arrow_type(field.dataType)
        except Exception:  # PySpark raises various types for UDTs, intervals and the like
            arrow_type = pa.null()
        fields.append(pa.field(field.name, arrow_type))
    return pa.schema(fields)


class TFRecordWriter(DataSourceArrowWriter):
    """Writes one shard per non-empty partition; see `etl.tfrecord.commit` for the protocol."""

    def __init__(self, options: WriteOptions, overwrite: bool) -> None:
        self._options = options
        self._overwrite = overwrite
        self.job_id = uuid.uuid4().hex

    def write(self, iterator: Iterator[pa.RecordBatch]) -> PartitionMessage:
        """Runs in a task: writes the partition's rows to an attempt file.

        Args:
            iterator: Batches of the partition.

        Returns:
            The attempt, for the commit.

        Raises:
            InputDataError: A value that the wire cannot carry; the attempt's file is removed.
        """
        context = TaskContext.get()
        if context is None:
            raise RuntimeError("TFRecordWriter.write runs inside a Spark task only")
        partition, attempt = context.partitionId(), context.taskAttemptId()
        stem, suffix = f"part-{partition:05d}", self._options.suffix
        unique = "" if self._options.deterministic_names else f"-{self.job_id}-c000"
        with hold_temporary(self._options.directory, self.job_id) as temporary:
            path = temporary / f"{stem}-attempt-{attempt}{suffix}"
            sink = _PartitionSink(str(path), self._options)
            sink.write_all(iterator)
        return PartitionMessage(
            PartitionResult(partition, sink.info, f"{stem}{unique}{suffix}", sink.statistics)
        )

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Runs on the driver side once all tasks have succeeded: publishes their shards."""
        results = [m.result for m in messages if isinstance(m, PartitionMessage)]
        publish(self._options.directory, self.job_id, results, self._overwrite)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Runs on the driver side when a task has failed for good: leaves no trace."""
        discard(self._options.directory, self.job_id)


class _PartitionSink:
    """One partition's way: encoders, statistics, bytes, in one pass over the Arrow batches."""

    def __init__(self, path: str, options: WriteOptions) -> None:
        self._path, self._options = path, options
        self._pipeline = None if options.encoders is None else _read_pipeline(options.encoders)
        self._accumulator: Any = None
        self.info: ShardInfo | None = None
        self.statistics: dict[str, Any] | None = None

    def write_all(self, iterator: Iterator[pa.RecordBatch]) -> None:
        """Writes all rows; an empty partition opens no file."""
        batches = (self._transform(batch) for batch in iterator if batch.num_rows)
        first = next(batches, None)
        if first is None:
            return
        shard = ShardOptions(self._options.record_type, self._options.compression)
        with ShardWriter(self._path, first.schema, shard) as writer:
            writer.write(first)
            for batch in batches:
                writer.write(batch)
        self.info = writer.info
        if self._accumulator is not None:
            self.statistics = self._accumulator.to_dict()

    def _transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if self._pipeline is not None:
            batch = self._pipeline.apply(batch)
        if self._options.statistics:
            if self._accumulator is None:
                from etl.statistics import StatisticsAccumulator

                self._accumulator = StatisticsAccumulator(batch.schema)
            self._accumulator.update(batch)
        return batch


def _read_pipeline(path: str) -> Any:
    from etl.encoders.pipeline import read_pipeline

    return read_pipeline(path)


class TFRecordDataSource(DataSource):
    """TFRecord files as `format("tfrecord")`.

    Write options: `recordType` (Example, ByteArray), `compression` (none, gzip, zlib) or `codec`
    (Hadoop class name), `deterministicNames`, `encoders`, `statistics`. Read options:
    `recordType`, `compression`, `codec`.
    """

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return "tfrecord"

    def schema(self) -> StructType:
        """Infers the schema from the files, all of them; give one to save that pass.

        Raises:
            ConfigError: No such path, or a bad option.
            CorruptRecordError: A file is damaged.
        """
        return infer_schema(parse_read_options(self.options))

    def reader(self, schema: StructType) -> DataSourceReader:
        """Builds the reader.

        Raises:
            ConfigError: A bad option, or a column type that no feature can be read as.
        """
        return TFRecordReader(parse_read_options(self.options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> TFRecordWriter:
        """Checks options and schema before any task starts, and builds the writer.

        Raises:
            ConfigError: A bad option, or columns that the wire cannot carry, all of them named.
        """
        options = parse_write_options(self.options, overwrite)
        if options.encoders is None:
            written = _arrow_schema(schema)
        else:
            written = _read_pipeline(options.encoders).output_schema
        build_encoder(written, options.record_type)
        writer = TFRecordWriter(options, overwrite)
        create_temporary(options.directory, writer.job_id)
        return writer


class SluiceDataSource(TFRecordDataSource):
    """The same under a name that no JVM connector claims."""

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return "sluice"


def _find_jvm_provider(spark: SparkSession, name: str) -> str | None:
    """Class of a JVM connector that claims a format name, which Spark would silently prefer."""
    jvm: Any = spark.sparkContext._jvm
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    register = jvm.java.lang.Class.forName(
        "org.apache.spark.sql.sources.DataSourceRegister", True, loader
    )
    providers = jvm.java.util.ServiceLoader.load(register, loader).iterator()
    while providers.hasNext():
        provider = providers.next()
        if provider.shortName().lower() == name:
            return str(provider.getClass().getName())
    return None


def register_tfrecord(spark: SparkSession) -> None:
    """Registers `format("tfrecord")` and `format("sluice")` in a session.

    Warns where a JVM connector on the class path claims the first name: Spark then prefers that
    one, and `sluice` is the name to use.

    Args:
        spark: Session to register in.
    """
    spark.dataSource.register(SluiceDataSource)
    provider = _find_jvm_provider(spark, TFRecordDataSource.name())
    if provider is not None:
        warnings.warn(
            f"{provider} on the class path claims format('tfrecord'); use format('sluice')",
            stacklevel=2,
        )
        return
    spark.dataSource.register(TFRecordDataSource)

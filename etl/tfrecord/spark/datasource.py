"""`format("tfrecord")` for Spark: TFRecord files in and out through the Python Data Source API.

Spark starts a process each to look the format up, to plan a write and to commit it; none of these
needs compiled code, so what does is imported where it is used.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Set
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from conf.errors import ConfigError
from conf.storage.processes import find_jvm
from etl.tfrecord.commit.commit_plan import TaskResult
from etl.tfrecord.spark.loaded_code import freeze_planner
from etl.tfrecord.spark.options import parse_read_options, parse_write_options
from etl.tfrecord.spark.schema import describe_columns, to_arrow_schema
from etl.tfrecord.spark.write_job import use_own_python, write_partition
from etl.tfrecord.spark.write_plan import (
    NO_HOOKS,
    WriteHooks,
    WritePlan,
    build_committer,
    plan_write,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass
class TaskMessage(WriterCommitMessage):
    """Carries a task's result to the driver-side commit."""

    result: TaskResult


class TFRecordWriter(DataSourceArrowWriter):
    """Writes each Spark partition's shards; the protocol: `etl.tfrecord.commit.local_commit`."""

    def __init__(self, plan: WritePlan) -> None:
        self._plan = plan

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskMessage:
        """Runs in a task: writes the partition's rows to files of this attempt.

        Args:
            iterator: Batches of the partition.

        Returns:
            The attempt, for the commit.

        Raises:
            InputDataError: A value that the wire cannot carry; the attempt's files are removed.
        """
        return TaskMessage(write_partition(self._plan, iterator))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Runs on the driver side once all tasks have succeeded: publishes their shards."""
        results = [m.result for m in messages if isinstance(m, TaskMessage)]
        build_committer(self._plan.options).publish(self._plan.job, results)
        freeze_planner()

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Runs on the driver side when a task has failed for good: leaves no trace."""
        build_committer(self._plan.options).discard(self._plan.job.job_id)


class TFRecordDataSource(DataSource):
    """TFRecord files as `format("tfrecord")`.

    Write options: `recordType` (Example, SequenceExample, ByteArray); `compression` (none, gzip,
    zlib) or `codec` (Hadoop class name), `compressionLevel`; `partitionBy` (Spark refuses
    `.partitionBy()` for Python data sources), `partitionOverwriteMode`; `maxRecordsPerFile`,
    `maxBytesPerFile`; `index`, `statistics`, `statisticsLabel`, `statisticsSlices`,
    `statisticsWeight`, `statisticsWeighted`, `statisticsCounts`, `encoders`,
    `deterministicNames`; `saveMode`; `storage` or `fs.<setting>` for object stores; and those of
    `etl.tfrecord.types.column_policies`. `encoders` and `statistics*` need their hooks.

    Attributes:
        hooks: What others add to a write.
    """

    hooks: ClassVar[WriteHooks] = NO_HOOKS

    def __init__(self, options: dict[str, str]) -> None:
        """Takes the options as Spark gives them; runs where the format is looked up or planned.

        Raises:
            ConfigError: It would be a table of the catalog.
        """
        super().__init__(options)
        _refuse_table({name.lower() for name in options}, self.name())
        freeze_planner()

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
        from etl.tfrecord.spark.reader import infer_schema

        return infer_schema(parse_read_options(self.options))

    def reader(self, schema: StructType) -> DataSourceReader:
        """Builds the reader.

        Raises:
            ConfigError: A bad option, or a column type that no feature can be read as.
        """
        from etl.tfrecord.spark.reader import TFRecordReader

        return TFRecordReader(parse_read_options(self.options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> TFRecordWriter:
        """Checks options and schema before any task starts, and builds the writer.

        Raises:
            ConfigError: A bad option, or columns that the wire cannot carry, all of them named.
        """
        options = parse_write_options(self.options, overwrite)
        types = {field.name: field.dataType.simpleString() for field in schema.fields}
        columns = describe_columns(schema, options)
        plan = plan_write(to_arrow_schema(schema), options, types, columns, self.hooks)
        build_committer(options).begin(plan.job, find_jvm())
        return TFRecordWriter(plan)


def _refuse_table(given: Set[str], name: str) -> None:
    """Refuses to be a table: Spark says where it lies when it is made, and not when it is used.

    Raises:
        ConfigError: Spark gives what it keeps of a table, or no path.
    """
    if "provider" in given or not given & {"path", "paths"}:
        raise ConfigError(
            f"a table of format {name!r} could not be read: Spark gives it no path, nor options",
            fix=f"spark.read.format({name!r}).load(path), df.write.format({name!r}).save(path); in "
            f"SQL: CREATE TEMPORARY VIEW v USING {name} OPTIONS (path '...')",
        )


def find_source(name: str) -> type[TFRecordDataSource]:
    """Returns the class of format `tfrecord`, `tfrecords` or `sluice`, found as Spark does."""
    source: type[TFRecordDataSource] = import_module(f"pyspark_{name}").DefaultSource
    return source


def _find_jvm_providers(spark: SparkSession) -> dict[str, str]:
    """Classes of the class path by the format name that they claim; Spark silently prefers them."""
    jvm: Any = spark.sparkContext._jvm
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    register = jvm.java.lang.Class.forName(
        "org.apache.spark.sql.sources.DataSourceRegister", True, loader
    )
    classes: dict[str, str] = {}
    providers = jvm.java.util.ServiceLoader.load(register, loader).iterator()
    while providers.hasNext():
        provider = providers.next()
        classes[provider.shortName().lower()] = str(provider.getClass().getName())
    return classes


def _register(spark: SparkSession, source: type[DataSource]) -> None:
    """Registers a format, unless its name is registered already: Spark would log a warning."""
    manager: Any = spark._jsparkSession.sessionState().dataSourceManager()
    if not manager.dataSourceExists(source.name()):
        spark.dataSource.register(source)


def _activate(spark: SparkSession) -> None:
    """Makes the session that of this thread: a write looks formats up in no other.

    Spark does so by itself in the thread that built the session alone.
    """
    jvm: Any = spark._jvm
    jvm.org.apache.spark.sql.classic.SparkSession.setActiveSession(spark._jsparkSession)


def register_tfrecord(spark: SparkSession) -> None:
    """Registers the formats `tfrecord`, `tfrecords` and `sluice`; twice does no harm.

    A thread other than that in which the session was built calls it before `df.write.format(...)`
    there: Spark does not find any Python data source in it otherwise. So does a program whose
    environment is not active: tasks on this machine run in its Python from then on, unless
    `PYSPARK_PYTHON` names another.

    Warns where a JVM connector on the class path claims one of the first two names: Spark then
    prefers that one, and `sluice` is the name to use.

    Args:
        spark: Session to register in.
    """
    _activate(spark)
    use_own_python()
    _register(spark, find_source("sluice"))
    providers = _find_jvm_providers(spark)
    for name in ("tfrecord", "tfrecords"):
        if name not in providers:
            _register(spark, find_source(name))
            continue
        warnings.warn(
            f"{providers[name]} on the class path claims format('{name}'); use format('sluice')",
            stacklevel=2,
        )

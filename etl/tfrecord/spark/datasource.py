"""`format("tfrecord")` for Spark: TFRecord files in and out through the Python Data Source API.

Spark starts a process each to look the format up, to plan a write or a read and to commit it; none
of these needs compiled code, so what does is imported where it is used.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from conf.errors import ConfigError
from conf.storage.processes import find_jvm
from etl.tfrecord.commit.commit_plan import TaskResult
from etl.tfrecord.spark.input_files import FileSplit, list_input_files, plan_splits
from etl.tfrecord.spark.options import ReadOptions, parse_read_options, parse_write_options
from etl.tfrecord.spark.schema import infer_schema, plan_read, select_files
from etl.tfrecord.spark.write_job import (
    WritePlan,
    build_committer,
    freeze_loaded_code,
    freeze_planner,
    plan_write,
    use_own_python,
    write_partition,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass
class TaskMessage(WriterCommitMessage):
    result: TaskResult


class TFRecordWriter(DataSourceArrowWriter):
    """Writes each Spark partition's shards; the protocol: `etl.tfrecord.commit.local_commit`."""

    def __init__(self, plan: WritePlan) -> None:
        self._plan = plan

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskMessage:
        """Runs in a task: writes the partition's rows to files of this attempt."""
        return TaskMessage(write_partition(self._plan, iterator))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Runs on the driver side once all tasks have succeeded: publishes their shards."""
        results = [m.result for m in messages if isinstance(m, TaskMessage)]
        build_committer(self._plan.options).publish(self._plan.job, results)
        freeze_planner()

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Runs on the driver side when a task has failed for good: leaves no trace."""
        build_committer(self._plan.options).discard(self._plan.job.job_id)


@dataclass
class ReadPartition(InputPartition):
    splits: tuple[FileSplit, ...]


class TFRecordReader(DataSourceReader):
    """Reads files into the columns of a schema: features, and partition columns by their names.

    It takes no filters (`pushFilters`): Spark plans a Python source once for all queries of a
    frame, so that what one filter leaves would be all that the others see.
    """

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        listing = list_input_files(options)
        self._plan = plan_read(options, listing, schema)
        self._files = select_files(listing, options.where)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out what tasks do not need."""
        return {name: value for name, value in self.__dict__.items() if name != "_files"}

    def partitions(self) -> Sequence[InputPartition]:
        planned = plan_splits(self._files, self._options)
        freeze_planner()
        return [ReadPartition(splits) for splits in planned]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Runs in a task: reads its files."""
        if not isinstance(partition, ReadPartition):  # Spark's stand-in where there is nothing
            return
        from etl.tfrecord.spark.read_task import ReadTask  # compiled: not for Spark's planner

        task = ReadTask(self._plan, self._options)
        for split in partition.splits:
            yield from task.read(split)
        freeze_loaded_code()


class TFRecordDataSource(DataSource):
    """TFRecord files as `format("tfrecord")`; its options: `etl.tfrecord.spark.options`."""

    def __init__(self, options: dict[str, str]) -> None:
        """Takes the options as Spark gives them; runs where the format is looked up or planned."""
        super().__init__(options)
        _refuse_table({name.lower() for name in options}, self.name())
        freeze_planner()

    @classmethod
    def name(cls) -> str:
        return "tfrecord"

    def schema(self) -> StructType:
        return infer_schema(parse_read_options(self.options))

    def reader(self, schema: StructType) -> DataSourceReader:
        """Builds the reader, whose options and columns have been checked."""
        return TFRecordReader(parse_read_options(self.options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> TFRecordWriter:
        """Checks options and schema before any task starts, and builds the writer."""
        options = parse_write_options(self.options, overwrite)
        plan = plan_write(schema, options)
        build_committer(options).begin(plan.job, find_jvm())
        return TFRecordWriter(plan)


class TFRecordsDataSource(TFRecordDataSource):
    """The same under the name of spark-tensorflow-connector."""

    @classmethod
    def name(cls) -> str:
        return "tfrecords"


class SluiceDataSource(TFRecordDataSource):
    """The same under a name that no JVM connector claims."""

    @classmethod
    def name(cls) -> str:
        return "sluice"


def _refuse_table(given: Set[str], name: str) -> None:
    """Refuses to be a table: Spark says where it lies when it is made, and not when it is used."""
    if "provider" in given or not given & {"path", "paths"}:
        raise ConfigError(
            f"a table of format {name!r} could not be read: Spark gives it no path, nor options",
            fix=f"spark.read.format({name!r}).load(path), df.write.format({name!r}).save(path); in "
            f"SQL: CREATE TEMPORARY VIEW v USING {name} OPTIONS (path '...')",
        )


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
    # A write looks formats up in the thread's session, which Spark sets where it was built alone.
    jvm: Any = spark._jvm
    jvm.org.apache.spark.sql.classic.SparkSession.setActiveSession(spark._jsparkSession)
    use_own_python()
    providers = _find_jvm_providers(spark)
    manager: Any = spark._jsparkSession.sessionState().dataSourceManager()
    for source in (SluiceDataSource, TFRecordDataSource, TFRecordsDataSource):
        name = source.name()
        if name in providers:
            warnings.warn(
                f"{providers[name]} on the class path claims format('{name}'); use "
                "format('sluice')",
                stacklevel=2,
            )
        elif not manager.dataSourceExists(name):  # Spark would log a warning
            spark.dataSource.register(source)

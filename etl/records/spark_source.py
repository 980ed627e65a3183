"""The data sources that Spark finds by name: TFRecord files, with what a build adds to their write.

That is fitted encoders, and statistics of each shard. Spark starts a process each to look a format
up, to plan a write and to commit it: what needs compiled code is imported where an option asks for
it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from conf.encoders import ENCODERS_FILE
from conf.errors import ConfigError
from conf.local_paths import local_path
from etl.tfrecord.spark.datasource import TFRecordDataSource
from etl.tfrecord.spark.options import WriteOptions
from etl.tfrecord.spark.write_job import WriteHooks
from etl.tfrecord.types.parts import flatten_lists

if TYPE_CHECKING:
    from etl.encoders.pipeline import EncoderPipeline
    from etl.quality.statistics import StatisticsAccumulator
    from etl.records.train_counts import ShardCounts
    from etl.tfrecord.files.writer import ShardStatistics


def open_encoders(path: str) -> EncoderPipeline:
    """Reads fitted encoders; the tasks of a process share them while their plan is the same file.

    Args:
        path: Directory of the encoders.

    Raises:
        InputDataError: They are missing or damaged.
    """
    file = local_path(path) / ENCODERS_FILE
    # A plan that is not there has no state: what reads it says so.
    state = file.stat() if file.is_file() else None
    return _read_pipeline(path, state and (state.st_ino, state.st_mtime_ns, state.st_size))


@lru_cache(maxsize=1)
def _read_pipeline(path: str, state: tuple[int, int, int] | None) -> EncoderPipeline:
    from etl.encoders.pipeline import read_pipeline

    return read_pipeline(path)


def build_statistics(options: WriteOptions, schema: pa.Schema, path: str) -> ShardStatistics:
    """Builds the statistics of a shard, and what counts its keys where the write asks for that.

    Args:
        options: Options of the write.
        schema: Schema of the records.
        path: The shard's path below the output directory.

    Raises:
        ConfigError: A package that the statistics need is not installed.
        InputDataError: A feature of a type that has no statistics.
    """
    statistics: ShardStatistics = (
        _ListStatistics(options, schema) if options.feature_lists else _accumulate(options, schema)
    )
    if options.statistics_counts is None:
        return statistics
    from etl.records.train_counts import CountsRequest

    counts = CountsRequest.loads(options.statistics_counts).open(path)
    return statistics if counts is None else _CountedStatistics(statistics, counts)


class _CountedStatistics:
    """Statistics of a shard whose keys are counted too; the counts go to a file of their own."""

    def __init__(self, statistics: ShardStatistics, counts: ShardCounts) -> None:
        self._statistics, self._counts = statistics, counts

    def update(self, batch: pa.RecordBatch, source: pa.RecordBatch | None = None) -> None:
        self._statistics.update(batch, source)
        self._counts.counter.update(batch)

    def to_dict(self) -> dict[str, Any]:
        self._counts.write()
        return self._statistics.to_dict()


class _ListStatistics:
    """Statistics of records with feature lists: of the lists' values, as without nesting."""

    def __init__(self, options: WriteOptions, schema: pa.Schema) -> None:
        self._names = options.feature_lists
        empty = pa.RecordBatch.from_pylist([], schema=schema)
        self._accumulator = _accumulate(options, flatten_lists(empty, self._names).schema)

    def update(self, batch: pa.RecordBatch, source: pa.RecordBatch | None = None) -> None:
        self._accumulator.update(flatten_lists(batch, self._names), source)

    def to_dict(self) -> dict[str, Any]:
        return dict(self._accumulator.to_dict())


def _accumulate(options: WriteOptions, schema: pa.Schema) -> StatisticsAccumulator:
    try:
        from etl.quality.label_statistics import LabelFocus
        from etl.quality.raw_statistics import RawAccumulator
        from etl.quality.statistics import StatisticsAccumulator
    except ModuleNotFoundError as error:
        raise ConfigError(
            "option statistics needs a package that is not installed",
            received=f"no package {error.name!r} in the environment of Spark's executors",
            fix="install Sluice with its extra `etl` there, or leave option statistics out",
        ) from error
    label, focus = options.statistics_label, None
    if label is not None:
        focus = LabelFocus(
            label, options.statistics_slices, options.statistics_weight, options.statistics_weighted
        )
    encoders = options.encoders
    raw = None if encoders is None else RawAccumulator(open_encoders(encoders).plan, schema.names)
    return StatisticsAccumulator(schema, focus, raw)


RECORD_HOOKS = WriteHooks(open_encoders, build_statistics)
"""What a build adds to a write."""


class RecordDataSource(TFRecordDataSource):
    """`format("tfrecord")`, with the encoders and statistics of a build."""

    hooks = RECORD_HOOKS


class SluiceDataSource(RecordDataSource):
    """The same under a name that no JVM connector claims."""

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return "sluice"


class TFRecordsDataSource(RecordDataSource):
    """The same under the name of spark-tensorflow-connector."""

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return "tfrecords"

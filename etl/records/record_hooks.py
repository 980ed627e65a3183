"""What a build adds to the write of its records: fitted encoders, and statistics of each shard.

Tasks alone need the code of both, which is imported where it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from conf.encoders import ENCODERS_FILE
from conf.local_paths import local_path
from etl.tfrecord.types.parts import ListRows, split_lists
from etl.tfrecord.types.refusals import refuse_unknown

if TYPE_CHECKING:
    from etl.encoders.pipeline import EncoderPipeline
    from etl.quality.label_statistics import LabelFocus
    from etl.quality.statistics import StatisticsAccumulator
    from etl.records.train_counts import CountsRequest, ShardCounts
    from etl.tfrecord.files.writer import ShardStatistics


def open_encoders(path: str, joined: tuple[str, ...] = ()) -> EncoderPipeline:
    """Reads fitted encoders; the tasks of a process share them while their plan is the same file.

    Args:
        path: Directory of the encoders.
        joined: Vocabularies whose tokens are looked up before.

    Raises:
        InputDataError: They are missing or damaged.
    """
    file = local_path(path) / ENCODERS_FILE
    # A plan that is not there has no state: what reads it says so.
    state = file.stat() if file.is_file() else None
    return _read_pipeline(path, joined, state and (state.st_ino, state.st_mtime_ns, state.st_size))


@lru_cache(maxsize=1)
def _read_pipeline(
    path: str, joined: tuple[str, ...], state: tuple[int, int, int] | None
) -> EncoderPipeline:
    from etl.encoders.pipeline import read_pipeline

    return read_pipeline(path, joined=joined)


@dataclass(frozen=True)
class RecordHooks:
    """How a build's rows become records, and what its statistics count.

    Attributes:
        encoders: Directory of the fitted encoders.
        feature_lists: Encoded lists whose values become steps.
        focus: The label that features are compared with.
        counts: What is counted of the train split.
        joined: Vocabularies whose tokens are looked up before.
    """

    encoders: str
    feature_lists: tuple[str, ...] = ()
    focus: LabelFocus | None = None
    counts: CountsRequest | None = None
    joined: tuple[str, ...] = ()

    @property
    def pipeline(self) -> EncoderPipeline:
        """The encoders."""
        return open_encoders(self.encoders, self.joined)

    @property
    def output_schema(self) -> pa.Schema:
        """Schema of the records."""
        return nest_schema(self.pipeline.output_schema, self.feature_lists)

    def apply(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Encodes rows."""
        return nest_lists(self.pipeline.apply(batch), self.feature_lists)

    def build_statistics(self, schema: pa.Schema, path: str) -> ShardStatistics:
        """Builds the statistics of a shard, and what counts its keys where that is asked for."""
        counts = None if self.counts is None else self.counts.open(path)
        statistics: ShardStatistics = _ListStatistics(self, schema)
        return statistics if counts is None else _CountedStatistics(statistics, counts)

    def accumulate(self, schema: pa.Schema) -> StatisticsAccumulator:
        """Statistics of flat records, and of the raw values that they are encoded from."""
        from etl.quality.statistics import StatisticsAccumulator, plan_raw_features

        raw = plan_raw_features(self.pipeline.plan, schema.names)
        return StatisticsAccumulator(schema, self.focus, raw)


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
    """Statistics of records, feature lists among them: of the lists' values, as without nesting."""

    def __init__(self, hooks: RecordHooks, schema: pa.Schema) -> None:
        self._names = hooks.feature_lists
        empty = pa.RecordBatch.from_pylist([], schema=schema)
        self._accumulator = hooks.accumulate(flatten_lists(empty, self._names).schema)

    def update(self, batch: pa.RecordBatch, source: pa.RecordBatch | None = None) -> None:
        self._accumulator.update(flatten_lists(batch, self._names), source)

    def to_dict(self) -> dict[str, Any]:
        return dict(self._accumulator.to_dict())


def nest_schema(schema: pa.Schema, names: Sequence[str]) -> pa.Schema:
    lists = [field.name for field in schema if pa.types.is_list(field.type)]
    unfit = [name for name in names if name not in lists]
    refuse_unknown("no list column, which alone can go into the feature lists", unfit, lists)
    fields = [
        pa.field(field.name, pa.list_(field.type)) if field.name in names else field
        for field in schema
    ]
    return pa.schema(fields)


def nest_lists(batch: pa.RecordBatch, names: Sequence[str]) -> pa.RecordBatch:
    """Makes each value of the named list columns a step of its own, a list of one."""
    columns = [
        _nest(column) if name in names else column
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=nest_schema(batch.schema, names))


def flatten_lists(batch: pa.RecordBatch, names: Sequence[str]) -> pa.RecordBatch:
    """Undoes `nest_lists`: the named columns hold lists of values again."""
    columns = [
        _flatten(column) if name in names else column
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _nest(column: pa.ListArray) -> pa.ListArray:
    values, rows = split_lists(column)
    places = pa.array(np.arange(len(values) + 1, dtype=np.int32))
    steps = pa.ListArray.from_arrays(places, values, type=column.type)
    return rows.build(steps, pa.list_(column.type))


def _flatten(column: pa.ListArray) -> pa.ListArray:
    steps, rows = split_lists(column)
    values, ends = split_lists(steps)
    return ListRows(ends.offsets[rows.offsets], rows.is_null).build(values, steps.type)

"""What a task makes of a build's rows: encoded records, statistics and counts of each shard.

Tasks alone need the code of most of it, which is imported where it is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from conf.encoders import ENCODERS_FILE
from conf.local_paths import local_path
from etl.records.feature_lists import flatten_lists, nest_lists, nest_schema

if TYPE_CHECKING:
    from etl.encoders.joined_vocabulary import JoinedColumn
    from etl.encoders.pipeline import EncoderPipeline
    from etl.quality.label_statistics import LabelFocus
    from etl.quality.statistics import StatisticsAccumulator
    from etl.records.train_counts import CountedColumns, ShardCounter


def open_encoders(path: str, joined: tuple[str, ...] = ()) -> EncoderPipeline:
    """Reads fitted encoders; the tasks of a process share them while their plan is the same file.

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
class RecordEncoder:
    """How rows become records, and what is told of each shard; picklable.

    Attributes:
        encoders: Directory of the fitted encoders.
        feature_lists: Encoded lists whose values become steps.
        focus: The label that features are compared with; None: there is none.
        counted: What is counted of the train split.
        counts_dir: Where the counts are left.
        joined: Columns whose tokens are looked up before records are encoded.
    """

    encoders: str
    feature_lists: tuple[str, ...]
    focus: LabelFocus | None
    counted: CountedColumns
    counts_dir: str
    joined: tuple[JoinedColumn, ...] = ()

    @property
    def pipeline(self) -> EncoderPipeline:
        """The encoders."""
        joined = sorted({column.spec.name for column in self.joined})
        return open_encoders(self.encoders, tuple(joined))

    @property
    def output_schema(self) -> pa.Schema:
        """Schema of the records."""
        return nest_schema(self.pipeline.output_schema, self.feature_lists)

    def apply(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Encodes rows."""
        return nest_lists(self.pipeline.apply(batch), self.feature_lists)

    def build_statistics(self, schema: pa.Schema, path: str) -> ShardReport:
        """Builds what reports of a shard, by the records' schema and its path in the version."""
        from etl.quality.statistics import StatisticsAccumulator, plan_raw_features
        from etl.records.train_counts import open_counter

        empty = pa.RecordBatch.from_pylist([], schema=schema)
        flat = flatten_lists(empty, self.feature_lists).schema
        raw = plan_raw_features(self.pipeline.plan, flat.names)
        statistics = StatisticsAccumulator(flat, self.focus, raw)
        counter = open_counter(self.counted, self.counts_dir, path)
        return ShardReport(self.feature_lists, statistics, counter)


@dataclass(frozen=True)
class ShardReport:
    """What a task's result tells of a shard besides its rows, bytes and checksum."""

    feature_lists: tuple[str, ...]
    statistics: StatisticsAccumulator
    counter: ShardCounter | None

    def update(self, batch: pa.RecordBatch, source: pa.RecordBatch | None = None) -> None:
        """Adds records, and the rows that they were encoded from."""
        flat = flatten_lists(batch, self.feature_lists)
        self.statistics.update(flat, source)
        if self.counter is not None:
            self.counter.update(flat)

    def to_dict(self) -> dict[str, Any]:
        """Returns the statistics by feature, and the name of the file that holds the counts."""
        counts = None if self.counter is None else self.counter.write()
        return {"features": dict(self.statistics.to_dict()), "train_counts": counts}

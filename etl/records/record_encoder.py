"""What a task makes of a build's rows: encoded records, statistics and counts of each shard.

Tasks alone need the code of most of it, which is imported where it is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from conf.artefacts.train_counts import TrainCounter
from conf.encoders import ENCODERS_DIR
from conf.splits import TRAIN
from etl.records.feature_lists import flatten_lists, nest_lists, nest_schema
from etl.records.train_counts import CountedColumns, write_task_counts

if TYPE_CHECKING:
    from etl.encoders.joined_vocabulary import JoinedColumn
    from etl.encoders.pipeline import EncoderPipeline
    from etl.quality.label_statistics import LabelFocus
    from etl.quality.statistics import StatisticsAccumulator

TASK_COUNTS_DIR = ".train_counts"


@lru_cache(maxsize=1)
def _read_pipeline(directory: Path, joined: frozenset[str]) -> EncoderPipeline:
    """Reads encoders; the tasks of a process share them, as each version has its own folder."""
    from etl.encoders.pipeline import read_pipeline

    return read_pipeline(directory, joined=joined)


@dataclass(frozen=True)
class RecordEncoder:
    """How rows become records, and what is told of each shard; picklable."""

    version: Path  # absolute; its encoders are there already
    feature_lists: tuple[str, ...]  # encoded lists whose values become steps
    focus: LabelFocus | None  # the label that features are compared with
    counted: CountedColumns  # of the train split; tasks leave counts in `TASK_COUNTS_DIR`
    joined: tuple[JoinedColumn, ...]  # whose tokens are looked up before records are encoded

    @property
    def pipeline(self) -> EncoderPipeline:
        """The encoders."""
        joined = frozenset(column.spec.name for column in self.joined)
        return _read_pipeline(self.version / ENCODERS_DIR, joined)

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

        empty = pa.RecordBatch.from_pylist([], schema=schema)
        flat = flatten_lists(empty, self.feature_lists).schema
        raw = plan_raw_features(self.pipeline.plan, flat.names)
        is_counted = self.counted.keys.features and path.partition("/")[0] == TRAIN
        counter = TrainCounter(self.counted.keys) if is_counted else None
        return ShardReport(self, StatisticsAccumulator(flat, self.focus, raw), counter)


@dataclass(frozen=True)
class ShardReport:
    """What a task's result tells of a shard besides its rows, bytes and checksum."""

    encoder: RecordEncoder
    statistics: StatisticsAccumulator
    counter: TrainCounter | None

    def update(self, batch: pa.RecordBatch, source: pa.RecordBatch | None = None) -> None:
        """Adds records, and the rows that they were encoded from."""
        flat = flatten_lists(batch, self.encoder.feature_lists)
        self.statistics.update(flat, source)
        if self.counter is not None:
            self.counter.add(self.encoder.counted.read(flat))

    def to_dict(self) -> dict[str, Any]:
        """Returns the statistics by feature, and the name of what holds the counts."""
        name = None
        if self.counter is not None:
            directory = self.encoder.version / TASK_COUNTS_DIR
            name = write_task_counts(directory, self.counter.result())
        return {"features": dict(self.statistics.to_dict()), "train_counts": name}

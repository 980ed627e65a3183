"""Train counts of a version: gathered shard by shard as the records are written, merged, stored.

Each task leaves its counts in files that its result names, as the driver would otherwise be sent
as many numbers as there are records; what the driver merges is as large as the keys' ids. Shards
that are not written now (those of other days, imported ones) are read. Runs in executors: without
pydantic.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from conf.artefacts.train_counts import (
    COUNT_COLUMNS,
    CountedKeys,
    IdCounts,
    KeyCounts,
    KeyPart,
    TrainCounter,
    TrainRows,
    add_up,
    counts_path,
    find_counted,
)
from conf.manifest import FileInfo, Manifest, ShardInfo
from conf.paths import ReadablePath
from conf.schema import OOV_ID, FeatureSchema
from conf.splits import TRAIN
from conf.storage.atomic_output import atomic_file
from conf.storage.table_files import read_parquet
from etl.records.feature_lists import flatten_lists
from etl.tfrecord.codec.crc32c import describe_file, read_described
from etl.tfrecord.codec.decode import read_batches
from etl.tfrecord.types.features import WireFeature


@dataclass(frozen=True)
class CountedColumns:
    """Which columns of records are counted; picklable."""

    keys: CountedKeys
    # Id by key column of rows that lack it; left out: that of unknown values.
    absent: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def build(cls, keys: CountedKeys, schema: FeatureSchema) -> CountedColumns:
        """Builds it for records of a schema, whose keys of 64 bits say what is absent."""
        specs = [schema[name] for name in keys.features.values()]
        pads = {spec.name: spec.pad_value for spec in specs if spec.vocabulary_size is None}
        return cls(keys, {name: int(pad) for name, pad in pads.items() if pad is not None})

    def read(self, batch: pa.RecordBatch) -> TrainRows:
        """Takes the counted columns of flat records; other columns are not looked at."""
        keys = self.keys
        ids = {
            part: _to_numpy(batch.column(name), np.int64, self.absent.get(name, OOV_ID))
            for part, name in keys.features.items()
        }
        label = None if keys.label is None else _to_numpy(batch.column(keys.label), np.float64, 0)
        history = None
        if keys.history is not None:
            lists = batch.column(keys.history)
            lengths = _to_numpy(pc.list_value_length(lists), np.int64, 0)
            history = _to_numpy(lists.flatten(), np.int64, OOV_ID), lengths
        return TrainRows(ids, label, history)


def _to_numpy(column: pa.Array, dtype: type[np.number], absent: float) -> np.ndarray:
    filled = pc.fill_null(column.cast(pa.from_numpy_dtype(dtype)), absent)
    return np.asarray(filled.to_numpy(zero_copy_only=False), dtype)


def write_task_counts(directory: Path, counts: KeyCounts) -> str:
    """Writes what a task has counted; returns a name of its files, which no other attempt has."""
    name = uuid.uuid4().hex
    for part, found in counts.items():
        _write(found, directory / f"{name}-{part}.parquet")
    return name


def merge_task_counts(directory: Path, names: Iterable[str], keys: CountedKeys) -> KeyCounts:
    """Adds up what tasks have left."""
    counter = TrainCounter(keys)
    for name in names:
        files = {part: directory / f"{name}-{part}.parquet" for part in keys.features}
        counter.add_counts({part: _read(file) for part, file in files.items()})
    return counter.result()


def _write(counts: IdCounts, target: Path) -> None:
    # Ascending ids take a byte each as differences, and eight as they are.
    ids, *others = COUNT_COLUMNS
    encoding = {ids: "DELTA_BINARY_PACKED"}
    pq.write_table(counts.to_table(), target, use_dictionary=others, column_encoding=encoding)


def _read(file: Path | pa.BufferReader) -> IdCounts:
    return IdCounts.from_table(read_parquet(file))


def count_shards(version: Path, manifest: Manifest, shards: Sequence[ShardInfo]) -> KeyCounts:
    """Counts shards of a published version's train split by reading them."""
    keys = find_counted(manifest.keys, manifest.schema, manifest.source.config)
    columns, counter = CountedColumns.build(keys, manifest.schema), TrainCounter(keys)
    names = {name for name in (*keys.features.values(), keys.label, keys.history) if name}
    lists = names & manifest.find_feature_lists()
    specs = [spec for spec in manifest.schema.features if spec.name in names]
    wire = [WireFeature(one.name, one.dtype, one.is_list, one.name in lists) for one in specs]
    for shard in shards if keys.features else ():
        path, record_type = version / shard.path, manifest.record_type
        for batch in read_batches(path, wire, record_type=record_type, slots=manifest.slots):
            counter.add(columns.read(flatten_lists(batch, lists)))
    return counter.result()


def count_kept(version: Path, manifest: Manifest, kept: Sequence[ShardInfo]) -> KeyCounts:
    """Counts the train shards of a version that the next one takes over.

    They are all but a few: what was counted of the whole, without those few. A version of an
    earlier release that has counted nothing is read.
    """
    if not manifest.train_counts:
        return count_shards(version, manifest, kept)
    paths = {shard.path for shard in kept}
    left_out = [shard for shard in manifest.split(TRAIN).shards if shard.path not in paths]
    taken = count_shards(version, manifest, left_out)
    whole = read_counts(version, manifest)
    return {part: _take_away(counts, taken[part]) for part, counts in whole.items()}


def _take_away(whole: IdCounts, part: IdCounts) -> IdCounts:
    left = add_up([whole, IdCounts(part.ids, *(-column for column in part.columns[1:]))])
    held = np.any(left.columns[1:], axis=0)
    return IdCounts(*(column[held] for column in left.columns))


def read_counts(version: ReadablePath, manifest: Manifest) -> KeyCounts:
    """Reads the counts of a version."""
    parts: tuple[KeyPart, ...] = ("user", "item")
    return {
        part: _read(pa.BufferReader(read_described(version, manifest.train_counts[part])))
        for part in parts
        if part in manifest.train_counts
    }


def write_counts(version: Path, found: KeyCounts) -> dict[str, FileInfo]:
    """Writes the counts of a version; returns the files by key, as the manifest lists them."""
    files: dict[str, FileInfo] = {}
    for part, counts in found.items():
        path = version / counts_path(part)
        path.parent.mkdir(exist_ok=True)
        with atomic_file(path) as target:
            _write(counts, target)
        files[part] = describe_file(version, path)
    return files

"""Train counts of a version: gathered shard by shard as the records are written, merged, stored.

Each task leaves its counts in a file that its result names, as the driver would otherwise be sent
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
    TRAIN_COUNTS_DIR,
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
from conf.errors import InputDataError, InternalError
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
    """Which columns of records are counted; picklable.

    Attributes:
        keys: What is counted.
        absent: Id by key column of rows that lack it; left out: that of unknown values.
    """

    keys: CountedKeys
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


@dataclass(frozen=True)
class ShardCounter:
    """Counts the records of a shard that a task writes.

    Attributes:
        columns: What is counted.
        directory: Where the counts are left; there already.
    """

    columns: CountedColumns
    directory: Path
    counter: TrainCounter

    def update(self, batch: pa.RecordBatch) -> None:
        """Adds records."""
        self.counter.add(self.columns.read(batch))

    def write(self) -> str:
        """Writes the counts; returns the name of their file, which no other attempt has."""
        tables = [
            counts.to_table().append_column("part", pa.array([part] * len(counts.ids), pa.string()))
            for part, counts in self.counter.result().items()
        ]
        name = f"{uuid.uuid4().hex}.parquet"
        _write_table(pa.concat_tables(tables), self.directory / name)
        return name


def open_counter(columns: CountedColumns, directory: str, shard: str) -> ShardCounter | None:
    """Opens the counter of a shard, by its path in the version; None: it is not counted."""
    if not columns.keys.features or shard.partition("/")[0] != TRAIN:
        return None
    return ShardCounter(columns, Path(directory), TrainCounter(columns.keys))


def merge_files(directory: Path, files: Iterable[str], keys: CountedKeys) -> KeyCounts:
    """Adds up what tasks have left."""
    counter = TrainCounter(keys)
    for file in files:
        table = read_parquet(directory / file)
        counter.add_counts(
            {
                part: IdCounts.from_table(table.filter(pc.equal(table["part"], part)))
                for part in keys.features
            }
        )
    return counter.result()


def _write_table(table: pa.Table, target: Path) -> None:
    # Ascending ids take a byte each as differences, and eight as they are.
    others = [name for name in table.column_names if name != COUNT_COLUMNS[0]]
    encoding = {COUNT_COLUMNS[0]: "DELTA_BINARY_PACKED"}
    pq.write_table(table, target, use_dictionary=others, column_encoding=encoding)


def check_rows(found: KeyCounts, rows: int) -> None:
    """Refuses counts that do not add up to the rows of the train split.

    Raises:
        InternalError: They do not.
    """
    for part, counts in found.items():
        if (counted := int(counts.rows.sum())) != rows:
            raise InternalError(
                "the train counts are not those of the train records",
                received=f"{counted:,} rows by {part}",
                allowed=f"{rows:,}, as were written",
                fix="nothing was published; run again, and report this if it stays",
            )


def count_shards(version: Path, manifest: Manifest, shards: Sequence[ShardInfo]) -> KeyCounts:
    """Counts shards of a published version's train split by reading them.

    Raises:
        CorruptRecordError: A shard is damaged.
    """
    keys = find_counted(manifest.keys, manifest.schema, manifest.source.config)
    names = [name for name in (keys.user, keys.item, keys.label, keys.history) if name is not None]
    lists = manifest.find_feature_lists()
    wire = [
        WireFeature(name, spec.dtype, spec.is_list, name in lists)
        for name, spec in ((name, manifest.schema[name]) for name in dict.fromkeys(names))
    ]
    columns, counter = CountedColumns.build(keys, manifest.schema), TrainCounter(keys)
    for shard in shards if wire else ():
        path, record_type = version / shard.path, manifest.record_type
        for batch in read_batches(path, wire, record_type=record_type, slots=manifest.slots):
            counter.add(columns.read(flatten_lists(batch, lists)))
    return counter.result()


def count_kept(version: Path, manifest: Manifest, kept: Sequence[ShardInfo]) -> KeyCounts:
    """Counts the train shards of a version that the next one takes over.

    They are all but a few: what was counted of the whole, without those few. A version that has
    counted nothing is read.

    Raises:
        InputDataError: The version's counts are damaged, or those of other shards.
    """
    if not manifest.train_counts:
        return count_shards(version, manifest, kept)
    paths = {shard.path for shard in kept}
    left_out = [shard for shard in manifest.split(TRAIN).shards if shard.path not in paths]
    taken = count_shards(version, manifest, left_out)
    whole = read_counts(version, manifest)
    return {part: _take_away(counts, taken[part]) for part, counts in whole.items()}


def read_counts(version: ReadablePath, manifest: Manifest) -> KeyCounts:
    """Reads the counts of a version, as far as it has counted.

    Raises:
        InputDataError: A file is not the one that the manifest lists.
    """
    parts: tuple[KeyPart, ...] = ("user", "item")
    return {
        part: IdCounts.from_table(
            read_parquet(pa.BufferReader(read_described(version, manifest.train_counts[part])))
        )
        for part in parts
        if part in manifest.train_counts
    }


def _take_away(whole: IdCounts, part: IdCounts) -> IdCounts:
    left = add_up([whole, IdCounts(part.ids, *(-column for column in part.columns[1:]))])
    counts = np.stack(left.columns[1:], axis=1)
    if counts.min(initial=0) < 0:
        raise InputDataError(
            "the train counts of the current version are not those of its shards",
            received=f"id {left.ids[int(counts.min(axis=1).argmin())]}",
            fix="build all days anew: --set output.partition_overwrite=static",
        )
    held = counts.any(axis=1)
    return IdCounts(*(column[held] for column in left.columns))


def write_counts(version: Path, found: KeyCounts) -> dict[str, FileInfo]:
    """Writes the counts of a version; returns the files by key, as the manifest lists them."""
    if found:
        (version / TRAIN_COUNTS_DIR).mkdir(exist_ok=True)
    files: dict[str, FileInfo] = {}
    for part, counts in found.items():
        path = version / counts_path(part)
        with atomic_file(path) as target:
            _write_table(counts.to_table(), target)
        files[part] = describe_file(version, path)
    return files

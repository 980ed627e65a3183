"""Train counts of a version: gathered shard by shard as the records are written, merged, stored.

Each task leaves what it has counted in a file of its own, as the driver would otherwise be sent as
many numbers as there are records; what the driver merges is as large as the keys' ids. Shards that
are not written now (those of other days, imported ones) are read. Runs in executors: without
pydantic.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from conf.artefacts.counted_keys import (
    COUNT_COLUMNS,
    TRAIN_COUNTS_DIR,
    CountedKeys,
    KeyPart,
    counts_path,
    find_counted,
)
from conf.errors import InputDataError, InternalError
from conf.manifest import DatasetKeys, FileInfo, Manifest, ShardInfo
from conf.paths import ReadablePath
from conf.schema import OOV_ID, FeatureSchema
from conf.splits import TRAIN
from conf.storage.atomic_output import atomic_file
from conf.storage.table_files import read_parquet
from etl.tfrecord.codec.crc32c import crc32c, describe_file
from etl.tfrecord.codec.decode import read_batches
from etl.tfrecord.types.features import WireFeature, is_list

_PENDING_IDS = 1 << 20
_DENSE_IDS = 1 << 16
"""Ids below this are counted in an array, however few there are."""


@dataclass(frozen=True)
class IdCounts:
    """How often ids occur; the columns of `conf.artefacts.counted_keys.COUNT_COLUMNS`.

    Attributes:
        ids: int64 `[ids]`, ascending.
        counts: int64 `[ids, 3]`: rows, events, positives.
    """

    ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    counts: np.ndarray = field(default_factory=lambda: np.zeros((0, 3), np.int64))

    @property
    def rows(self) -> int:
        """Rows of all ids."""
        return int(self.counts[:, 0].sum())

    @property
    def events(self) -> np.ndarray:
        """Events by id, int64 `[ids]`."""
        return self.counts[:, 1]

    def without(self, other: IdCounts) -> IdCounts:
        """Takes away what another set of rows, which is part of this one, has counted.

        Raises:
            InputDataError: It is no part of this one: the two do not belong together.
        """
        left = _add([self, IdCounts(other.ids, -other.counts)])
        if left.counts.min(initial=0) < 0:
            raise InputDataError(
                "the train counts of the current version are not those of its shards",
                received=f"id {left.ids[int(left.counts.min(axis=1).argmin())]}",
                fix="build all days anew: --set output.partition_overwrite=static",
            )
        held = left.counts.any(axis=1)
        return IdCounts(left.ids[held], left.counts[held])

    def to_table(self) -> pa.Table:
        """Returns the columns of a file."""
        columns = [self.ids, *np.ascontiguousarray(self.counts.T)]
        return pa.table(dict(zip(COUNT_COLUMNS, columns, strict=True)))

    @classmethod
    def from_table(cls, table: pa.Table) -> IdCounts:
        """Reads the columns of a file."""
        ids, *counts = (table[name].to_numpy() for name in COUNT_COLUMNS)
        return cls(ids, np.stack(counts, axis=1))


KeyCounts = Mapping[KeyPart, IdCounts]


def merge_counts(parts: Iterable[KeyCounts]) -> dict[KeyPart, IdCounts]:
    """Adds counts up by key; holds about as much as the result, however many parts there are."""
    merged: dict[KeyPart, IdCounts] = {}
    pending: dict[KeyPart, list[IdCounts]] = {}
    for found in parts:
        for part, counts in found.items():
            waiting = pending.setdefault(part, [])
            waiting.append(counts)
            known = merged.get(part, IdCounts())
            if sum(len(one.ids) for one in waiting) > max(len(known.ids), _PENDING_IDS):
                merged[part], pending[part] = _add([known, *waiting]), []
    return {part: _add([merged.get(part, IdCounts()), *found]) for part, found in pending.items()}


def _add(parts: Sequence[IdCounts]) -> IdCounts:
    ids = np.concatenate([part.ids for part in parts])
    counts = np.concatenate([part.counts for part in parts])
    order = np.argsort(ids, kind="stable")
    ids, counts = ids[order], counts[order]
    starts = np.flatnonzero(np.append(True, ids[1:] != ids[:-1]))[: len(ids)]
    return IdCounts(ids[starts], np.add.reduceat(counts, starts, axis=0) if len(ids) else counts)


class IdBag:
    """Counts ids; few passes over many of them."""

    def __init__(self) -> None:
        self._parts: list[IdCounts] = []
        self._pending: list[np.ndarray] = []
        self._size = 0

    def add(self, ids: np.ndarray) -> None:
        """Adds ids, int64 `[n]`."""
        self._pending.append(ids)
        self._size += len(ids)
        if self._size >= _PENDING_IDS:
            self._flush()

    def _flush(self) -> None:
        if self._size:
            ids, counts = _count(np.concatenate(self._pending))
            self._parts.append(IdCounts(ids, counts[:, np.newaxis]))
        self._pending, self._size = [], 0

    def counts_of(self, ids: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Returns ids and their counts: those that were met, or the given ones, ascending."""
        self._flush()
        empty = IdCounts(counts=np.zeros((0, 1), np.int64))
        merged = _add([empty, *self._parts])
        self._parts = [merged]
        if ids is None:
            return merged.ids, merged.counts[:, 0]
        counts = np.zeros(len(ids), np.int64)
        counts[np.searchsorted(ids, merged.ids)] = merged.counts[:, 0]
        return ids, counts


def _count(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distinct ids, ascending, and how often each occurs."""
    if ids.min() >= 0 and ids.max() < max(_DENSE_IDS, 4 * len(ids)):
        counts = np.bincount(ids)
        distinct = np.flatnonzero(counts)
        return distinct, counts[distinct]
    return np.unique(ids, return_counts=True)


class TrainCounter:
    """Counts the keys of train rows.

    Args:
        keys: What is counted.
        absent: Id by key of rows that lack it; left out: that of unknown values.
    """

    def __init__(self, keys: CountedKeys, absent: Mapping[str, int] | None = None) -> None:
        self._keys, self._absent = keys, absent or {}
        # Where one says the same as another, it is that one.
        same_positives = keys.label is None or keys.has_drawn
        same_events = not keys.has_drawn and keys.history is None
        self._bags: dict[KeyPart, tuple[IdBag, IdBag, IdBag]] = {}
        for part in keys.features:
            rows = IdBag()
            events = rows if same_events else IdBag()
            self._bags[part] = (rows, events, events if same_positives else IdBag())

    @classmethod
    def build(cls, keys: CountedKeys, schema: FeatureSchema) -> TrainCounter:
        """Builds it for records of a schema, whose keys of 64 bits say what is absent."""
        specs = [schema[name] for name in keys.features.values()]
        pads = {spec.name: spec.pad_value for spec in specs if spec.vocabulary_size is None}
        return cls(keys, {name: int(pad) for name, pad in pads.items() if pad is not None})

    def update(self, batch: pa.RecordBatch) -> None:
        """Adds rows.

        Args:
            batch: Columns, the keys' inputs among them; other ones are not looked at.
        """
        keys = self._keys
        every = np.ones(batch.num_rows, bool)
        positive = every if keys.label is None else _find_positive(batch.column(keys.label))
        event = positive if keys.has_drawn else every
        history = None if keys.history is None else _Lists.of(batch.column(keys.history), keys)
        for part, name in keys.features.items():
            column = batch.column(name).cast(pa.int64())
            ids = column.fill_null(self._absent.get(name, OOV_ID)).to_numpy(zero_copy_only=False)
            met: set[int] = set()
            for bag, chosen in zip(self._bags[part], (None, event, positive), strict=True):
                if id(bag) in met:
                    continue
                met.add(id(bag))
                bag.add(ids if chosen is None else ids[chosen])
                if chosen is not None and history is not None:
                    bag.add(history.choose(chosen, ids if part == "user" else None))

    def result(self) -> dict[KeyPart, IdCounts]:
        """Returns the counts by key."""
        counts: dict[KeyPart, IdCounts] = {}
        for part, bags in self._bags.items():
            ids = bags[0].counts_of()[0]
            for bag in bags[1:]:
                ids = np.union1d(ids, bag.counts_of()[0])
            counts[part] = IdCounts(ids, np.stack([bag.counts_of(ids)[1] for bag in bags], axis=1))
        return counts


@dataclass(frozen=True)
class _Lists:
    """Lists of ids, flat: `ids` of all rows, and the `lengths` of each row's."""

    ids: np.ndarray
    lengths: np.ndarray

    @classmethod
    def of(cls, column: pa.Array, keys: CountedKeys) -> _Lists:
        lengths, values = _measure_lists(column), column.flatten()
        while is_list(values.type):  # The steps of a feature list.
            ends = np.append(0, np.cumsum(_measure_lists(values)))
            rows = np.append(0, np.cumsum(lengths))
            lengths, values = np.diff(ends[rows]), values.flatten()
        return cls(*keys.cut(values.cast(pa.int64()).to_numpy(zero_copy_only=False), lengths))

    def choose(self, rows: np.ndarray, owners: np.ndarray | None) -> np.ndarray:
        """Ids of the chosen rows' lists; with owners, the owner of each id in its place."""
        if owners is not None:
            return np.repeat(owners[rows], self.lengths[rows])
        return self.ids[np.repeat(rows, self.lengths)]


def _measure_lists(column: pa.Array) -> np.ndarray:
    lengths = pc.fill_null(pc.list_value_length(column), 0)
    return np.asarray(lengths.to_numpy(zero_copy_only=False), np.int64)


def _find_positive(label: pa.Array) -> np.ndarray:
    values = pc.fill_null(label.cast(pa.float64()), 0.0).to_numpy(zero_copy_only=False)
    return values > 0


@dataclass(frozen=True)
class CountsRequest:
    """What a write is asked to count.

    Attributes:
        directory: Where its tasks leave their parts; there already.
        keys: What is counted.
    """

    directory: str
    keys: CountedKeys

    @classmethod
    def build(
        cls,
        directory: str,
        keys: DatasetKeys,
        schema: FeatureSchema,
        config: Mapping[str, Any],
    ) -> CountsRequest:
        """Builds it of a dataset's keys and features, and the resolved config that made it."""
        return cls(directory, find_counted(keys, schema, config))

    def open(self, shard: str) -> ShardCounts | None:
        """Returns what counts a shard, or None where nothing of it is counted.

        Args:
            shard: Its path, relative to the version; those of train are counted.
        """
        if not self.keys.features or shard.partition("/")[0] != TRAIN:
            return None
        return ShardCounts(TrainCounter(self.keys), self._part(shard))

    def collect(self, shards: Sequence[ShardInfo]) -> dict[KeyPart, IdCounts]:
        """Merges the parts of shards.

        Raises:
            InternalError: A part is not there, or has not counted every row.
        """
        if not self.keys.features:
            return {}
        missing = [shard.path for shard in shards if not self._part(shard.path).is_file()]
        if missing:
            raise _build_error(f"nothing for {missing[0]}", "a part for each train shard")
        counts = merge_counts(self._read_part(shard.path) for shard in shards)
        check_rows(counts, sum(shard.rows for shard in shards))
        return counts

    def _read_part(self, shard: str) -> dict[KeyPart, IdCounts]:
        table = read_parquet(self._part(shard))
        return {
            part: IdCounts.from_table(table.filter(pc.equal(table["part"], part)))
            for part in self.keys.features
        }

    def _part(self, shard: str) -> Path:
        # From the extension on, writers differ.
        stem = shard.partition(".tfrecord")[0]
        return Path(self.directory, stem.replace("/", "+") + ".parquet")


@dataclass(frozen=True)
class ShardCounts:
    """Counts of a shard that is being written, and the file that they go to."""

    counter: TrainCounter
    path: Path

    def write(self) -> None:
        """Writes them; an attempt that is made again writes the same."""
        id_counts = self.counter.result()
        tables = [
            counts.to_table().append_column("part", pa.array([part] * len(counts.ids), pa.string()))
            for part, counts in id_counts.items()
        ]
        with atomic_file(self.path, durable=False) as target:
            _write_table(pa.concat_tables(tables), target)


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
        if counts.rows != rows:
            raise _build_error(f"{counts.rows:,} rows by {part}", f"{rows:,}, as were written")


def _build_error(received: str, allowed: str) -> InternalError:
    return InternalError(
        "the train counts are not those of the train records",
        received=received,
        allowed=allowed,
        fix="nothing was published; run again, and report this if it stays",
    )


def count_shards(
    version: Path, manifest: Manifest, shards: Sequence[ShardInfo]
) -> dict[KeyPart, IdCounts]:
    """Counts shards of a published version by reading them.

    Args:
        version: Its directory.
        manifest: Its manifest.
        shards: Those of its train split that are counted.

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
    counter = TrainCounter.build(keys, manifest.schema)
    for shard in shards if wire else ():
        path, record_type = version / shard.path, manifest.record_type
        for batch in read_batches(path, wire, record_type=record_type, slots=manifest.slots):
            counter.update(batch)
    return counter.result()


def count_kept(
    version: Path, manifest: Manifest, kept: Sequence[ShardInfo]
) -> dict[KeyPart, IdCounts]:
    """Counts the train shards of a version that the next one takes over.

    They are all but a few: what was counted of the whole, without those few. A version that has
    counted nothing is read.

    Args:
        version: Its directory.
        manifest: Its manifest.
        kept: Shards of its train split.

    Raises:
        InputDataError: The version's counts are damaged, or those of other shards.
    """
    if not manifest.train_counts:
        return count_shards(version, manifest, kept)
    paths = {shard.path for shard in kept}
    left_out = [shard for shard in manifest.split(TRAIN).shards if shard.path not in paths]
    taken = count_shards(version, manifest, left_out)
    whole = read_counts(version, manifest)
    return {part: counts.without(taken[part]) for part, counts in whole.items()}


def write_counts(version: Path, found: KeyCounts) -> dict[str, FileInfo]:
    """Writes the counts of a version.

    Args:
        version: Its directory.
        found: Counts by key.

    Returns:
        The files by key, as the manifest lists them.
    """
    if found:
        (version / TRAIN_COUNTS_DIR).mkdir(exist_ok=True)
    files: dict[str, FileInfo] = {}
    for part, counts in found.items():
        path = version / counts_path(part)
        with atomic_file(path) as target:
            _write_table(counts.to_table(), target)
        files[part] = describe_file(version, path)
    return files


def read_counts(version: ReadablePath, manifest: Manifest) -> dict[KeyPart, IdCounts]:
    """Reads the counts of a version, as far as it has counted.

    Raises:
        InputDataError: A file is missing, or not the one that the manifest lists.
    """
    parts: tuple[KeyPart, ...] = ("user", "item")
    listed = {part: manifest.train_counts[part] for part in parts if part in manifest.train_counts}
    return {part: _read_listed(version, info) for part, info in listed.items()}


def _read_listed(version: ReadablePath, info: FileInfo) -> IdCounts:
    path = version / info.path
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputDataError(f"cannot read {path}", received=error.strerror) from error
    if f"{crc32c(content):08x}" != info.crc32c:
        raise InputDataError(
            f"{path} is not the file that the manifest lists",
            received=f"checksum {crc32c(content):08x}",
            allowed=info.crc32c,
            fix="restore it, roll back to an earlier version, or build again",
        )
    return IdCounts.from_table(read_parquet(pa.BufferReader(content)))

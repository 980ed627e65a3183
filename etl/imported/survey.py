"""The one pass over the files: records decoded, checked, brought into Sluice's order, and counted.

Sluice's ids start at 2: 0 pads, 1 stands for an absent value. Files of one's own often count from 0
or 1: there ids move up by an `offset`. Models take position 0 of a list as the latest: lists that
are ordered the other way turn. Records are written anew where one of the two is so; other files are
linked or copied.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conf.artefacts.train_counts import IdCounter, TrainCounter, find_counted
from conf.errors import InputDataError
from conf.manifest import InputFile, ShardInfo
from conf.schema import OOV_ID, PAD_ID
from conf.splits import TRAIN
from conf.storage.locations import Compression
from etl.imported.mapping import RecordMapping
from etl.quality.label_statistics import LabelFocus
from etl.quality.statistics import StatisticsAccumulator
from etl.records.feature_lists import flatten_lists, nest_lists, nest_schema
from etl.records.train_counts import CountedColumns
from etl.tfrecord.codec.crc32c import describe_file
from etl.tfrecord.codec.decode import build_decoder
from etl.tfrecord.codec.framing import HEADER_BYTES, detect_compression, read_record_blocks
from etl.tfrecord.codec.infer import count_feature_lists
from etl.tfrecord.files.writer import ShardOptions
from etl.tfrecord.table import TableWriter
from etl.tfrecord.types.parts import ListRows, list_lengths, offsets_of, split_lists


@dataclass(frozen=True)
class SurveyedFile:
    """A file that was read through, and stands in the version."""

    info: ShardInfo
    statistics: dict[str, Any]
    compression: Compression | None


class Survey:
    """Reads files through, and brings them into the version.

    `shards` are the files by split, `keys` counts users and items of train records, `tokens` the
    ids of each table whose ids move, `padded` the lists of each feature that begin with padding.
    """

    def __init__(self, mapping: RecordMapping, staging: Path) -> None:
        self._mapping, self._staging = mapping, staging
        wire = [feature.wire for feature in mapping.features]
        self._decoder = build_decoder(wire, mapping.record_type, mapping.slots)
        counted = find_counted(mapping.keys, mapping.schema, {})
        self._columns = CountedColumns.build(counted, mapping.schema)
        labels = tuple(spec.name for spec in mapping.schema.by_role("label"))
        self._focus = None
        if counted.label is not None:
            self._focus = LabelFocus(counted.label, (), mapping.keys.weight, labels)
        self._counted = _find_counted_ids(mapping)
        self.keys = TrainCounter(counted)
        self.padded: Counter[str] = Counter()
        self.tokens = {table: IdCounter() for table in self._counted}
        self.shards: dict[str, list[SurveyedFile]] = {split: [] for split in mapping.config.splits}

    def read(self, file: InputFile) -> None:
        """Reads a file, and links, copies or writes it anew as the next shard of its split."""
        source, mapping = Path(file.path), self._mapping
        number = len(self.shards[file.source])
        target = self._staging / file.source / f"{number:05d}-{source.name}"
        target.parent.mkdir(exist_ok=True)
        with source.open("rb") as handle:
            compression = detect_compression(handle.read(HEADER_BYTES))
        statistics = StatisticsAccumulator(mapping.arrow_schema, self._focus)
        rows, with_lists = 0, 0
        with self._open_writer(target, compression) as writer:
            for block in read_record_blocks(file.path):
                batch = self._decoder.decode_block(block, file.path)
                batch = _rearrange(mapping, batch, f"{file.path}, from record {block.first_record}")
                statistics.update(batch)
                self.padded.update(_count_padded(mapping, batch))
                if file.source == TRAIN:
                    self._count(batch)
                rows += batch.num_rows
                with_lists += count_feature_lists(block)
                if writer is not None:
                    writer.write(nest_lists(batch, mapping.feature_lists))
        mapping.check_file(file, rows, with_lists)
        if writer is None:
            _bring(source, target, mapping.config.output.files)
        described = describe_file(self._staging, target)
        info = ShardInfo(described.path, rows, described.bytes, described.crc32c)
        self.shards[file.source].append(SurveyedFile(info, statistics.to_dict(), compression))

    def _open_writer(
        self, target: Path, compression: Compression | None
    ) -> AbstractContextManager[TableWriter | None]:
        mapping = self._mapping
        if not mapping.config.writes_anew:
            return nullcontext()
        schema = nest_schema(mapping.arrow_schema, mapping.feature_lists)
        return TableWriter(target, schema, ShardOptions(mapping.record_type, compression))

    def _count(self, batch: pa.RecordBatch) -> None:
        self.keys.add(self._columns.read(batch))
        for table, name in self._counted.items():
            column = batch.column(name)
            ids = column.flatten() if pa.types.is_list(column.type) else column
            self.tokens[table].add_ids(ids.drop_null().to_numpy())


def _find_counted_ids(mapping: RecordMapping) -> dict[str, str]:
    """By table whose ids move, the feature whose ids count: user or item, a scalar, or a list."""
    named = (mapping.keys.user, mapping.keys.item)
    moved = [feature for feature in mapping.features if feature.offset]
    moved.sort(key=lambda feature: (feature.name not in named, feature.spec.is_list))
    return {feature.spec.table: feature.name for feature in reversed(moved)}


def _count_padded(mapping: RecordMapping, batch: pa.RecordBatch) -> dict[str, int]:
    """By feature, the lists that begin with padding and hold ids behind it."""
    found: dict[str, int] = {}
    for name in (f.name for f in mapping.features if f.is_embedded and f.spec.is_list):
        values, rows = split_lists(batch.column(name))
        firsts = rows.offsets[:-1][_count_unpadded(batch.column(name), PAD_ID) > 0]
        found[name] = int((values.to_numpy()[firsts] == PAD_ID).sum())
    return found


def _bring(source: Path, target: Path, how: str) -> None:
    if how == "copy":
        shutil.copyfile(source, target)
        with target.open("rb") as handle:
            os.fsync(handle.fileno())
        return
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        target.symlink_to(source)


def _rearrange(mapping: RecordMapping, batch: pa.RecordBatch, where: str) -> pa.RecordBatch:
    """Joins steps of feature lists, turns lists and moves ids; errors say `where` records lie."""
    for name in mapping.feature_lists:
        _check_steps(name, batch.column(name), where)
    batch = flatten_lists(batch, mapping.feature_lists)
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    for group in mapping.config.aligned:
        _check_aligned({name: columns[name] for name in group}, where)
    columns |= _turn(mapping, columns, where)
    for feature in mapping.features:
        if feature.offset:
            columns[feature.name] = move_ids(columns[feature.name], feature.offset)
    return pa.RecordBatch.from_arrays(list(columns.values()), schema=mapping.arrow_schema)


def _check_steps(name: str, column: pa.ListArray, where: str) -> None:
    """Refuses steps of several values: a row of Sluice holds a list of values at most."""
    steps, rows = split_lists(column)
    values = split_lists(steps)[1].lengths
    if (values != 1).any():
        step = int(np.argmax(values != 1))
        raise InputDataError(
            f"{where}: feature list {name!r} has a step of other than one value",
            received=f"{values[step]} values, in row {rows.row_of(step)}",
            fix="write a feature list for each place of a step, or leave it out of `features`",
        )


def _check_aligned(columns: dict[str, pa.ListArray], where: str) -> None:
    lengths = np.array([list_lengths(column) for column in columns.values()])
    wrong = (lengths != lengths[0]).any(axis=0)
    if wrong.any():
        row = int(np.argmax(wrong))
        found = (f"{name} {n}" for name, n in zip(columns, lengths[:, row], strict=True))
        raise InputDataError(
            f"{where}: lists that are to be aligned are not equally long",
            received=f"{', '.join(found)} values, in row {row}; {wrong.sum():,} such records",
        )


def _turn(
    mapping: RecordMapping, columns: dict[str, pa.Array], where: str
) -> dict[str, pa.ListArray]:
    """Turns lists round, each up to where its ids, or those beside it, are padded."""
    turned = [feature for feature in mapping.features if feature.config.turns]
    lengths = {f.name: list_lengths(columns[f.name]) for f in turned}
    ends = {f.name: _count_unpadded(columns[f.name], f.pad) for f in turned if f.is_embedded}
    kept = dict(ends)
    for name in (name for name in lengths if name not in ends):
        groups = (group for group in mapping.config.aligned if name in group)
        beside = [ends[other] for group in groups for other in group if other in ends]
        kept[name] = beside[0] if beside else lengths[name]
        for ids, end in ends.items() if not beside else ():
            # Nothing tells the end of a list that is as long as a padded one.
            if (end < lengths[ids]).any() and np.array_equal(lengths[ids], lengths[name]):
                raise InputDataError(
                    f"{where}: {ids!r} is padded at its end, and {name!r} is as long",
                    fix=f"name them by `aligned: [[{ids}, {name}]]`, so that both are cut",
                )
    return {name: _turn_list(columns[name], kept[name]) for name in lengths}


def _count_unpadded(column: pa.ListArray, pad: int) -> np.ndarray:
    """Number of values of each list without the padding at its end, int64 `[rows]`."""
    values, rows = split_lists(column)
    places = np.where(values.to_numpy() == pad, -1, np.arange(len(values)))
    last = np.append(-1, np.maximum.accumulate(places))[rows.offsets[1:]]
    return np.maximum(last + 1 - rows.offsets[:-1], 0)


def _turn_list(column: pa.ListArray, kept: np.ndarray) -> pa.ListArray:
    """Turns the first values of each list round; the others are padding, and left out."""
    values, rows = split_lists(column)
    ends = np.cumsum(kept)
    # Of value k, in a list that ends before e: the value at b + e - 1 - k, b where it begins now.
    places = np.repeat(rows.offsets[:-1] + ends - 1, kept) - np.arange(kept.sum())
    turned = ListRows(offsets_of(kept), rows.is_null)
    return turned.build(values.take(pa.array(places)), column.type)


def move_ids(column: pa.Array, offset: int) -> pa.Array:
    """Moves ids up; 1 - offset, which is none, becomes padding in a list, else an absent value."""
    if pa.types.is_list(column.type):
        values, rows = split_lists(column)
        moved = move_ids(values, offset)
        is_none = pc.equal(moved, OOV_ID).fill_null(False)
        return rows.build(pc.if_else(is_none, pa.scalar(PAD_ID, pa.int64()), moved), column.type)
    # A sum beyond 64 bits would be a negative id; there is no table for either.
    highest = pa.scalar(np.iinfo(np.int64).max - offset, pa.int64())
    moved = pc.add(pc.min_element_wise(column, highest, skip_nulls=False), offset)
    # What is below none stays negative, to be refused.
    return pc.if_else(pc.less(column, OOV_ID - offset), column, moved)

"""Spreads a stream of batches over files of limited size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from conf.errors import ConfigError
from conf.manifest import ShardInfo
from etl.tfrecord.record_offsets import find_record_starts
from etl.tfrecord.shard_file import ShardFile, ShardOptions
from etl.tfrecord.shard_target import open_target
from etl.tfrecord.storage import Storage


@dataclass(frozen=True)
class ShardLimits:
    """When a file is full.

    Attributes:
        rows: Records at most, or None for no limit.
        bytes: Bytes at most, as stored, or None; a record that is longer gets a file of its own.
    """

    rows: int | None = None
    bytes: int | None = None

    def __post_init__(self) -> None:
        """Refuses limits below 1.

        Raises:
            ConfigError: A limit is not positive.
        """
        for name, limit in (("rows", self.rows), ("bytes", self.bytes)):
            if limit is not None and limit < 1:
                raise ConfigError(
                    f"bad limit of {name} per shard", received=limit, allowed="1 or more, or none"
                )

    @property
    def is_none(self) -> bool:
        """Whether there is no limit at all."""
        return self.rows is None and self.bytes is None


@dataclass(frozen=True)
class WrittenShard:
    """A finished file.

    Attributes:
        info: Path relative to the root that it was written under, rows, bytes and checksum.
        split_offsets: Byte offsets at which records begin, see `ShardFile`.
        statistics: Statistics of its features, or None.
        has_index: Whether its side file was written.
    """

    info: ShardInfo
    split_offsets: tuple[int, ...]
    statistics: dict[str, Any] | None = None
    has_index: bool = False


class _Accumulator(Protocol):
    def update(self, batch: pa.RecordBatch) -> None: ...

    def to_dict(self) -> dict[str, Any]: ...


class _Encoder(Protocol):
    def encode_chunks(self, batch: pa.RecordBatch, chunk_rows: int) -> Any: ...


@dataclass(frozen=True)
class ShardPlan:
    """What all files of a task have in common.

    Attributes:
        root: Directory that the names are relative to.
        options: Record type and compression.
        limits: When a file is full.
        index: Whether side files are written.
        build_accumulator: Makes what collects the statistics of a file, or None.
    """

    root: Path | Storage
    options: ShardOptions
    limits: ShardLimits = ShardLimits()
    index: bool = False
    build_accumulator: Callable[[pa.Schema], _Accumulator] | None = None


class RollingWriter:
    """Writes batches to as many files as the limits ask for; opens none before its first record.

    Attributes:
        shards: Files finished so far.
    """

    def __init__(self, plan: ShardPlan, encoder: _Encoder, name: Callable[[], str]) -> None:
        """Plans the files; touches none yet.

        Args:
            plan: What the files have in common.
            encoder: Encoder of the batches; may be shared with writers of the same thread.
            name: Gives the path of the next file, relative to the root.
        """
        self.shards: list[WrittenShard] = []
        self._plan, self._encoder, self._name = plan, encoder, name
        self._file: ShardFile | None = None
        self._path = ""
        self._accumulator: _Accumulator | None = None

    def write(self, batch: pa.RecordBatch) -> None:
        """Appends a batch.

        Args:
            batch: Rows in the encoder's schema.

        Raises:
            InputDataError: A value that the wire cannot carry.
            OSError: A file cannot be written.
        """
        done = seen = 0
        for framed in self._encoder.encode_chunks(batch, self._plan.options.chunk_rows):
            starts, first = find_record_starts(framed), 0
            while first < len(starts) - 1:
                file = self._file or self._open(batch.schema)
                rows = self._count_fitting(file, framed, starts[first:])
                if rows:
                    last = first + rows
                    piece = framed[starts[first] : starts[last]]
                    file.append(piece, starts[first : last + 1] - starts[first])
                    first, done = last, done + rows
                if first < len(starts) - 1:  # full, and there is more to come
                    self._observe(batch, seen, done)
                    seen = done
                    self.finish_file()
        self._observe(batch, seen, done)

    def _open(self, schema: pa.Schema) -> ShardFile:
        plan, self._path = self._plan, self._name()
        target = open_target(plan.root, self._path, plan.index)
        if plan.build_accumulator is not None:
            self._accumulator = plan.build_accumulator(schema)
        self._file = ShardFile(target, plan.options)
        return self._file

    def _count_fitting(self, file: ShardFile, framed: np.ndarray, starts: np.ndarray) -> int:
        """How many of the records go into the file, at least one where it is empty."""
        limits, rows = self._plan.limits, len(starts) - 1
        if limits.rows is not None:
            rows = min(rows, limits.rows - file.rows)
        if limits.bytes is None or rows == 0:
            return rows
        if file.fits(framed[starts[0] : starts[rows]], limits.bytes):
            return rows
        fitting, too_many = 0, rows
        while too_many - fitting > 1:
            middle = (fitting + too_many) // 2
            if file.fits(framed[starts[0] : starts[middle]], limits.bytes):
                fitting = middle
            else:
                too_many = middle
        return max(fitting, 0 if file.rows else 1)

    def _observe(self, batch: pa.RecordBatch, first: int, last: int) -> None:
        if self._accumulator is not None and last > first:
            self._accumulator.update(batch.slice(first, last - first))

    def finish_file(self) -> None:
        """Closes the open file, if there is one; the next record begins another."""
        if self._file is None:
            return
        file, self._file = self._file, None
        info = file.finish()
        statistics = None if self._accumulator is None else self._accumulator.to_dict()
        self._accumulator = None
        self.shards.append(
            WrittenShard(
                ShardInfo(self._path, info.rows, info.bytes, info.crc32c),
                tuple(file.split_offsets),
                statistics,
                self._plan.index,
            )
        )

    def discard(self) -> None:
        """Closes and removes the open file; finished ones stay."""
        if self._file is not None:
            file, self._file = self._file, None
            file.discard()

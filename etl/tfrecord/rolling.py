"""Spreads a stream of batches over files of limited size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from conf.manifest import ShardInfo
from etl.tfrecord.publishing.written_shard import ShardLimits, WrittenShard
from etl.tfrecord.record_offsets import find_record_starts
from etl.tfrecord.shard_file import ShardFile, ShardOptions
from etl.tfrecord.shard_target import open_target
from etl.tfrecord.storage import Storage


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
    limits: ShardLimits = field(default_factory=ShardLimits)
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

"""Shard files on their way to disk or to an object store: there whole or not at all."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from conf.errors import ConfigError
from conf.manifest import ShardInfo
from conf.storage.atomic_output import atomic_file
from conf.storage.locations import Compression
from conf.storage.object_store import Storage
from etl.tfrecord.codec.crc32c import crc32c
from etl.tfrecord.codec.encode import CHUNK_ROWS, Encoder
from etl.tfrecord.codec.framing import find_starts
from etl.tfrecord.files.data_files import ShardLimits, WrittenShard, index_path, make_folders
from etl.tfrecord.types.features import RecordType

SPLIT_POINT_BYTES = 16 << 20
_WBITS = {"GZIP": 31, "ZLIB": 15}
# More than zlib may hold back before a flush, and more than a flush and a trailer add.
_HELD_BACK_BYTES = 192 << 10


def find_record_starts(framed: np.ndarray) -> np.ndarray:
    """Offsets of whole records in uint8 `[bytes]`, and of their end; int64 `[records + 1]`."""
    return np.append(find_starts(framed), framed.size)


class _DiscardedError(Exception):
    """Ends a file that is not wanted."""


class _LocalOutput:
    """A file under a hidden name, which takes its own in the end."""

    def __init__(self, path: Path) -> None:
        with contextlib.ExitStack() as opening:
            unfinished = opening.enter_context(atomic_file(path))
            self.stream: Any = opening.enter_context(unfinished.open("xb", buffering=1 << 18))
            self._open = opening.pop_all()

    def finish(self) -> None:
        self._open.close()

    def discard(self) -> None:
        with contextlib.suppress(_DiscardedError), self._open:
            raise _DiscardedError


class _StoredOutput:
    """An upload to an object that no one else writes."""

    def __init__(self, storage: Storage, key: str) -> None:
        self._storage, self._key, self._is_finished = storage, key, False
        self.stream: Any = storage.open_output(key)

    def finish(self) -> None:
        self.stream.close()
        self._is_finished = True

    def discard(self) -> None:
        """Ends the upload, which cannot be called off, and deletes what came of it."""
        if not self._is_finished:
            self._is_finished = True
            with contextlib.suppress(OSError):
                self.stream.close()
            with contextlib.suppress(OSError):
                self._storage.delete(self._key)


def _open_outputs(root: Path | Storage, names: list[str]) -> list[_LocalOutput | _StoredOutput]:
    if isinstance(root, Storage):
        return [_StoredOutput(root, name) for name in names]
    make_folders(root, names)
    return [_LocalOutput(root / name) for name in names]


@dataclass(frozen=True)
class ShardOptions:
    """How a shard is written.

    Attributes:
        record_type: Record type, as `build_encoder` takes it.
        compression: None, `"GZIP"` or `"ZLIB"`, as TensorFlow names them.
        compression_level: zlib's level, 1 (fast) to 9 (small).
        chunk_rows: Rows encoded at a time.
    """

    record_type: RecordType = "Example"
    compression: Compression | None = None
    compression_level: int = 6
    chunk_rows: int = CHUNK_ROWS

    def __post_init__(self) -> None:
        levels, allowed = range(1, 10), "compression None, 'GZIP' or 'ZLIB', its level 1 to 9"
        if self.compression not in (None, *_WBITS) or self.compression_level not in levels:
            raise ConfigError("bad shard options", received=self, allowed=allowed)


class ShardFile:
    """An open shard below a root: takes framed records, and appears when it is finished.

    Equal records give equal bytes: the gzip header carries neither time nor name. Records begin at
    `split_offsets` of an uncompressed file, some `SPLIT_POINT_BYTES` apart, zero left out.
    """

    def __init__(
        self, root: Path | Storage, path: str, options: ShardOptions, has_index: bool = False
    ) -> None:
        self.rows = 0
        self.split_offsets: list[int] = []
        self._path, self._bytes, self._crc = path, 0, 0
        self._compress: Any = None
        if options.compression is not None:
            wbits = _WBITS[options.compression]
            self._compress = zlib.compressobj(options.compression_level, zlib.DEFLATED, wbits)
        self._outputs = _open_outputs(root, [path, index_path(path)] if has_index else [path])

    def append(self, framed: np.ndarray, starts: np.ndarray) -> None:
        """Appends whole records, uint8 `[bytes]`, with the offsets of each and of the end."""
        if self._compress is None:
            self._note_splits(starts)
            for index in self._outputs[1:]:
                index.stream.write(_format_index(starts, self._bytes))
            self._put(framed)
        else:
            self._put(self._compress.compress(framed))
        self.rows += len(starts) - 1

    def _note_splits(self, starts: np.ndarray) -> None:
        while True:
            offset = (self.split_offsets[-1] if self.split_offsets else 0) + SPLIT_POINT_BYTES
            record = int(np.searchsorted(starts, offset - self._bytes))
            if record >= len(starts) - 1:  # the end of these records need not begin another one
                return
            self.split_offsets.append(self._bytes + int(starts[record]))

    def fits(self, framed: np.ndarray, limit_bytes: int) -> bool:
        """Whether the finished file would not pass a limit, were it to get these records too."""
        if self._compress is None:
            return self._bytes + framed.size <= limit_bytes
        bound = framed.size + framed.size // 512 + _HELD_BACK_BYTES
        if self._bytes + bound <= limit_bytes:
            return True
        trial = self._compress.copy()
        return self._bytes + len(trial.compress(framed)) + len(trial.flush()) <= limit_bytes

    def _put(self, data: Any) -> None:
        self._outputs[0].stream.write(data)
        self._crc = crc32c(data, self._crc)
        self._bytes += len(data)

    def finish(self) -> ShardInfo:
        """Gives the file its name, its index first; nothing is left of one that fails."""
        try:
            if self._compress is not None:
                self._put(self._compress.flush())
            for output in reversed(self._outputs):
                output.finish()
        finally:
            self.discard()
        return ShardInfo(self._path, self.rows, self._bytes, f"{self._crc:08x}")

    def discard(self) -> None:
        """Leaves nothing of it, unless it is finished already."""
        with contextlib.ExitStack() as stack:
            for output in self._outputs:
                stack.callback(output.discard)


def _format_index(starts: np.ndarray, offset: int) -> bytes:
    """A line `<byte offset> <bytes>` per record, framing included."""
    pairs = zip((starts[:-1] + offset).tolist(), np.diff(starts).tolist(), strict=True)
    return "".join(f"{start} {size}\n" for start, size in pairs).encode("ascii")


class ShardStatistics(Protocol):
    """Collects what is to be known of a shard's records, and the rows that they come from."""

    def update(self, batch: pa.RecordBatch, source: pa.RecordBatch | None = None) -> None: ...

    def to_dict(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class RollingPlan:
    """What all files of a task have in common; statistics are built for the file at a path."""

    root: Path | Storage
    options: ShardOptions
    limits: ShardLimits = field(default_factory=ShardLimits)
    index: bool = False
    build_statistics: Callable[[pa.Schema, str], ShardStatistics] | None = None


class RollingWriter:
    """Writes batches to as many files as the limits ask for; opens none before its first record.

    A name is asked for as each file begins. An encoder may be shared by writers of one thread.
    """

    def __init__(self, plan: RollingPlan, encoder: Encoder, name: Callable[[], str]) -> None:
        self.shards: list[WrittenShard] = []
        self._plan, self._encoder, self._name = plan, encoder, name
        self._file: ShardFile | None = None
        self._statistics: ShardStatistics | None = None

    def write(self, batch: pa.RecordBatch, source: pa.RecordBatch | None = None) -> None:
        """Appends rows; statistics are also of those that they were encoded from."""
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
                    self._observe(batch, source, seen, done)
                    seen = done
                    self.finish_file()
        self._observe(batch, source, seen, done)

    def _open(self, schema: pa.Schema) -> ShardFile:
        plan, path = self._plan, self._name()
        self._file = ShardFile(plan.root, path, plan.options, plan.index)
        if plan.build_statistics is not None:
            self._statistics = plan.build_statistics(schema, path)
        return self._file

    def _count_fitting(self, file: ShardFile, framed: np.ndarray, starts: np.ndarray) -> int:
        """How many of the records go into the file, at least one where it is empty."""
        limits, rows = self._plan.limits, len(starts) - 1
        if limits.rows is not None:
            rows = min(rows, limits.rows - file.rows)
        if limits.bytes is None or rows == 0:
            return rows
        fitting, middle, too_many = 0, rows, rows + 1
        while too_many - fitting > 1:
            if file.fits(framed[starts[0] : starts[middle]], limits.bytes):
                fitting = middle
            else:
                too_many = middle
            middle = (fitting + too_many) // 2
        return max(fitting, 0 if file.rows else 1)

    def _observe(
        self, batch: pa.RecordBatch, source: pa.RecordBatch | None, first: int, last: int
    ) -> None:
        if self._statistics is not None and last > first:
            rows = None if source is None else source.slice(first, last - first)
            self._statistics.update(batch.slice(first, last - first), rows)

    def finish_file(self) -> None:
        """Closes the open file, if there is one; the next record begins another."""
        if self._file is None:
            return
        file, self._file = self._file, None
        info, splits = file.finish(), tuple(file.split_offsets)
        statistics = None if self._statistics is None else self._statistics.to_dict()
        self.shards.append(WrittenShard(info, splits, statistics, self._plan.index))

    def discard(self) -> None:
        """Closes and removes the open file; finished ones stay."""
        if self._file is not None:
            file, self._file = self._file, None
            file.discard()

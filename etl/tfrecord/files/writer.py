"""Shard files on their way to disk or to an object store: there whole or not at all.

`ShardWriter` writes one file, `RollingWriter` spreads batches over files of limited size.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import pyarrow as pa

from conf.errors import ConfigError
from conf.manifest import ShardInfo
from conf.storage.atomic_output import AtomicFile
from conf.storage.locations import Compression
from conf.storage.object_store import Storage
from etl.tfrecord.codec.crc32c import crc32c
from etl.tfrecord.codec.encode import CHUNK_ROWS, build_encoder
from etl.tfrecord.codec.framing import FOOTER_BYTES, HEADER_BYTES
from etl.tfrecord.codec.kernels import kernel, load_i64
from etl.tfrecord.files.data_files import (
    ShardLimits,
    WrittenShard,
    format_index,
    index_path,
    make_folders,
)
from etl.tfrecord.types.features import RecordType

_FRAME_BYTES = HEADER_BYTES + FOOTER_BYTES


@kernel
def _walk(address: int, size: int, starts: np.ndarray) -> int:
    position, n = 0, 0
    while position < size:
        starts[n] = position
        n += 1
        position += load_i64(address + position) + _FRAME_BYTES
    starts[n] = position
    return n


def find_record_starts(framed: np.ndarray) -> np.ndarray:
    """Finds the records of a buffer by their lengths, without verifying anything.

    Args:
        framed: Whole sound records, contiguous uint8 `[bytes]`.

    Returns:
        Offset of each record and, last, of the end; int64 `[records + 1]`.
    """
    # Room for the most records that could fit; pages that are not needed are never touched.
    starts = np.empty(framed.size // _FRAME_BYTES + 1, np.int64)
    records = _walk(framed.ctypes.data, framed.size, starts)
    return starts[: records + 1]


class ShardTarget(Protocol):
    """Takes the bytes of one shard and, where it has one, of its side file."""

    name: str
    shard: Any
    index: Any

    def finish(self) -> None:
        """Makes the shard appear, or leaves nothing of it."""

    def discard(self) -> None:
        """Leaves nothing, unless it has appeared already."""


class LocalTarget:
    """A temporary file next to the target, which takes its name in the end."""

    def __init__(self, path: Path, index: Path | None = None) -> None:
        self.name = path.name
        self._output = AtomicFile(path)
        self.shard = self._output.unfinished.open("xb", buffering=1 << 18)
        self.index = None if index is None else index.open("xb", buffering=1 << 18)

    def finish(self) -> None:
        try:
            self.shard.flush()
            if self.index is not None:
                self.index.flush()
                os.fsync(self.index.fileno())
            self._output.publish()
        finally:
            self.discard()

    def discard(self) -> None:
        try:
            if self.index is not None:
                self.index.close()
            self.shard.close()  # flushes, and so fails on a full disk
        finally:
            self._output.discard()


class StoredTarget:
    """An upload to an object that no one else writes."""

    def __init__(self, storage: Storage, key: str, index: str | None = None) -> None:
        self.name = key.rpartition("/")[2]
        self._storage = storage
        self._uploads = {name: storage.open_output(name) for name in (key, index) if name}
        self.shard, self.index = self._uploads[key], self._uploads.get(index or "")

    def finish(self) -> None:
        """Ends the uploads, the shard's last."""
        for stream in reversed(self._uploads.values()):
            stream.close()
        self._uploads.clear()

    def discard(self) -> None:
        """Ends the uploads, which cannot be called off, and deletes what came of them."""
        for key, stream in self._uploads.items():
            with contextlib.suppress(OSError):
                stream.close()
            with contextlib.suppress(OSError):
                self._storage.delete(key)
        self._uploads.clear()


def open_target(root: Path | Storage, path: str, has_index: bool) -> ShardTarget:
    """Opens a shard below a directory that exists; folders in between are made."""
    side = index_path(path) if has_index else None
    if isinstance(root, Storage):
        return StoredTarget(root, path, side)
    make_folders(root, [path, *([side] if side else [])])
    return LocalTarget(root / path, root / side if side else None)


SPLIT_POINT_BYTES = 16 << 20

_WBITS = {"GZIP": 31, "ZLIB": 15}
# More than zlib may hold back before a flush, and more than a flush and a trailer add.
_HELD_BACK_BYTES = 192 << 10


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
        for name, value, valid, allowed in (
            ("compression", self.compression, self.compression in (None, *_WBITS),
             "None, 'GZIP' or 'ZLIB'"),
            ("compression_level", self.compression_level, 1 <= self.compression_level <= 9,
             "1 to 9"),
            ("chunk_rows", self.chunk_rows, self.chunk_rows >= 1, "1 or more"),
        ):  # fmt: skip
            if not valid:
                raise ConfigError(f"bad shard option {name}", received=value, allowed=allowed)


class ShardFile:
    """An open shard: takes framed records, and appears under its name when it is closed.

    Equal records give equal bytes: the gzip header carries neither time nor name.

    Attributes:
        rows: Records so far.
        split_offsets: Byte offsets at which records begin, `SPLIT_POINT_BYTES` apart or a little
            more, zero left out; empty where the file is compressed.
    """

    def __init__(self, target: ShardTarget, options: ShardOptions) -> None:
        self.rows = 0
        self.split_offsets: list[int] = []
        self._target = target
        self._compress: Any = None
        if options.compression is not None:
            wbits = _WBITS[options.compression]
            self._compress = zlib.compressobj(options.compression_level, zlib.DEFLATED, wbits)
        self._bytes, self._crc = 0, 0

    def append(self, framed: np.ndarray, starts: np.ndarray) -> None:
        """Appends whole records.

        Args:
            framed: Their bytes, uint8 `[bytes]`.
            starts: Offset of each in `framed` and, last, of the end; int64 `[records + 1]`.
        """
        if self._compress is None:
            self._note_splits(starts)
            if self._target.index is not None:
                self._target.index.write(format_index(starts, self._bytes).encode("ascii"))
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
        self._target.shard.write(data)
        self._crc = crc32c(data, self._crc)
        self._bytes += len(data)

    def finish(self) -> ShardInfo:
        """Closes the file and gives it its name; nothing is left of one that cannot be written."""
        try:
            if self._compress is not None:
                self._put(self._compress.flush())
            self._target.finish()
        finally:
            self._target.discard()
        return ShardInfo(self._target.name, self.rows, self._bytes, f"{self._crc:08x}")

    def discard(self) -> None:
        """Leaves nothing of it, unless it is finished already."""
        self._target.discard()


class ShardStatistics(Protocol):
    """Collects what is to be known of a shard's records."""

    def update(self, batch: pa.RecordBatch, source: pa.RecordBatch | None = None) -> None:
        """Takes records in, and the rows that they were encoded from."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """The statistics as JSON."""
        ...


class _Encoder(Protocol):
    def encode_chunks(self, batch: pa.RecordBatch, chunk_rows: int) -> Any: ...


@dataclass(frozen=True)
class RollingPlan:
    """What all files of a task have in common.

    Attributes:
        root: Directory that the names are relative to.
        options: Record type and compression.
        limits: When a file is full.
        index: Whether side files are written.
        build_statistics: Builds the statistics of a file from the records' schema and its path,
            relative to the root; or None.
    """

    root: Path | Storage
    options: ShardOptions
    limits: ShardLimits = field(default_factory=ShardLimits)
    index: bool = False
    build_statistics: Callable[[pa.Schema, str], ShardStatistics] | None = None


class RollingWriter:
    """Writes batches to as many files as the limits ask for; opens none before its first record.

    A name is asked for as each file begins. An encoder may be shared by writers of one thread.

    Attributes:
        shards: Files finished so far.
    """

    def __init__(self, plan: RollingPlan, encoder: _Encoder, name: Callable[[], str]) -> None:
        self.shards: list[WrittenShard] = []
        self._plan, self._encoder, self._name = plan, encoder, name
        self._file: ShardFile | None = None
        self._path = ""
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
        plan, self._path = self._plan, self._name()
        target = open_target(plan.root, self._path, plan.index)
        if plan.build_statistics is not None:
            self._statistics = plan.build_statistics(schema, self._path)
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
        info = file.finish()
        statistics = None if self._statistics is None else self._statistics.to_dict()
        self._statistics = None
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


class ShardWriter:
    """Context manager that writes one TFRecord file.

    The bytes go to a temporary file next to the target, which takes the target's name on a clean
    exit and is removed on an exception. Equal batches give equal bytes.

    Example:
        >>> with ShardWriter(path, batch.schema) as writer:
        ...     writer.write(batch)
        >>> writer.info.rows
    """

    def __init__(
        self, path: str | Path, schema: pa.Schema, options: ShardOptions | None = None
    ) -> None:
        self.path = Path(path)
        self._options = options or ShardOptions()
        self._encoder = build_encoder(schema, self._options.record_type)
        self._info: ShardInfo | None = None

    def __enter__(self) -> Self:
        self._file = ShardFile(LocalTarget(self.path), self._options)
        return self

    def write(self, batch: pa.RecordBatch) -> None:
        """Appends a batch of the planned schema."""
        for framed in self._encoder.encode_chunks(batch, self._options.chunk_rows):
            self._file.append(framed, find_record_starts(framed))

    @property
    def info(self) -> ShardInfo:
        """Name, rows, bytes and checksum of the finished file; a RuntimeError before that."""
        if self._info is None:
            raise RuntimeError(f"{self.path} is not finished; read `info` after the with block")
        return self._info

    @property
    def split_offsets(self) -> tuple[int, ...]:
        """Byte offsets at which records begin, see `ShardFile`."""
        return tuple(self._file.split_offsets)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._info = self._file.finish()
        else:
            self._file.discard()

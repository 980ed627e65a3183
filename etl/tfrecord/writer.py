"""Writes Arrow batches to one shard file that appears whole or not at all."""

from __future__ import annotations

import os
import uuid
import zlib
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import pyarrow as pa

from conf.errors import ConfigError
from conf.manifest import ShardInfo
from etl.tfrecord.crc32c import crc32c
from etl.tfrecord.encode import CHUNK_ROWS, RecordType, build_encoder
from etl.tfrecord.framing import Compression

_WBITS = {"GZIP": 31, "ZLIB": 15}


@dataclass(frozen=True)
class ShardOptions:
    """How a shard is written.

    Attributes:
        record_type: `"Example"`, or `"ByteArray"` for one binary column as raw payloads.
        compression: None, `"GZIP"` or `"ZLIB"`, as TensorFlow names them.
        compression_level: zlib's level, 1 (fast) to 9 (small).
        chunk_rows: Rows encoded at a time.
    """

    record_type: RecordType = "Example"
    compression: Compression | None = None
    compression_level: int = 6
    chunk_rows: int = CHUNK_ROWS

    def __post_init__(self) -> None:
        """Refuses values outside the ranges above.

        Raises:
            ConfigError: Unknown compression, or a level or row count out of range.
        """
        for name, value, valid, allowed in (
            ("compression", self.compression, self.compression in (None, *_WBITS),
             "None, 'GZIP' or 'ZLIB'"),
            ("compression_level", self.compression_level, 1 <= self.compression_level <= 9,
             "1 to 9"),
            ("chunk_rows", self.chunk_rows, self.chunk_rows >= 1, "1 or more"),
        ):  # fmt: skip
            if not valid:
                raise ConfigError(f"bad shard option {name}", received=value, allowed=allowed)


class ShardWriter:
    """Context manager that writes one TFRecord file.

    The bytes go to a temporary file next to the target, which takes the target's name on a clean
    exit and is removed on an exception. Equal batches give equal bytes: the gzip header carries
    neither time nor name.

    Example:
        >>> with ShardWriter(path, batch.schema) as writer:
        ...     writer.write(batch)
        >>> writer.info.rows
    """

    def __init__(
        self, path: str | Path, schema: pa.Schema, options: ShardOptions | None = None
    ) -> None:
        """Plans the encoding; touches no file yet.

        Args:
            path: Target file; its directory must exist.
            schema: Schema of the batches.
            options: Record type and compression; the defaults if None.

        Raises:
            ConfigError: Columns that the record type cannot carry.
        """
        self.path = Path(path)
        options = options or ShardOptions()
        self._encoder = build_encoder(schema, options.record_type)
        self._options = options
        self._temporary = self.path.with_name(f".{self.path.name}.{uuid.uuid4().hex}.tmp")
        self._compress = (
            None
            if options.compression is None
            else zlib.compressobj(
                options.compression_level, zlib.DEFLATED, _WBITS[options.compression]
            )
        )
        self._rows, self._bytes, self._crc = 0, 0, 0
        self._info: ShardInfo | None = None

    def __enter__(self) -> Self:
        self._file = self._temporary.open("xb", buffering=1 << 18)
        return self

    def write(self, batch: pa.RecordBatch) -> None:
        """Appends a batch.

        Args:
            batch: Rows in the planned schema.

        Raises:
            InputDataError: A value that the wire cannot carry.
            OSError: The file cannot be written.
        """
        for chunk in self._encoder.encode_chunks(batch, self._options.chunk_rows):
            view = chunk.data
            self._append(view if self._compress is None else self._compress.compress(view))
        self._rows += batch.num_rows

    @property
    def info(self) -> ShardInfo:
        """Name, rows, bytes and checksum of the finished file.

        Raises:
            RuntimeError: The writer has not been closed cleanly.
        """
        if self._info is None:
            raise RuntimeError(f"{self.path} is not finished; read `info` after the with block")
        return self._info

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            try:
                self._file.close()  # flushes, and so fails on a full disk
            finally:
                self._temporary.unlink(missing_ok=True)  # already renamed after a clean end

    def _append(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._crc = crc32c(data, self._crc)
        self._bytes += len(data)

    def _finish(self) -> None:
        if self._compress is not None:
            self._append(self._compress.flush())
        self._file.flush()
        os.fsync(self._file.fileno())
        self._temporary.replace(self.path)
        sync_directory(self.path.parent)
        self._info = ShardInfo(self.path.name, self._rows, self._bytes, f"{self._crc:08x}")


def sync_directory(directory: Path) -> None:
    """Makes renames in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

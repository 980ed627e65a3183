"""Writes Arrow batches to one shard file that appears whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import pyarrow as pa

from conf.manifest import ShardInfo
from etl.tfrecord.encode import build_encoder
from etl.tfrecord.record_offsets import find_record_starts
from etl.tfrecord.shard_file import ShardFile, ShardOptions
from etl.tfrecord.shard_target import LocalTarget

__all__ = ["ShardOptions", "ShardWriter"]


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
        """Plans the encoding; touches no file yet.

        Args:
            path: Target file; its directory must exist.
            schema: Schema of the batches.
            options: Record type and compression; the defaults if None.

        Raises:
            ConfigError: Columns that the record type cannot carry.
        """
        self.path = Path(path)
        self._options = options or ShardOptions()
        self._encoder = build_encoder(schema, self._options.record_type)
        self._info: ShardInfo | None = None

    def __enter__(self) -> Self:
        self._file = ShardFile(LocalTarget(self.path), self._options)
        return self

    def write(self, batch: pa.RecordBatch) -> None:
        """Appends a batch.

        Args:
            batch: Rows in the planned schema.

        Raises:
            InputDataError: A value that the wire cannot carry.
            OSError: The file cannot be written.
        """
        for framed in self._encoder.encode_chunks(batch, self._options.chunk_rows):
            self._file.append(framed, find_record_starts(framed))

    @property
    def info(self) -> ShardInfo:
        """Name, rows, bytes and checksum of the finished file.

        Raises:
            RuntimeError: The writer has not been closed cleanly.
        """
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

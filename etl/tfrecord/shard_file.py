"""One shard on its way to disk: compressed, checksummed, counted, and whole or not at all."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from conf.errors import ConfigError
from conf.manifest import ShardInfo
from etl.tfrecord.crc32c import crc32c
from etl.tfrecord.encode import CHUNK_ROWS
from etl.tfrecord.framing import Compression
from etl.tfrecord.record_types import RecordType
from etl.tfrecord.shard_target import ShardTarget
from etl.tfrecord.side_index import format_index

SPLIT_BYTES = 16 << 20

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


class ShardFile:
    """An open shard: takes framed records, and appears under its name when it is closed.

    Equal records give equal bytes: the gzip header carries neither time nor name.

    Attributes:
        rows: Records so far.
        split_offsets: Byte offsets at which records begin, `SPLIT_BYTES` apart or a little more,
            zero left out; empty where the file is compressed.
    """

    def __init__(self, target: ShardTarget, options: ShardOptions) -> None:
        """Starts an empty shard.

        Args:
            target: Where its bytes go.
            options: Compression.
        """
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

        Raises:
            OSError: The file cannot be written.
        """
        if self._compress is None:
            self._note_splits(starts)
            if self._target.has_index:
                self._target.write_index(format_index(starts, self._bytes))
            self._put(framed)
        else:
            self._put(self._compress.compress(framed))
        self.rows += len(starts) - 1

    def _note_splits(self, starts: np.ndarray) -> None:
        while True:
            wanted = (self.split_offsets[-1] if self.split_offsets else 0) + SPLIT_BYTES
            place = int(np.searchsorted(starts, wanted - self._bytes))
            if place >= len(starts) - 1:  # the end of these records need not begin another one
                return
            self.split_offsets.append(self._bytes + int(starts[place]))

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
        self._target.write(data)
        self._crc = crc32c(data, self._crc)
        self._bytes += len(data)

    def finish(self) -> ShardInfo:
        """Closes the file and gives it its name.

        Returns:
            Name, rows, bytes and checksum.

        Raises:
            OSError: The file cannot be written; nothing is left of it.
        """
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

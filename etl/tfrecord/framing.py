"""TFRecord framing: where the records of a file are, with every length and checksum verified.

A record is `length: uint64 | masked CRC-32C of length | payload | masked CRC-32C of payload`, all
little-endian (tensorflow/core/lib/io/record_reader.h).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np

from conf.errors import ConfigError
from etl.tfrecord import framing_kernels as k
from etl.tfrecord.block_cutter import BlockCutter, RecordBlock, scan_buffer
from etl.tfrecord.byte_source import ByteSource, Compression, Opener, is_intact, open_local
from etl.tfrecord.framing_kernels import FOOTER_BYTES, HEADER_BYTES, MAX_RECORD_BYTES
from etl.tfrecord.recovery import (
    FIX_CORRUPT,
    REASONS,
    BadRange,
    CorruptRecordError,
    DamageReport,
    corrupt_record,
)

__all__ = [
    "FIX_CORRUPT", "FOOTER_BYTES", "HEADER_BYTES", "MAX_RECORD_BYTES", "BadRange",
    "Compression", "CorruptRecordError", "RecordBlock", "corrupt_record", "detect_compression",
    "index_records", "read_record_blocks", "read_records",
]  # fmt: skip

_BLOCK_BYTES = 4 << 20


def index_records(data: np.ndarray | bytes, name: str = "<buffer>") -> np.ndarray:
    """Locates and verifies all records of a buffer that holds a whole uncompressed file.

    Args:
        data: The file's bytes.
        name: What to call the buffer in an error.

    Returns:
        Start and length of each payload, int64 `[records, 2]`.

    Raises:
        CorruptRecordError: A record is truncated or a checksum does not match.
    """
    buffer = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data
    index, position, reason, _ = scan_buffer(np.ascontiguousarray(buffer), verify=True)
    if reason:
        raise corrupt_record(name, position, len(index), REASONS[reason])
    return index


def detect_compression(head: bytes) -> Compression | None:
    """Tells the compression from a file's first bytes.

    A sound TFRecord header (its CRC matches) is never mistaken for a compressed stream.

    Args:
        head: The first 12 bytes, or the whole file if that is shorter.
    """
    if len(head) >= HEADER_BYTES:
        _, _, reason, _ = scan_buffer(np.frombuffer(head[:HEADER_BYTES], np.uint8), verify=False)
        if reason in (k.SOUND, k.CUT_PAYLOAD, k.TOO_LONG):
            return None
    if head[:3] == b"\x1f\x8b\x08":
        return "GZIP"
    if len(head) >= 2 and head[0] & 0x0F == 8 and (head[0] << 8 | head[1]) % 31 == 0:
        return "ZLIB"
    return None


def _check_compression(compression: str | None) -> None:
    if compression not in (None, "auto", "GZIP", "ZLIB"):
        raise ConfigError(
            "unknown TFRecord compression",
            received=repr(compression),
            allowed="None, 'GZIP', 'ZLIB' or 'auto'",
        )


def read_record_blocks(
    path: str | Path,
    *,
    compression: Compression | Literal["auto"] | None = "auto",
    block_bytes: int = _BLOCK_BYTES,
    verify: bool = True,
    start: int = 0,
    stop: int | None = None,
    on_corrupt: Callable[[BadRange], None] | None = None,
    opener: Opener = open_local,
) -> Iterator[RecordBlock]:
    """Reads a file, or a range of an uncompressed one, as runs of whole, verified records.

    Holds one block at a time: `block_bytes`, or the longest record where that is more.

    With `on_corrupt`, damage is told to it and passed over. A record whose length is sound and
    whose payload is not is bad alone. Past anything else reading resumes at the next place where a
    record stands with both of its checksums; what a damaged compressed stream holds behind the
    damage is lost.

    Args:
        path: TFRecord file, plain or compressed.
        compression: `None`, `"GZIP"`, `"ZLIB"`, or `"auto"` to tell from the content.
        block_bytes: Bytes to read at a time, before framing is cut; at least 1.
        verify: Whether payload checksums are verified (lengths always are).
        start: Byte offset of a record to start at.
        stop: Byte offset of a record to stop before, None for the end.
        on_corrupt: Receives damage; None to raise it.
        opener: Opens the file for reading and seeking, where it is not a local one.

    Yields:
        Blocks in file order, none of them empty. Record numbers count from `start`, and a bad
        range as one record.

    Raises:
        CorruptRecordError: Truncated, a checksum does not match, or the compressed stream is
            damaged; names the file, the byte offset and the reason.
        ConfigError: Unknown compression, or a range of a compressed file.
        OSError: The file cannot be read.
    """
    _check_compression(compression)
    is_range = start > 0 or stop is not None
    if is_range and compression not in (None, "auto"):
        raise ConfigError("no range of a compressed file can be read", received=path)
    with opener(path) as file:
        if compression == "auto":
            compression = None if is_range else detect_compression(file.read(HEADER_BYTES))
        file.seek(start)
        limit = None if stop is None else max(0, stop - start)
        source = ByteSource(file, compression, limit=limit, is_salvaging=on_corrupt is not None)
        name = f"{path} (from byte {start} on)" if start else str(path)
        report = DamageReport(
            name, compression is not None, on_corrupt, lambda: is_intact(path, compression, opener)
        )
        yield from BlockCutter(source, start, report).cut(block_bytes, verify)


def read_records(
    path: str | Path, *, compression: Compression | Literal["auto"] | None = "auto"
) -> Iterator[bytes]:
    """Reads a file's payloads one by one.

    Args:
        path: TFRecord file, plain or compressed.
        compression: As for `read_record_blocks`.

    Yields:
        Payloads in file order.

    Raises:
        CorruptRecordError: As for `read_record_blocks`.
    """
    for block in read_record_blocks(path, compression=compression):
        for start, length in block.index.tolist():
            yield block.data[start : start + length].tobytes()

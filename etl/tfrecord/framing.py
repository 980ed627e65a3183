"""TFRecord framing: where the records of a file are, with every length and checksum verified.

A record is `length: uint64 | masked CRC-32C of length | payload | masked CRC-32C of payload`, all
little-endian (tensorflow/core/lib/io/record_reader.h).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from conf.errors import ConfigError, InputDataError
from etl.tfrecord.crc32c import masked_crc
from etl.tfrecord.kernels import kernel, load_u32, load_u64

Compression = Literal["GZIP", "ZLIB"]

HEADER_BYTES = 12
FOOTER_BYTES = 4
MAX_RECORD_BYTES = 2**31 - 1  # what a protobuf message may hold

_BLOCK_BYTES = 4 << 20
_REASONS = {
    1: "truncated header (fewer than 12 bytes are left)",
    2: "checksum of the length does not match",
    3: "truncated payload (the record reaches past the end)",
    4: "checksum of the payload does not match",
    5: f"record longer than {MAX_RECORD_BYTES} bytes",
}
_TRUNCATED = (1, 3)


class CorruptRecordError(InputDataError):
    """A TFRecord file whose bytes cannot be trusted: truncated, altered, or no TFRecord at all."""


@dataclass(frozen=True)
class RecordBlock:
    """A run of whole records in memory.

    Attributes:
        data: Bytes of the records with their framing, uint8 `[bytes]`.
        index: Start and length of each payload in `data`, int64 `[records, 2]`.
        offset: Position of `data[0]` in the (uncompressed) file.
        first_record: Number of records before this block.
    """

    data: np.ndarray
    index: np.ndarray
    offset: int
    first_record: int


@kernel
def _scan(address: int, length: int, verify: bool, index: np.ndarray) -> Any:
    """Fills `index` record by record; stops at the first that is not whole and sound.

    Returns:
        Records found, position of the first byte not covered, reason (0 at the end of the data),
        and the payload length that the record there claims.
    """
    position, n = 0, 0
    while position < length:
        if length - position < HEADER_BYTES:
            return n, position, 1, 0
        header = address + position
        if load_u32(header + 8) != masked_crc(header, 8):
            return n, position, 2, 0
        claimed = load_u64(header)
        if claimed > np.uint64(MAX_RECORD_BYTES):
            return n, position, 5, 0
        payload: Any = np.int64(claimed)
        if payload > length - position - (HEADER_BYTES + FOOTER_BYTES):
            return n, position, 3, payload
        start = header + HEADER_BYTES
        if verify and load_u32(start + payload) != masked_crc(start, payload):
            return n, position, 4, payload
        index[n, 0] = position + HEADER_BYTES
        index[n, 1] = payload
        n += 1
        position += HEADER_BYTES + payload + FOOTER_BYTES
    return n, position, 0, 0


def _scan_buffer(data: np.ndarray, verify: bool) -> tuple[np.ndarray, int, int, int]:
    # Room for the most records that could fit; pages that are not needed are never touched.
    index = np.empty((data.size // (HEADER_BYTES + FOOTER_BYTES) + 1, 2), np.int64)
    n, position, reason, payload = _scan(data.ctypes.data, data.size, verify, index)
    return index[:n].copy(), position, reason, payload


def corrupt_record(
    name: str, offset: int, record: int, reason: str, compressed: bool = False
) -> CorruptRecordError:
    """Builds the error for a bad record.

    Args:
        name: File, or another name of the buffer.
        offset: Byte offset of the record, in the uncompressed stream.
        record: Number of records before it.
        reason: What is wrong.
        compressed: Whether the file is compressed.
    """
    place = f"byte offset {offset}{' of the uncompressed stream' if compressed else ''}"
    return CorruptRecordError(
        f"{name}: {reason}, at {place} (record {record})",
        allowed="an intact TFRecord file",
        fix="write or copy the file again; compare its size and CRC-32C with the manifest's",
    )


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
    index, position, reason, _ = _scan_buffer(np.ascontiguousarray(buffer), verify=True)
    if reason:
        raise corrupt_record(name, position, len(index), _REASONS[reason])
    return index


def detect_compression(head: bytes) -> Compression | None:
    """Tells the compression from a file's first bytes.

    A sound TFRecord header (its CRC matches) is never mistaken for a compressed stream.

    Args:
        head: The first 12 bytes, or the whole file if that is shorter.
    """
    if len(head) >= HEADER_BYTES:
        _, _, reason, _ = _scan_buffer(np.frombuffer(head[:HEADER_BYTES], np.uint8), verify=False)
        if reason in (0, 3, 5):
            return None
    if head[:3] == b"\x1f\x8b\x08":
        return "GZIP"
    if len(head) >= 2 and head[0] & 0x0F == 8 and (head[0] << 8 | head[1]) % 31 == 0:
        return "ZLIB"
    return None


class _Source:
    """Reads a file, inflating it where it is compressed, in pieces of bounded size."""

    def __init__(self, file: BinaryIO, compression: Compression | None) -> None:
        self._file = file
        self._wbits = 31 if compression == "GZIP" else 15
        self._inflate = None if compression is None else zlib.decompressobj(self._wbits)
        self._pending = b""

    def read(self, limit: int) -> bytes:
        """Returns at most `limit` bytes; none at the end of the stream.

        Raises:
            zlib.error: The compressed stream is damaged.
            EOFError: The compressed stream ends early.
        """
        if self._inflate is None:
            return self._file.read(limit)
        while True:
            data = self._pending or self._file.read(1 << 20)
            if not data and self._inflate.eof:
                return b""
            if self._inflate.eof:  # a further member of a concatenated stream
                self._inflate = zlib.decompressobj(self._wbits)
            piece = self._inflate.decompress(data, limit)
            self._pending = self._inflate.unconsumed_tail or self._inflate.unused_data
            if piece:
                return piece
            if not data:  # nor was any output left inside the decompressor
                raise EOFError


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
) -> Iterator[RecordBlock]:
    """Reads a file as runs of whole, verified records.

    Holds one block at a time: `block_bytes`, or the longest record where that is more.

    Args:
        path: TFRecord file, plain or compressed.
        compression: `None`, `"GZIP"`, `"ZLIB"`, or `"auto"` to tell from the content.
        block_bytes: Bytes to read at a time, before framing is cut; at least 1.
        verify: Whether payload checksums are verified (lengths always are).

    Yields:
        Blocks in file order, none of them empty.

    Raises:
        CorruptRecordError: Truncated, a checksum does not match, or the compressed stream is
            damaged; names the file, the byte offset and the reason.
        ConfigError: Unknown compression.
        OSError: The file cannot be read.
    """
    _check_compression(compression)
    with Path(path).open("rb", buffering=0) as file:
        if compression == "auto":
            compression = detect_compression(file.read(HEADER_BYTES))
            file.seek(0)
        yield from _cut_blocks(_Source(file, compression), str(path), block_bytes, verify,
                               compression is not None)  # fmt: skip


def _cut_blocks(
    source: _Source, name: str, block_bytes: int, verify: bool, compressed: bool
) -> Iterator[RecordBlock]:
    offset, records, rest, wanted = 0, 0, np.empty(0, np.uint8), block_bytes
    while True:
        try:
            data, ended = _read_up_to(source, rest, wanted)
        except (zlib.error, EOFError) as error:
            reason = f"damaged compressed stream ({str(error) or 'it ends early'})"
            raise corrupt_record(name, offset, records, reason, compressed) from error
        index, position, reason_code, payload = _scan_buffer(data, verify)
        if reason_code and (ended or reason_code not in _TRUNCATED):
            bad = offset + position
            raise corrupt_record(name, bad, records + len(index), _REASONS[reason_code], compressed)
        if len(index):
            yield RecordBlock(data[:position], index, offset, records)
        if ended:
            return
        offset, records, rest = offset + position, records + len(index), data[position:]
        wanted = max(block_bytes, HEADER_BYTES + payload + FOOTER_BYTES)


def _read_up_to(source: _Source, rest: np.ndarray, wanted: int) -> tuple[np.ndarray, bool]:
    """Returns `rest` followed by fresh bytes up to `wanted` in all, and whether the stream ended.

    Memory follows the bytes that really arrive, not the length that a header claims.
    """
    pieces, size = [rest], rest.size
    while size < max(wanted, rest.size + 1):
        piece = source.read(max(wanted, rest.size + 1) - size)
        if not piece:
            return np.concatenate(pieces), True
        pieces.append(np.frombuffer(piece, np.uint8))
        size += len(piece)
    return np.concatenate(pieces), False


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

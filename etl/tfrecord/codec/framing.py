"""TFRecord framing: where the records of a file are, with every length and checksum verified.

A record is `length: uint64 | masked CRC-32C of length | payload | masked CRC-32C of payload`,
all little-endian. A stream is cut into blocks of whole records, past damage where that is
wanted; `CorruptRecordError` and `BadRange` say what is wrong with the bytes. Records are framed
as they are encoded: `frame` in `codec/encode_kernels.py`.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from conf.errors import ConfigError, InputDataError
from conf.storage.locations import ByteSource, Compression, Opener, is_intact, open_local
from etl.tfrecord.codec.crc32c import masked_crc
from etl.tfrecord.codec.kernels import allocate, inlined, kernel, load_u32, load_u64

HEADER_BYTES = 12
FOOTER_BYTES = 4
MAX_RECORD_BYTES = 2**31 - 1  # what a protobuf message may hold

# Why a record is not whole and sound.
SOUND, CUT_HEADER, BAD_LENGTH, CUT_PAYLOAD, BAD_PAYLOAD, TOO_LONG = 0, 1, 2, 3, 4, 5


@inlined
def _is_sound_header(header):
    return load_u32(header + 8) == masked_crc(header, 8)


@kernel
def scan_records(address, length, verify, index):
    """Fills `index` record by record; stops at the first that is not whole and sound.

    Returns records found, position of the first byte not covered, reason (`SOUND` at the end of the
    data), and the payload length that the record there claims.
    """
    position: Any = 0
    n = 0
    while position < length:
        if length - position < HEADER_BYTES:
            return n, position, CUT_HEADER, 0
        header = address + position
        if not _is_sound_header(header):
            return n, position, BAD_LENGTH, 0
        claimed = load_u64(header)
        if claimed > np.uint64(MAX_RECORD_BYTES):
            return n, position, TOO_LONG, 0
        payload = np.int64(claimed)
        if payload > length - position - (HEADER_BYTES + FOOTER_BYTES):
            return n, position, CUT_PAYLOAD, payload
        start = header + HEADER_BYTES
        if verify and load_u32(start + payload) != masked_crc(start, payload):
            return n, position, BAD_PAYLOAD, payload
        index[n, 0] = position + HEADER_BYTES
        index[n, 1] = payload
        n += 1
        position += HEADER_BYTES + payload + FOOTER_BYTES
    return n, position, SOUND, 0


@kernel
def find_record(address, length, ended):
    """Finds the first position at which a whole record stands, both of its checksums holding.

    Returns it (`length` where there is none), and the bytes that must be there from it on before it
    can be judged, or 0 where it is decided.
    """
    position = 0
    while position + HEADER_BYTES <= length:
        header = address + position
        # The upper half of a possible length is zero, which is quicker to see than a checksum.
        if load_u32(header + 4) == np.uint32(0) and _is_sound_header(header):
            payload = np.int64(load_u32(header))
            if payload <= length - position - (HEADER_BYTES + FOOTER_BYTES):
                start = header + HEADER_BYTES
                if load_u32(start + payload) == masked_crc(start, payload):
                    return position, 0
            elif not ended and payload <= MAX_RECORD_BYTES:
                return position, HEADER_BYTES + payload + FOOTER_BYTES
        position += 1
    if ended:
        return length, 0
    return position, HEADER_BYTES


REASONS = {
    CUT_HEADER: "truncated header (fewer than 12 bytes are left)",
    BAD_LENGTH: "checksum of the length does not match",
    CUT_PAYLOAD: "truncated payload (the record reaches past the end)",
    BAD_PAYLOAD: "checksum of the payload does not match",
    TOO_LONG: f"record longer than {MAX_RECORD_BYTES} bytes",
}
FIX_CORRUPT = "write or copy the file again; compare its size and CRC-32C with the manifest's"


class CorruptRecordError(InputDataError):
    """A TFRecord file whose bytes cannot be trusted: truncated, altered, or no TFRecord at all."""


@dataclass(frozen=True)
class BadRange:
    """Bytes of a file that are no sound record; a long range arrives piece by piece."""

    offset: int  # in the (uncompressed) file
    data: np.ndarray  # uint8 [bytes]
    record: int | None  # how many are before it; None where earlier damage hides that
    reason: str
    continues: bool = False  # whether it is a further piece of the range told before


def corrupt_record(
    name: str, offset: int, record: int, reason: str, compressed: bool = False
) -> CorruptRecordError:
    """Builds the error for a bad record; the offset is that in the uncompressed stream."""
    place = f"byte offset {offset}{' of the uncompressed stream' if compressed else ''}"
    return CorruptRecordError(
        f"{name}: {reason}, at {place} (record {record})",
        allowed="an intact TFRecord file",
        fix=FIX_CORRUPT,
    )


_TRUNCATED = (CUT_HEADER, CUT_PAYLOAD)
_DAMAGED = "damaged compressed stream"
_REST = "what follows is lost"
_AT_ONCE_BYTES = 16 << 20


@dataclass(frozen=True)
class RecordBlock:
    """A run of whole records in memory."""

    data: np.ndarray  # their bytes with framing, uint8 [bytes]
    index: np.ndarray  # start and length of each payload in `data`, int64 [records, 2]
    offset: int  # of `data[0]` in the (uncompressed) file
    first_record: int  # how many are before this block

    def locate(self, record: int) -> tuple[int, int]:
        """Offset and number of a record in the file."""
        return self.offset + int(self.index[record, 0]), self.first_record + record

    def cut(self, rows: slice) -> RecordBlock:
        """The same bytes with some of their records."""
        return RecordBlock(self.data, self.index[rows], self.offset, self.first_record)


def scan_buffer(data: np.ndarray, verify: bool) -> tuple[np.ndarray, int, int, int]:
    """Index of a buffer's payloads, and what `scan_records` says of the place after them."""
    # Room for the most records that could fit; pages that are not needed are never touched.
    index = np.empty((data.size // (HEADER_BYTES + FOOTER_BYTES) + 1, 2), np.int64)
    n, position, reason, payload = scan_records(data.ctypes.data, data.size, verify, index)
    return index[:n].copy(), position, reason, payload


def begins_record(head: np.ndarray | bytes) -> bool:
    """Whether a sound header stands at the beginning of some bytes."""
    given = np.frombuffer(head[:HEADER_BYTES], np.uint8)
    return len(given) == HEADER_BYTES and scan_buffer(given, False)[2] in (CUT_PAYLOAD, TOO_LONG)


def find_starts(data: np.ndarray) -> np.ndarray:
    """Starts of records, int64 `[records]`; what follows an unsound header belongs to the last."""
    position, starts = 0, [np.empty(0, np.int64)]
    while position < data.size:
        piece = data[position : position + _AT_ONCE_BYTES]
        index, size, reason, payload = scan_buffer(piece, verify=False)
        starts.append(index[:, 0] + position - HEADER_BYTES)
        position += size
        if reason == CUT_PAYLOAD:
            starts.append(np.array([position]))
            position += HEADER_BYTES + payload + FOOTER_BYTES
        elif size == 0:
            break
    return np.concatenate(starts)


class BlockCutter:
    """Cuts a stream into blocks; knows how far it has come."""

    def __init__(
        self, source: ByteSource, offset: int, report: Callable[[BadRange, int], None],
        is_intact: Callable[[], bool] | None,
    ) -> None:  # fmt: skip
        """Starts at the beginning of a record, at this offset of the (uncompressed) file.

        Args:
            source: The stream.
            offset: Where it begins.
            report: Takes a bad range and the number of its first record, or raises.
            is_intact: Whether bytes past damage are what was written: in a compressed stream they
                may repeat what was before, checksums and all. None where `report` raises.
        """
        self._source, self._report, self._is_intact = source, report, is_intact
        self._offset, self._records = offset, 0
        self._lost: str | None = None  # why no record has been found again yet
        self._is_counted, self._has_ended_early, self._has_told = True, False, False

    def cut(self, block_bytes: int, verify: bool) -> Iterator[RecordBlock]:
        """Yields the blocks in order, none of them empty; `block_bytes` are read at a time."""
        rest, wanted, ended = np.empty(0, np.uint8), block_bytes, False
        while not ended:
            data, ended = _read_up_to(self._source, rest, wanted)
            position, needed = 0, 0
            while position < data.size and not needed:
                if self._lost is not None:
                    size, needed = self._search(data[position:], ended)
                    position += size
                    continue
                index, size, reason, payload = scan_buffer(data[position:], verify)
                if len(index):
                    yield RecordBlock(
                        data[position : position + size], index, self._offset, self._records
                    )
                self._offset, self._records = self._offset + size, self._records + len(index)
                position += size
                if reason in _TRUNCATED and not ended:
                    needed = HEADER_BYTES + payload + FOOTER_BYTES
                elif reason:
                    position += self._meet_damage(data[position:], reason, payload, ended)
            rest, wanted = data[position:], max(block_bytes, needed)
        if self._source.failure is not None and not self._has_ended_early:
            self._tell(np.empty(0, np.uint8), f"{self._source.failure}; {_REST}")

    def _meet_damage(self, data: np.ndarray, reason: int, payload: int, ended: bool) -> int:
        """Reports a bad record, or begins to search; returns the bytes that are done with."""
        if self._source.failure is not None and reason in _TRUNCATED:
            self._tell(data, f"{self._source.failure}; {_REST}")
            self._source.failure = None
            return data.size
        size = HEADER_BYTES + payload + FOOTER_BYTES
        left = data.size - size
        if reason == BAD_PAYLOAD and (
            (ended and left == 0)
            or (not ended and left < HEADER_BYTES)
            or begins_record(data[size:])
        ):
            self._tell(data[:size], REASONS[reason])
            self._records += 1
            return size
        if self._is_intact is None:
            self._tell(data, REASONS[reason])
        self._lost = REASONS[reason]
        if self._is_intact is not None and not self._is_intact():
            self._lost, self._has_ended_early = f"{_DAMAGED}: {self._lost}; {_REST}", True
        return 0

    def _search(self, data: np.ndarray, ended: bool) -> tuple[int, int]:
        """Reports the bytes before the next record; returns its size and the bytes wanted."""
        if self._has_ended_early:
            size, needed = data.size, int(not ended)
        else:
            size, needed = find_record(data.ctypes.data, data.size, ended)
        if size:
            self._tell(data[:size], self._lost or "", continues=self._has_told)
            self._has_told = True
        if not needed:  # found one, or came to the end
            self._lost, self._is_counted, self._has_told = None, False, False
            self._records += 1
        return size, needed

    def _tell(self, data: np.ndarray, reason: str, continues: bool = False) -> None:
        record = self._records if self._is_counted else None
        self._report(BadRange(self._offset, data, record, reason, continues), self._records)
        self._offset += data.size


def _read_up_to(source: ByteSource, rest: np.ndarray, wanted: int) -> tuple[np.ndarray, bool]:
    """`rest` followed by fresh bytes up to `wanted` in all, and whether the stream ended."""
    # Memory follows the bytes that really arrive, not the length that a header claims.
    size = min(max(wanted, rest.size + 1), max(2 * rest.size, _AT_ONCE_BYTES))
    data = allocate({"block": ((size,), np.dtype(np.uint8))})["block"]
    data[: rest.size] = rest
    filled = rest.size
    while filled < size:
        count = source.read_into(data[filled:])
        if not count:
            return data[:filled], True
        filled += count
    return data, False


_BLOCK_BYTES = 4 << 20


def index_records(data: np.ndarray | bytes) -> np.ndarray:
    """Verified records of a whole uncompressed file: start and length, int64 `[records, 2]`."""
    buffer = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data
    index, position, reason, _ = scan_buffer(np.ascontiguousarray(buffer), verify=True)
    if reason:
        raise corrupt_record("<buffer>", position, len(index), REASONS[reason])
    return index


def detect_compression(head: bytes) -> Compression | None:
    """Tells the compression from a file's first 12 bytes.

    A sound TFRecord header (its CRC matches) is never mistaken for a compressed stream.
    """
    if begins_record(head):
        return None
    if head[:3] == b"\x1f\x8b\x08":
        return "GZIP"
    if len(head) >= 2 and head[0] & 0x0F == 8 and (head[0] << 8 | head[1]) % 31 == 0:
        return "ZLIB"
    return None


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

    Holds one block at a time: `block_bytes`, or the longest record where that is more. Blocks come
    in file order, none of them empty. Record numbers count from `start`, and a bad range as one.

    Args:
        path: TFRecord file, plain or compressed.
        compression: `None`, `"GZIP"`, `"ZLIB"`, or `"auto"` to tell from the content.
        block_bytes: Bytes to read at a time, before framing is cut; at least 1.
        verify: Whether payload checksums are verified (lengths always are).
        start: Byte offset of a record to start at.
        stop: Byte offset of a record to stop before, None for the end.
        on_corrupt: Receives damage, which is passed over; None to raise it. A record whose payload
            alone is unsound is bad alone. Past anything else reading resumes where a record stands
            with both checksums; what a damaged compressed stream holds behind the damage is lost.
        opener: Opens the file for reading and seeking, where it is not a local one.

    Raises:
        CorruptRecordError: Truncated, a checksum does not match, or the compressed stream is
            damaged; names the file, the byte offset and the reason.
        ConfigError: Unknown compression, or a range of a compressed file.
        OSError: The file cannot be read.
    """
    if compression not in (None, "auto", "GZIP", "ZLIB"):
        raise ConfigError(
            "unknown TFRecord compression",
            received=repr(compression),
            allowed="None, 'GZIP', 'ZLIB' or 'auto'",
        )
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

        def report(bad: BadRange, record: int) -> None:
            if on_corrupt is None:
                is_inflated = compression is not None
                raise corrupt_record(name, bad.offset, record, bad.reason, is_inflated)
            on_corrupt(bad)

        check = None if on_corrupt is None else partial(is_intact, path, compression, opener)
        yield from BlockCutter(source, start, report, check).cut(block_bytes, verify)

"""Cuts a stream of bytes into blocks of whole records, past damage where that is wanted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from etl.tfrecord import framing_kernels as k
from etl.tfrecord.byte_source import ByteSource
from etl.tfrecord.framing_kernels import FOOTER_BYTES, HEADER_BYTES
from etl.tfrecord.memory import allocate
from etl.tfrecord.recovery import REASONS, BadRange, DamageReport

_TRUNCATED = (k.CUT_HEADER, k.CUT_PAYLOAD)
_DAMAGED = "damaged compressed stream"
_REST = "what follows is lost"
_AT_ONCE_BYTES = 16 << 20


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


def scan_buffer(data: np.ndarray, verify: bool) -> tuple[np.ndarray, int, int, int]:
    """Locates the records of a buffer up to the first that is not whole and sound.

    Args:
        data: Bytes, uint8 `[bytes]`.
        verify: Whether payload checksums are verified.

    Returns:
        Index of the payloads, and what `scan_records` says of the place after them.
    """
    # Room for the most records that could fit; pages that are not needed are never touched.
    index = np.empty((data.size // (HEADER_BYTES + FOOTER_BYTES) + 1, 2), np.int64)
    n, position, reason, payload = k.scan_records(data.ctypes.data, data.size, verify, index)
    return index[:n].copy(), position, reason, payload


class BlockCutter:
    """Cuts a stream into blocks; knows how far it has come."""

    def __init__(self, source: ByteSource, offset: int, report: DamageReport) -> None:
        """Starts at the beginning of a record.

        Args:
            source: The bytes.
            offset: Their position in the (uncompressed) file.
            report: Who is told of damage.
        """
        self._source, self._report = source, report
        self._offset, self._records = offset, 0
        self._lost: str | None = None  # why no record has been found again yet
        self._is_counted, self._has_ended_early, self._has_told = True, False, False

    def cut(self, block_bytes: int, verify: bool) -> Iterator[RecordBlock]:
        """Yields the blocks in order, none of them empty.

        Args:
            block_bytes: Bytes to read at a time, at least 1.
            verify: Whether payload checksums are verified.

        Raises:
            CorruptRecordError: Damage that the report does not take.
        """
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
        if reason == k.BAD_PAYLOAD and (
            (ended and left == 0)
            or (not ended and left < HEADER_BYTES)
            or k.is_header(data.ctypes.data + size, left)
        ):
            self._tell(data[:size], REASONS[reason])
            self._records += 1
            return size
        if self._report.on_corrupt is None:
            self._tell(data, REASONS[reason])
        self._lost = REASONS[reason]
        if not self._report.is_stream_intact():
            self._lost, self._has_ended_early = f"{_DAMAGED}: {self._lost}; {_REST}", True
        return 0

    def _search(self, data: np.ndarray, ended: bool) -> tuple[int, int]:
        """Reports what lies before the next record; returns its size and the bytes wanted."""
        if self._has_ended_early:
            size, needed = data.size, int(not ended)
        else:
            size, needed = k.find_record(data.ctypes.data, data.size, ended)
        if size:
            self._tell(data[:size], self._lost or "", continues=self._has_told)
            self._has_told = True
        if not needed:  # found one, or came to the end
            self._lost, self._is_counted, self._has_told = None, False, False
            self._records += 1
        return size, needed

    def _tell(self, data: np.ndarray, reason: str, continues: bool = False) -> None:
        record = self._records if self._is_counted else None
        self._report.tell(BadRange(self._offset, data, record, reason, continues), self._records)
        self._offset += data.size


def _read_up_to(source: ByteSource, rest: np.ndarray, wanted: int) -> tuple[np.ndarray, bool]:
    """Returns `rest` followed by fresh bytes up to `wanted` in all, and whether the stream ended.

    Where that is a lot, memory follows the bytes that really arrive, not the length that a header
    claims.
    """
    size = max(wanted, rest.size + 1)
    if size <= _AT_ONCE_BYTES:
        data = allocate({"block": ((size,), np.dtype(np.uint8))})["block"]
        data[: rest.size] = rest
        filled = rest.size
        while filled < size:
            count = source.read_into(data[filled:])
            if not count:
                return data[:filled], True
            filled += count
        return data, False
    pieces, found = [rest], rest.size
    while found < size:
        piece = source.read(size - found)
        if not piece:
            return np.concatenate(pieces), True
        pieces.append(np.frombuffer(piece, np.uint8))
        found += len(piece)
    return np.concatenate(pieces), False

"""One shard, read from a record on, in pieces of whole records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from etl.tfrecord.framing import (
    HEADER_BYTES,
    BadRange,
    Compression,
    RecordBlock,
    read_record_blocks,
)
from etl.tfrecord.locations import FileOpener
from training.input.damage import DamagePolicy

BLOCK_BYTES = 2 << 20
"""Bytes that are read and decoded at a time: they stay in a core's cache between the two."""


@dataclass(frozen=True)
class Shard:
    """A shard to read.

    Attributes:
        path: Path or URI.
        rows: Records that the manifest counts.
        crc32c: Checksum that the manifest has, which names its content.
        compression: As the wire calls it.
    """

    path: str
    rows: int
    crc32c: str
    compression: Compression | None


class ShardReader:
    """Reads records in order; one thread at a time.

    Args:
        shard: The shard.
        first: Number of the record to begin with: what precedes it is passed over by the lengths
            of the records, and neither verified nor decoded.
        damage: What becomes of damage, and who is told.

    Attributes:
        position: Number of the record after the last that was returned.
    """

    def __init__(self, shard: Shard, first: int, damage: DamagePolicy) -> None:
        self.position = first
        self._shard, self._damage = shard, damage
        self._base = 0  # records before the one that the blocks are counted from
        self._seen = 0  # records of the whole shard, bad ones included
        self._rest: RecordBlock | None = None
        self._blocks = self._open(first)

    def read(self, stop: int) -> RecordBlock | None:
        """Returns the next records before record `stop`, or None where there are no more."""
        block = self._rest
        if block is None:
            block = next(self._blocks, None)
            if block is None:
                return None
            block = replace(block, first_record=block.first_record + self._base)
        self._rest = None
        count = stop - block.first_record
        if count <= 0:
            self._rest = block
            return None
        if count < len(block.index):
            self._rest = RecordBlock(block.data, block.index[count:], block.offset, stop)
            block = replace(block, index=block.index[:count])
        self.position = block.first_record + len(block.index)
        return block

    def _open(self, first: int) -> Iterator[RecordBlock]:
        shard, hook = self._shard, self._damage.hook(self._shard.path)
        if hook is not None:
            return self._drop(self._salvage(hook), first)
        if first == 0:
            return self._read(None)
        if shard.compression is not None:
            return self._drop(self._read(None), first)
        for block in self._read(None, verify=False):
            behind = block.first_record + len(block.index)
            if first < behind:
                record = block.index[first - block.first_record, 0]
                self._base = first
                return self._read(None, start=block.offset + int(record) - HEADER_BYTES)
        return iter(())

    def _read(
        self, hook: Callable[[BadRange], None] | None, verify: bool = True, start: int = 0
    ) -> Iterator[RecordBlock]:
        return read_record_blocks(
            self._shard.path,
            compression=self._shard.compression,
            block_bytes=BLOCK_BYTES,
            verify=verify,
            start=start,
            on_corrupt=hook,
            opener=FileOpener(),
        )

    def _salvage(self, hook: Callable[[BadRange], None]) -> Iterator[RecordBlock]:
        """Reads what is there of the shard, and counts what is not."""

        def count(bad: BadRange) -> None:
            self._seen += not bad.continues
            hook(bad)

        for block in self._read(count):
            self._seen += len(block.index)
            yield block
        # One bad range may have been several records, and a file may end between two.
        if self._seen < self._shard.rows:
            self._damage.counts.add_lost(self._shard.path, self._shard.rows - self._seen)

    @staticmethod
    def _drop(blocks: Iterator[RecordBlock], first: int) -> Iterator[RecordBlock]:
        for block in blocks:
            skip = max(0, first - block.first_record)
            if skip < len(block.index):
                number = block.first_record + skip
                yield RecordBlock(block.data, block.index[skip:], block.offset, number)

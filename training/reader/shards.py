"""Shards of a split: read in pieces of whole records, compared with the manifest; damage."""

from __future__ import annotations

import io
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import pyarrow as pa

from conf.errors import InputDataError, SluiceError
from conf.manifest import Manifest, ShardInfo
from conf.paths import ReadablePath
from conf.storage.locations import Compression, FileOpener
from etl.tfrecord.reading import (
    FIX_CORRUPT,
    BadRange,
    CorruptRecordError,
    Decoder,
    RecordBlock,
    crc32c,
    read_record_blocks,
)

WIRE_COMPRESSIONS: dict[str | None, Compression | None] = {
    None: None,
    "gzip": "GZIP",
    "zlib": "ZLIB",
}
BLOCK_BYTES = 2 << 20
"""Bytes that are read and decoded at a time: they stay in a core's cache between the two."""
_LOGGER = logging.getLogger(__name__)
_LOCK = threading.Lock()  # of all counts: readers that hold some go to other processes


def filled_shards(manifest: Manifest, split: str) -> tuple[ShardInfo, ...]:
    """A split's shards that hold records, in the manifest's order."""
    return tuple(shard for shard in manifest.split(split).shards if shard.rows)


@dataclass(frozen=True)
class Shard:
    """A shard to read: records and checksum as the manifest has them."""

    path: str
    rows: int
    crc32c: str
    compression: Compression | None


def list_shards(version_dir: ReadablePath, manifest: Manifest, split: str) -> tuple[Shard, ...]:
    """The filled shards of a split, as readers take them."""
    shards = filled_shards(manifest, split)
    compression = WIRE_COMPRESSIONS[manifest.compression]
    return tuple(Shard(f"{version_dir}/{s.path}", s.rows, s.crc32c, compression) for s in shards)


@dataclass
class InputCounts:
    """What the input left out; safe to read and write from several threads."""

    records: Counter[str] = field(default_factory=Counter)  # bad ones by reason
    shards: dict[str, str] = field(default_factory=dict)  # those left out, with the reason
    filtered: int = 0  # rows that a filter left out
    first_bad: str | None = None  # where the first bad record was met

    def add_records(self, reason: str, where: str, records: int = 1) -> None:
        with _LOCK:
            self.records[reason] += records
            self.first_bad = self.first_bad or where

    def add_shard(self, path: str, reason: str) -> None:
        """Counts a shard that is left out, once however often it is met."""
        with _LOCK:
            self.shards[path] = reason

    def add_filtered(self, rows: int) -> None:
        with _LOCK:
            self.filtered += rows

    def totals(self) -> dict[str, int]:
        """What was left out: `bad_records`, `shards`, `filtered_rows`; empty where nothing was."""
        with _LOCK:
            found = {
                "bad_records": sum(self.records.values()),
                "shards": len(self.shards),
                "filtered_rows": self.filtered,
            }
        return {name: count for name, count in found.items() if count}

    def describe(self) -> list[str]:
        """One line for each kind of loss; none where nothing was left out."""
        with _LOCK:
            lines = []
            if self.records:
                reasons = ", ".join(f"{n} x {why}" for why, n in sorted(self.records.items()))
                total = sum(self.records.values())
                lines.append(f"{total} bad record(s) skipped: {reasons}; first: {self.first_bad}")
            lines += [f"shard skipped: {path}: {why}" for path, why in sorted(self.shards.items())]
            if self.filtered:
                lines.append(f"{self.filtered} row(s) left out by input.filter or input.validation")
            return lines


def warn_of_losses(counts: InputCounts, split: str, epoch: int) -> None:
    """Warns of what an epoch of a split left out."""
    for line in counts.describe():
        _LOGGER.warning("split %r, epoch %d: %s", split, epoch, line)


def explain_error(
    error: SluiceError, version_dir: ReadablePath, manifest: Manifest, split: str
) -> None:
    """Adds to an error of the input which dataset it is of, and what can be done about it."""
    if split == "train" and isinstance(error, CorruptRecordError):
        error.fix = (
            f"{FIX_CORRUPT}; or set input.on_corrupt to skip_record or skip_shard, which train on "
            "the rest"
        )
    error.add_note(f"in split {split!r} of {manifest.dataset_name!r} at {version_dir}")


@dataclass
class ShardChecks:
    """Which shards were begun to be read, and which were compared with their checksums."""

    begun: dict[Shard, None] = field(default_factory=dict)
    compared: set[Shard] = field(default_factory=set)

    def select_begun(self, shards: Iterable[Shard] | None = None) -> list[Shard]:
        """Those of some shards, or of all, that were begun and not compared."""
        asked = tuple(self.begun) if shards is None else shards
        return [one for one in asked if one in self.begun and one not in self.compared]


@dataclass(frozen=True)
class DamagePolicy:
    """What becomes of damage: `fail`, `skip_record` or `skip_shard`; what counts and notes it."""

    on_corrupt: str = "fail"
    counts: InputCounts = field(default_factory=InputCounts)
    checks: ShardChecks = field(default_factory=ShardChecks)


class _SummedFile(io.RawIOBase):
    """A file that is read from its start on, and the checksum of what has been read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.crc = cast("Any", file), 0

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self.crc = 0
        return int(self._file.seek(offset, whence))

    def readinto(self, target: Any) -> int:
        count = self._file.readinto(target) or 0
        self.crc = crc32c(memoryview(target)[:count], self.crc)
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


class ShardReader:
    """Reads records in order, from number `first` on; one thread at a time.

    Attributes:
        position: Number of the record after the last that was returned.
    """

    def __init__(self, shard: Shard, first: int, damage: DamagePolicy) -> None:
        self.position = first
        self._shard, self._damage = shard, damage
        self._seen = 0  # records of the whole shard, bad ones included
        self._is_damaged = False
        self._file: _SummedFile | None = None
        self._rest: RecordBlock | None = None
        is_salvaging = damage.on_corrupt == "skip_record"
        self._blocks = self._drop(self._salvage() if is_salvaging else self._read(None), first)
        damage.checks.begun[shard] = None

    def read(self, stop: int) -> RecordBlock | None:
        """Returns the next records before record `stop`, or None where there are no more."""
        block = self._rest or next(self._blocks, None)
        if block is None:
            return None
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

    @property
    def has_more(self) -> bool:
        """Whether records that have been read follow the last one that was asked for."""
        return self._rest is not None

    def compare(self) -> None:
        """Reads what is left, and compares the file with the manifest's checksum.

        One whose damage has been told is another file for that reason.
        """
        for _ in self._blocks:
            pass
        found = f"{0 if self._file is None else self._file.crc:08x}"
        if found != self._shard.crc32c and not self._is_damaged:
            raise shard_error(
                f"{self._shard.path} is not the file that was written",
                f"CRC-32C {found}",
                self._shard.crc32c,
            )
        self._damage.checks.compared.add(self._shard)

    def _read(self, hook: Callable[[BadRange], None] | None) -> Iterator[RecordBlock]:
        return read_record_blocks(
            self._shard.path,
            compression=self._shard.compression,
            block_bytes=BLOCK_BYTES,
            on_corrupt=hook,
            opener=self._open_file,
        )

    def _open_file(self, path: str | Path) -> BinaryIO:
        self._file = _SummedFile(FileOpener()(path))
        return cast("BinaryIO", self._file)

    def _salvage(self) -> Iterator[RecordBlock]:
        """Reads what is there of the shard, and counts what is not."""
        path, counts = self._shard.path, self._damage.counts

        def count(bad: BadRange) -> None:
            self._is_damaged = True
            if not bad.continues:
                self._seen += 1
                counts.add_records(bad.reason, f"{path}, byte offset {bad.offset}")

        for block in self._read(count):
            self._seen += len(block.index)
            yield block
        # One bad range may have been several records, and a file may end between two.
        if self._seen < self._shard.rows:
            self._is_damaged = True
            lost = self._shard.rows - self._seen
            reason = "not there, though the manifest counts it"
            counts.add_records(reason, f"{path}, which ends early", lost)

    @staticmethod
    def _drop(blocks: Iterator[RecordBlock], first: int) -> Iterator[RecordBlock]:
        for block in blocks:
            skip = max(0, first - block.first_record)
            if skip < len(block.index):
                number = block.first_record + skip
                yield RecordBlock(block.data, block.index[skip:], block.offset, number)


def decode_records(
    decoder: Decoder, block: RecordBlock, path: str, damage: DamagePolicy
) -> tuple[pa.RecordBatch, np.ndarray | None]:
    """Decodes a block, leaving out malformed records where the policy says so.

    Returns:
        The columns, and which of the records they hold: bool `[records]`, None for all.
    """
    if damage.on_corrupt != "skip_record":
        return decoder.decode_block(block, path), None
    batch, bad = decoder.decode_sound(block, path)
    sound = np.ones(len(block.index), bool)
    for record in bad:
        sound[record.record] = False
        offset = block.offset + int(block.index[record.record, 0])
        damage.counts.add_records(record.reason, f"{path}, byte offset {offset}")
    return batch, sound


def compare_begun(damage: DamagePolicy, shards: Iterable[Shard] | None = None) -> None:
    """Compares shards that were read in part with their checksums: of some shards, or of all."""
    for shard in damage.checks.select_begun(shards):
        try:
            ShardReader(shard, 0, replace(damage, counts=InputCounts())).compare()
        except OSError as error:
            raise missing_shard(shard, error) from error


def find_shard_damage(shard: Shard, decoder: Decoder) -> str | None:
    """Reads a shard through; returns what is damaged in it, or None."""
    reader = ShardReader(shard, 0, DamagePolicy())
    try:
        while (block := reader.read(shard.rows)) is not None:
            decoder.decode_block(block, shard.path)
        # Further records were not written with the version.
        has_more = reader.read(shard.rows + 1) is not None
    except (CorruptRecordError, OSError) as error:
        return _describe_damage(error).splitlines()[0].removeprefix(f"{shard.path}: ")
    if reader.position == shard.rows:
        reader.compare()
        return None
    found = f"more than {shard.rows}" if has_more else f"{reader.position} of {shard.rows}"
    return f"{found} records"


def _describe_damage(error: Exception) -> str:
    """Describes damage, without the path that an error of the system repeats."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def shard_error(what: str, received: str, allowed: object = None) -> InputDataError:
    return InputDataError(
        what,
        received=received,
        allowed=None if allowed is None else f"{allowed}, as the manifest says",
        fix="restore the shard, roll back to an earlier version, or build again",
    )


def missing_shard(shard: Shard, error: OSError) -> InputDataError:
    received = f"{shard.path}: {_describe_damage(error)}"
    return shard_error("a shard that the manifest lists cannot be read", received)

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
from etl.tfrecord.codec.crc32c import crc32c
from etl.tfrecord.codec.decode import Decoder
from etl.tfrecord.codec.framing import (
    FIX_CORRUPT,
    BadRange,
    CorruptRecordError,
    RecordBlock,
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


ShardChecks = dict[Shard, bool]
"""Shards that were begun to be read, and whether they were compared with their checksums."""


@dataclass(frozen=True)
class DamagePolicy:
    """What becomes of damage: `fail`, `skip_record` or `skip_shard`; what counts and notes it."""

    on_corrupt: str = "fail"
    counts: InputCounts = field(default_factory=InputCounts)
    checks: ShardChecks = field(default_factory=ShardChecks)


class WrongShardError(InputDataError):
    """A shard is missing, or not the file that the manifest lists."""


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
    """Reads records in order, from number `first` on; one thread at a time."""

    def __init__(self, shard: Shard, first: int, damage: DamagePolicy) -> None:
        self.position = first  # number of the record after the last that was returned
        self._shard, self._damage = shard, damage
        self._is_damaged = False
        self._file: _SummedFile | None = None
        self._rest: RecordBlock | None = None
        is_salvaging = damage.on_corrupt == "skip_record"
        self._blocks = _drop(self._salvage() if is_salvaging else self._read(None), first)
        damage.checks.setdefault(shard, False)

    def read(self, stop: int) -> RecordBlock | None:
        """Returns the next records before record `stop`, or None where there are no more."""
        block = self._rest or next(self._blocks, None)
        if block is None or block.first_record >= stop:
            self._rest = block
            self._check_end(stop)
            return None
        self._rest, count = None, stop - block.first_record
        if count < len(block.index):
            self._rest = RecordBlock(block.data, block.index[count:], block.offset, stop)
            block = replace(block, index=block.index[:count])
        self.position = block.first_record + len(block.index)
        return block

    def _check_end(self, stop: int) -> None:
        path, rows = self._shard.path, self._shard.rows
        if self._damage.on_corrupt != "fail":
            return
        if self.position < min(stop, rows):
            raise _shard_error(f"{path} ends early", f"{self.position} records", rows)
        if self._rest is not None and self.position >= rows:
            what = f"{path} does not end where the manifest says"
            raise _shard_error(what, f"more than {rows} records", rows)

    def compare(self) -> None:
        """Reads what is left, and compares the file with the manifest's checksum."""
        for _ in self._blocks:
            pass
        found = f"{0 if self._file is None else self._file.crc:08x}"
        # One whose damage has been told is another file for that reason.
        if found != self._shard.crc32c and not self._is_damaged:
            raise _shard_error(
                f"{self._shard.path} is not the file that was written",
                f"CRC-32C {found}",
                self._shard.crc32c,
            )
        self._damage.checks[self._shard] = True

    def _read(self, hook: Callable[[BadRange], None] | None) -> Iterator[RecordBlock]:
        try:
            yield from read_record_blocks(
                self._shard.path,
                compression=self._shard.compression,
                block_bytes=BLOCK_BYTES,
                on_corrupt=hook,
                opener=self._open_file,
            )
        except OSError as error:
            what = f"{self._shard.path} cannot be read: {error.strerror or error}"
            raise _shard_error(what) from error

    def _open_file(self, path: str | Path) -> BinaryIO:
        self._file = _SummedFile(FileOpener()(path))
        return cast("BinaryIO", self._file)

    def _salvage(self) -> Iterator[RecordBlock]:
        """Reads what is there of the shard, and counts what is not."""
        path, counts = self._shard.path, self._damage.counts
        lost = self._shard.rows

        def count(bad: BadRange) -> None:
            nonlocal lost
            self._is_damaged = True
            if not bad.continues:
                lost -= 1
                counts.add_records(bad.reason, f"{path}, byte offset {bad.offset}")

        for block in self._read(count):
            lost -= len(block.index)
            yield block
        # One bad range may have been several records, and a file may end between two.
        if lost > 0:
            self._is_damaged = True
            reason = "not there, though the manifest counts it"
            counts.add_records(reason, f"{path}, which ends early", lost)


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

    Returns the columns, and which of the records they hold: bool `[records]`, None for all.
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
    for shard in tuple(damage.checks) if shards is None else shards:
        if damage.checks.get(shard) is False:
            ShardReader(shard, 0, replace(damage, counts=InputCounts())).compare()


def find_shard_damage(shard: Shard, decoder: Decoder) -> str | None:
    """Reads a shard through; returns what is damaged in it, or None."""
    reader = ShardReader(shard, 0, DamagePolicy())
    try:
        while (block := reader.read(shard.rows)) is not None:
            decoder.decode_block(block, shard.path)
    except (CorruptRecordError, WrongShardError) as error:
        return error.what.removeprefix(shard.path).lstrip(": ")
    reader.compare()
    return None


def _shard_error(what: str, received: str | None = None, allowed: object = None) -> WrongShardError:
    return WrongShardError(
        what,
        received=received,
        allowed=None if allowed is None else f"{allowed}, as the manifest says",
        fix="restore the shard, roll back to an earlier version, or build again",
    )

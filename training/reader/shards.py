"""Shards of a split: listed by the manifest, read in pieces of whole records, kept when decoded.

Decoded shards are kept for the epochs that follow: in memory, or as Arrow files on disk.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import pyarrow as pa

from conf.errors import InputDataError
from conf.manifest import Manifest, ShardInfo
from conf.storage.atomic_output import atomic_file
from conf.storage.locations import Compression, FileOpener
from etl.tfrecord.reading import (
    BadRange,
    CorruptRecordError,
    Decoder,
    RecordBlock,
    crc32c,
    read_record_blocks,
)
from training.reader.damage import DamagePolicy, InputCounts

WIRE_COMPRESSIONS: dict[str | None, Compression | None] = {
    None: None,
    "gzip": "GZIP",
    "zlib": "ZLIB",
}
RECORD_TYPES = ("Example", "SequenceExample")


def check_format(manifest: Manifest) -> None:
    """Refuses records that training does not read.

    Raises:
        InputDataError: Records of another kind, or an unknown compression.
    """
    if manifest.record_type not in RECORD_TYPES:
        raise InputDataError(
            "training reads another record type",
            received=manifest.record_type,
            allowed=", ".join(RECORD_TYPES),
        )
    if manifest.compression not in WIRE_COMPRESSIONS:
        raise InputDataError(
            "the manifest names an unknown compression",
            received=manifest.compression,
            allowed=", ".join(str(key) for key in WIRE_COMPRESSIONS),
        )


def filled_shards(manifest: Manifest, split: str) -> tuple[ShardInfo, ...]:
    """Returns a split's shards that hold records, in the manifest's order.

    Raises:
        InputDataError: There is no such split, or training does not read its records.
    """
    check_format(manifest)
    return tuple(shard for shard in manifest.split(split).shards if shard.rows)


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
    """Reads records in order; one thread at a time.

    Args:
        shard: The shard.
        first: Number of the record to begin with: what precedes it is not decoded.
        damage: What becomes of damage, and what counts it.

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
        self._blocks = self._drop(self._open(), first)
        damage.checks.begin(shard)

    def read(self, stop: int) -> RecordBlock | None:
        """Returns the next records before record `stop`, or None where there are no more."""
        block = self._rest
        if block is None:
            block = next(self._blocks, None)
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
        """Whether records follow the last one that was asked for, as far as they have been read."""
        return self._rest is not None

    def compare(self) -> None:
        """Reads what is left, and compares the file with the manifest's checksum.

        One whose damage has been told is another file for that reason.

        Raises:
            InputDataError: It is another file than the manifest lists.
            OSError: It cannot be read.
        """
        for _ in self._blocks:
            pass
        found = f"{0 if self._file is None else self._file.crc:08x}"
        if found != self._shard.crc32c and not self._is_damaged:
            raise build_changed_shard_error(self._shard, found)
        self._damage.checks.end(self._shard)

    def _open(self) -> Iterator[RecordBlock]:
        hook = self._damage.hook(self._shard.path)
        return self._read(None) if hook is None else self._salvage(hook)

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

    def _salvage(self, hook: Callable[[BadRange], None]) -> Iterator[RecordBlock]:
        """Reads what is there of the shard, and counts what is not."""

        def count(bad: BadRange) -> None:
            self._is_damaged = True
            self._seen += not bad.continues
            hook(bad)

        for block in self._read(count):
            self._seen += len(block.index)
            yield block
        # One bad range may have been several records, and a file may end between two.
        if self._seen < self._shard.rows:
            self._is_damaged = True
            self._damage.counts.add_lost(self._shard.path, self._shard.rows - self._seen)

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

    Raises:
        CorruptRecordError: A record is malformed and must not be skipped.
        InputDataError: A record does not hold what the schema says.
    """
    if damage.on_corrupt != "skip_record":
        return decoder.decode_block(block, path), None
    batch, bad = decoder.decode_sound(block, path)
    sound = np.ones(len(block.index), bool)
    for record in bad:
        sound[record.record] = False
        offset = block.offset + int(block.index[record.record, 0])
        damage.counts.add_record(path, offset, record.reason)
    return batch, sound


def build_missing_shard_error(shard: Shard, error: OSError) -> InputDataError:
    """The error of a shard that cannot be read."""
    return InputDataError(
        "a shard that the manifest lists cannot be read",
        received=f"{shard.path}: {_describe_damage(error)}",
        fix="restore the shard, roll back to an earlier version, or build again",
    )


def _describe_damage(error: Exception) -> str:
    """Describes damage, without the path that an error of the system repeats."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def build_changed_shard_error(shard: Shard, found: str) -> InputDataError:
    """The error of a shard whose records are sound, and not those that were written."""
    return InputDataError(
        f"{shard.path} is not the file that was written",
        received=f"CRC-32C {found}",
        allowed=f"{shard.crc32c}, as the manifest says",
        fix="restore the shard, roll back to an earlier version, or build again",
    )


def compare_begun(damage: DamagePolicy, shards: Iterable[Shard] | None = None) -> None:
    """Reads through what was begun and never ended, and compares it with its checksum.

    Args:
        damage: What becomes of damage, and what has been begun.
        shards: Which shards are looked at; None: all that were begun.

    Raises:
        InputDataError: One is damaged, or another file than the manifest lists.
    """
    for shard in damage.checks.select_begun(shards):
        try:
            ShardReader(shard, 0, replace(damage, counts=InputCounts())).compare()
        except OSError as error:
            raise build_missing_shard_error(shard, error) from error


def find_shard_damage(shard: Shard, decoder: Decoder) -> str | None:
    """Reads a shard through; returns what is damaged in it, or None.

    Raises:
        InputDataError: A record does not hold what the schema says.
    """
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


def build_short_shard_error(shard: Shard, records: int) -> InputDataError:
    """The error of a shard that ends before the manifest says."""
    return InputDataError(
        f"{shard.path} ends early",
        received=f"{records} records",
        allowed=f"{shard.rows}, as the manifest says",
        fix="restore the shard, roll back to an earlier version, or build again",
    )


def build_long_shard_error(shard: Shard) -> InputDataError:
    """The error of a shard that goes on where the manifest says that it ends."""
    return InputDataError(
        f"{shard.path} does not end where the manifest says",
        received=f"more than {shard.rows} records",
        allowed=f"{shard.rows}, as the manifest says",
        fix="the manifest or the shard was edited: restore it, roll back to an earlier version, or "
        "build again",
    )


def decode_shard(shard: Shard, decoder: Decoder, damage: DamagePolicy) -> DecodedRuns:
    """Decodes all records of a shard, to be kept."""
    runs: DecodedRuns = []
    reader = ShardReader(shard, 0, damage)
    while (block := reader.read(shard.rows)) is not None:
        batch, sound = decode_records(decoder, block, shard.path, damage)
        runs += split_runs(block.first_record, batch, sound)
    if reader.has_more and damage.on_corrupt == "fail":
        raise build_long_shard_error(shard)
    reader.compare()
    return runs


_LOGGER = logging.getLogger(__name__)
_NUMBERS = b"sluice.first_records"
# Behind the Arrow file lies the CRC32C of it: Arrow checks none of its data.
_CHECKSUM_BYTES = 4

DecodedRuns = list[tuple[int, pa.RecordBatch]]
"""Decoded records of a shard: number of the first of each run, and the run."""

# One scope at a time: what another run of this process has kept is of no use to the next.
_MEMORY: dict[str, dict[str, DecodedRuns]] = {}


@dataclass(frozen=True)
class ShardCache:
    """Keeps decoded shards.

    A shard that lacks records is not kept: it may be repaired, and each epoch counts what it lacks.

    Attributes:
        scope: All that decides what a shard decodes to, besides its content.
        directory: Where Arrow files are kept; None keeps the shards in memory.
    """

    scope: str
    directory: Path | None = None

    def load(self, shard: Shard, decode: Callable[[], DecodedRuns]) -> DecodedRuns:
        """Returns the records of a shard, decoding them where they have not been kept.

        Args:
            shard: The shard; one thread at a time.
            decode: Decodes all of it.
        """
        name = hashlib.sha256(f"{self.scope}\0{shard.path}\0{shard.crc32c}".encode()).hexdigest()
        if self.directory is not None:
            return self._load_file(self.directory / f"{name}.arrow", shard, decode)
        kept = _MEMORY.get(self.scope)
        if kept is None:
            _MEMORY.clear()
            kept = _MEMORY.setdefault(self.scope, {})
        runs = kept.get(name) or decode()
        if _is_whole(runs, shard):
            kept[name] = runs
        return runs

    def _load_file(
        self, path: Path, shard: Shard, decode: Callable[[], DecodedRuns]
    ) -> DecodedRuns:
        if path.exists():
            try:
                return _read_runs(path)
            except (OSError, pa.ArrowInvalid, KeyError, ValueError):
                _LOGGER.warning("%s is damaged and is made again", path)
        runs = decode()
        try:
            if _is_whole(runs, shard):
                _write_runs(path, runs)
        except OSError as error:
            _LOGGER.warning("%s is not kept: %s", path, error)
        return runs


class CachedReader:
    """Reads a kept shard in order, as `ShardReader` does.

    Attributes:
        position: Number of the record after the last that was returned.
        has_more: False: what is kept ends where the manifest says.
    """

    has_more = False

    def __init__(self, runs: DecodedRuns, first: int) -> None:
        self.position = first
        self._runs = runs

    def compare(self) -> None:
        """What is kept was compared when it was decoded."""

    def read(self, stop: int) -> tuple[int, pa.RecordBatch] | None:
        """Returns the number of the next record before `stop` and the records from it on."""
        for number, batch in self._runs:
            behind = number + batch.num_rows
            start = max(number, self.position)
            if behind > start and start < stop:
                self.position = min(stop, behind)
                return start, batch.slice(start - number, self.position - start)
        return None


def split_runs(number: int, batch: pa.RecordBatch, sound: np.ndarray | None) -> Iterator[
    tuple[int, pa.RecordBatch]
]:  # fmt: skip
    """Splits decoded records at those that were left out.

    Args:
        number: Number of the first record.
        batch: Columns of the sound ones.
        sound: Which records are sound, bool `[records]`; None for all.
    """
    if sound is None or sound.all():
        yield number, batch
        return
    edges = np.flatnonzero(np.diff(np.concatenate(([0], sound.view(np.int8), [0]))))
    done = 0
    for first, last in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        yield number + first, batch.slice(done, last - first)
        done += last - first


def _is_whole(runs: DecodedRuns, shard: Shard) -> bool:
    return sum(batch.num_rows for _, batch in runs) == shard.rows


def _read_runs(path: Path) -> DecodedRuns:
    """Runs of a file, which stay in the system's memory of files.

    Raises:
        ValueError: The file is damaged.
    """
    content = pa.memory_map(str(path)).read_buffer()
    if len(content) < _CHECKSUM_BYTES:
        raise ValueError("the file is cut off")
    arrow = content.slice(0, len(content) - _CHECKSUM_BYTES)
    if _checksum(arrow) != content.slice(len(arrow)).to_pybytes():
        raise ValueError("the file has another checksum")
    reader = pa.ipc.open_file(pa.BufferReader(arrow))
    numbers = json.loads(reader.schema.metadata[_NUMBERS])
    return [(number, reader.get_batch(i)) for i, number in enumerate(numbers)]


def _write_runs(path: Path, runs: DecodedRuns) -> None:
    if not runs:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    numbers = json.dumps([number for number, _ in runs]).encode()
    schema = runs[0][1].schema.with_metadata({_NUMBERS: numbers})
    with atomic_file(path, durable=False) as unfinished:
        with pa.OSFile(str(unfinished), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            for _, batch in runs:
                writer.write_batch(batch.replace_schema_metadata(schema.metadata))
        checksum = _checksum(pa.memory_map(str(unfinished)).read_buffer())
        with unfinished.open("ab") as file:
            file.write(checksum)


def _checksum(content: pa.Buffer) -> bytes:
    return crc32c(memoryview(content)).to_bytes(_CHECKSUM_BYTES, "little")

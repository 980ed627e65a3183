"""Decoded shards, kept for the epochs that follow: in memory, or as Arrow files on disk."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from etl.tfrecord.crc32c import crc32c
from training.input.shard_reader import Shard

_LOGGER = logging.getLogger(__name__)
_NUMBERS = b"sluice.first_records"
# Behind the Arrow file lies the CRC32C of it: Arrow checks none of its data.
_CHECKSUM_BYTES = 4

Runs = list[tuple[int, pa.RecordBatch]]
"""Decoded records of a shard: number of the first of each run, and the run."""

# One scope at a time: what another run of this process has kept is of no use to the next.
_MEMORY: dict[str, dict[str, Runs]] = {}


@dataclass(frozen=True)
class ShardCache:
    """Keeps decoded shards.

    A shard that lacks records is not kept: it may be mended, and each epoch counts what it lacks.

    Attributes:
        scope: All that decides what a shard decodes to, besides its content.
        directory: Where Arrow files are kept; None keeps the shards in memory.
    """

    scope: str
    directory: Path | None = None

    def load(self, shard: Shard, decode: Callable[[], Runs]) -> Runs:
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

    def _load_file(self, path: Path, shard: Shard, decode: Callable[[], Runs]) -> Runs:
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
    """

    def __init__(self, runs: Runs, first: int) -> None:
        self.position = first
        self._runs = runs

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


def _is_whole(runs: Runs, shard: Shard) -> bool:
    return sum(batch.num_rows for _, batch in runs) == shard.rows


def _read_runs(path: Path) -> Runs:
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


def _write_runs(path: Path, runs: Runs) -> None:
    if not runs:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    numbers = json.dumps([number for number, _ in runs]).encode()
    schema = runs[0][1].schema.with_metadata({_NUMBERS: numbers})
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with pa.OSFile(str(temporary), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            for _, batch in runs:
                writer.write_batch(batch.replace_schema_metadata(schema.metadata))
        checksum = _checksum(pa.memory_map(str(temporary)).read_buffer())
        with temporary.open("ab") as file:
            file.write(checksum)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _checksum(content: pa.Buffer) -> bytes:
    return crc32c(memoryview(content)).to_bytes(_CHECKSUM_BYTES, "little")

"""Partitions of a read: large files are split between records, small ones share a partition."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from etl.tfrecord.byte_source import Compression
from etl.tfrecord.data_file import DataFile
from etl.tfrecord.locations import FileOpener, is_remote
from etl.tfrecord.object_input import read_stored_index

# What opening a file costs, in bytes read meanwhile: Spark's spark.sql.files.openCostInBytes.
OPEN_COST_BYTES = 4 << 20


@dataclass(frozen=True)
class FileSplit:
    """A file, or a range of an uncompressed one.

    Attributes:
        path: The file.
        start: Byte offset of a record.
        stop: Byte offset of the first record past it, or None for the end of the file.
        partition: Partition values of the file.
    """

    path: str
    start: int
    stop: int | None
    partition: tuple[str | None, ...]


def plan_splits(
    files: Sequence[DataFile],
    *,
    compression: Compression | Literal["auto"] | None,
    split_bytes: int,
    min_partitions: int | None = None,
    opener: FileOpener | None = None,
) -> list[tuple[FileSplit, ...]]:
    """Distributes files over partitions, in file order.

    Args:
        files: What to read.
        compression: As for `read_record_blocks`; a compressed file is never split.
        split_bytes: Bytes per partition at most, where records allow it.
        min_partitions: Partitions wanted at least; None for one per CPU of this machine.
        opener: Opens the files; None for local ones.

    Returns:
        The splits of each partition; none for files without a byte.
    """
    files = [file for file in files if file.bytes]
    wanted = min_partitions or os.cpu_count() or 1
    total = sum(file.bytes + OPEN_COST_BYTES for file in files)
    size = min(split_bytes, max(OPEN_COST_BYTES, -(-total // wanted)))
    partitions: list[tuple[FileSplit, ...]] = []
    current: list[FileSplit] = []
    filled = 0
    for file in files:
        for split in _split_file(file, compression, min(size, split_bytes), opener or FileOpener()):
            length = (file.bytes if split.stop is None else split.stop) - split.start
            if current and filled + length > size:
                partitions.append(tuple(current))
                current, filled = [], 0
            current.append(split)
            filled += length + OPEN_COST_BYTES
    return [*partitions, tuple(current)] if current else partitions


def _split_file(
    file: DataFile,
    compression: Compression | Literal["auto"] | None,
    size: int,
    opener: FileOpener,
) -> list[FileSplit]:
    bounds = [0]
    is_plain = bool(file.split_offsets)  # the manifest gives none of compressed files
    if file.bytes > size and (is_plain or not _is_compressed(file.path, compression, opener)):
        bounds += _pick(_find_offsets(file, size, opener), size)
    stops: list[int | None] = [*bounds[1:], None]
    return [
        FileSplit(file.path, start, stop, file.partition)
        for start, stop in zip(bounds, stops, strict=True)
    ]


def _is_compressed(
    path: str, compression: Compression | Literal["auto"] | None, opener: FileOpener
) -> bool:
    if compression != "auto":
        return compression is not None
    from etl.tfrecord.framing import HEADER_BYTES, detect_compression  # compiled

    with opener(path) as file:
        return detect_compression(file.read(HEADER_BYTES)) is not None


def _pick(offsets: np.ndarray, size: int) -> list[int]:
    """The first offset at or after each multiple of `size`."""
    if not len(offsets):
        return []
    marks = np.arange(size, int(offsets[-1]) + 1, size)
    return np.unique(offsets[np.searchsorted(offsets, marks)]).tolist()


def _find_offsets(file: DataFile, size: int, opener: FileOpener) -> np.ndarray:
    """Offsets of records, in ascending order: all that are known, or those that are needed."""
    if file.split_offsets:
        return np.asarray(file.split_offsets, np.int64)
    if is_remote(file.path):  # reading all of it to find records would cost more than it gains
        text = read_stored_index(file.path, opener.settings)
        offsets = None if text is None else _parse_offsets(text, file.bytes)
        return np.empty(0, np.int64) if offsets is None else offsets
    from etl.tfrecord.framing_kernels import walk_headers  # compiled

    with Path(file.path).open("rb") as stream:
        memory = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        data = np.frombuffer(memory, np.uint8)
        offsets = _read_side_index(file, data)
        if offsets is None:
            found = np.empty(data.size // size + 1, np.int64)
            offsets = found[: walk_headers(data.ctypes.data, data.size, size, found)]
        del data
    finally:
        memory.close()
    return offsets


def _read_side_index(file: DataFile, data: np.ndarray) -> np.ndarray | None:
    """Offsets from a side file in DALI's form, or None where there is none that fits the file."""
    path = _side_index_path(Path(file.path))
    if path is None:
        return None
    offsets = _parse_offsets(path.read_bytes(), file.bytes)
    if offsets is None:
        return None
    from etl.tfrecord.framing_kernels import is_header  # compiled

    base = data.ctypes.data
    if not all(is_header(base + o, file.bytes - o) for o in offsets.tolist()):
        return None
    return offsets


def _parse_offsets(text: bytes, size: int) -> np.ndarray | None:
    """Offsets of all records but the first, or None where they cannot be those of the file."""
    try:
        values = np.array(text.split(), np.int64)
    except ValueError:
        return None
    if not values.size or values.size % 2 or int(values[-2:].sum()) != size:
        return None
    in_order = bool((np.diff(values[::2]) > 0).all()) and int(values[0]) == 0
    return values[::2][1:] if in_order else None


def _side_index_path(path: Path) -> Path | None:
    """`_index/<shard>.idx` in the directory that was written, which partitions lie below."""
    directory = path.parent
    while True:
        relative = path.relative_to(directory)
        found = directory / "_index" / relative.with_name(f"{relative.name}.idx")
        if found.is_file():
            return found
        if "=" not in directory.name:
            return None
        directory = directory.parent

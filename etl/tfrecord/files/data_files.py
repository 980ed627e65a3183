"""Data files of an output directory: which they are, their digests, and their side indexes."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from conf.errors import ConfigError, InputDataError, InternalError
from conf.local_paths import list_data_files
from conf.manifest import ShardInfo
from conf.storage.locations import Compression


@dataclass(frozen=True)
class DataFile:
    """A file to read.

    Attributes:
        path: Absolute path, or URI of an object.
        bytes: Its size.
        partition: Partition values in the order of the columns, None for null.
        split_offsets: Byte offsets of records as the manifest lists them; None where it does not
            list the file.
    """

    path: str
    bytes: int
    partition: tuple[str | None, ...] = ()
    split_offsets: tuple[int, ...] | None = None


def list_folders(names: Iterable[str]) -> list[str]:
    """Folders of files and the folders around those, outermost first, the root left out."""
    folders = {str(p) for name in names for p in PurePosixPath(name).parents if str(p) != "."}
    return sorted(folders)


def make_folders(root: Path, names: Iterable[str]) -> None:
    """Makes the folders of files; never the root, which may have been removed on purpose.

    Raises:
        FileNotFoundError: The root is not there.
    """
    for name in list_folders(names):
        (root / name).mkdir(exist_ok=True)


@dataclass(frozen=True)
class ShardRange:
    """Shards of one folder, written by successive Spark partitions, one each.

    Attributes:
        folder: Relative to the output directory, "" for the directory itself.
        start: Spark partition of the first shard.
        count: Number of shards.
    """

    folder: str
    start: int
    count: int

    def stem(self, partition: int) -> str:
        """Path of the shard of a Spark partition, without its ending."""
        name = f"part-{partition - self.start:05d}-of-{self.count:05d}"
        return str(PurePosixPath(self.folder, name))


def find_stem(ranges: Sequence[ShardRange], partition: int) -> str:
    """Path of the shard of a Spark partition, without its ending.

    Raises:
        InternalError: No range holds the partition.
    """
    for shards in ranges:
        if shards.start <= partition < shards.start + shards.count:
            return shards.stem(partition)
    raise InternalError("no shard is planned for a partition that has rows", received=partition)


def digest_partitions(root: Path) -> dict[str, str]:
    """Digests name, size, time and inode of the shards in each partition directory.

    Args:
        root: Output directory; need not exist.

    Returns:
        Digest by directory relative to the root, "" for the root itself; directories without
        shards are left out.
    """
    digests: dict[str, hashlib._Hash] = {}
    for relative in list_data_files(root):
        with contextlib.suppress(FileNotFoundError):
            stat = (root / relative).stat()
            directory, _, name = relative.rpartition("/")
            line = f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ino}\n"
            digests.setdefault(directory, hashlib.sha256()).update(line.encode())
    return {directory: digest.hexdigest() for directory, digest in digests.items()}


def changed_partitions(
    before: Mapping[str, str], now: Mapping[str, str], scope: set[str] | None
) -> list[str]:
    """Partition directories whose shards have changed.

    Args:
        before: Digests of earlier.
        now: Digests of now.
        scope: Directories that count, or None for all.
    """
    directories = before.keys() | now.keys() if scope is None else scope
    return sorted(d for d in directories if before.get(d) != now.get(d))


def refuse_missing(where: object, listed: Collection[str], found: Collection[str]) -> None:
    """Refuses rows that went without a word.

    Args:
        where: The directory, for the message.
        listed: Files that its manifest lists, relative to it.
        found: Files that are there.

    Raises:
        InputDataError: One is gone.
    """
    missing = sorted(set(listed) - set(found))
    if missing:
        raise InputDataError(
            f"{where}/{missing[0]} is missing: its manifest lists it, but it is not there",
            received=f"{len(missing)} of {len(listed)} listed files missing",
            fix="restore the files, or write the directory again; to read what is left, remove "
            "the manifest",
        )


# Hidden, so that no reader takes the side files for data.
INDEX_DIRECTORY = "_index"


def index_path(shard: str) -> str:
    """Where the side file of a shard lies, both relative to the output directory."""
    return f"{INDEX_DIRECTORY}/{shard}.idx"


def format_index(starts: np.ndarray, offset: int) -> str:
    """Formats entries of consecutive records.

    Args:
        starts: Offset of each record in a buffer and, last, of the end; int64 `[records + 1]`.
        offset: Byte offset of the buffer in the file.

    Returns:
        A line `<byte offset> <bytes>` per record, framing included.
    """
    pairs = zip((starts[:-1] + offset).tolist(), np.diff(starts).tolist(), strict=True)
    return "".join(f"{start} {size}\n" for start, size in pairs)


def check_indexable(compression: Compression | None) -> None:
    """Refuses an index into compressed files.

    Raises:
        ConfigError: The files are compressed.
    """
    if compression is not None:
        raise ConfigError(
            "an index needs uncompressed shards: records of a compressed one cannot be sought",
            received=f"index=true with compression={compression.lower()}",
            fix="leave out one of the two",
        )


@dataclass(frozen=True)
class ShardLimits:
    """When a file is full.

    Attributes:
        rows: Records at most, or None for no limit.
        bytes: Bytes at most, as stored, or None; a record that is longer gets a file of its own.
    """

    rows: int | None = None
    bytes: int | None = None

    def __post_init__(self) -> None:
        """Refuses limits below 1.

        Raises:
            ConfigError: A limit is not positive.
        """
        for name, limit in (("rows", self.rows), ("bytes", self.bytes)):
            if limit is not None and limit < 1:
                raise ConfigError(
                    f"bad limit of {name} per shard", received=limit, allowed="1 or more, or none"
                )

    @property
    def is_none(self) -> bool:
        """Whether there is no limit at all."""
        return self.rows is None and self.bytes is None


@dataclass(frozen=True)
class WrittenShard:
    """A finished file.

    Attributes:
        info: Path relative to the root that it was written under, rows, bytes and checksum.
        split_offsets: Byte offsets at which records begin, see `ShardFile`.
        statistics: Statistics of its features, or None.
        has_index: Whether its side file was written.
    """

    info: ShardInfo
    split_offsets: tuple[int, ...]
    statistics: dict[str, Any] | None = None
    has_index: bool = False

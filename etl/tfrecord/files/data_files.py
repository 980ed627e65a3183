"""Data files of an output directory: which they are, their digests, and their side indexes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from conf.errors import ConfigError, InputDataError, InternalError
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
    """Makes the folders of files; never the root, which may have been removed on purpose."""
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
    """Path of the shard of a Spark partition, without its ending."""
    for shards in ranges:
        if shards.start <= partition < shards.start + shards.count:
            return shards.stem(partition)
    raise InternalError("no shard is planned for a partition that has rows", received=partition)


def refuse_missing(where: object, listed: Collection[str], found: Collection[str]) -> None:
    """Refuses rows that went without a word."""
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
    """Formats a line `<byte offset> <bytes>` per record, framing included.

    Args:
        starts: Offset of each record in a buffer and, last, of the end; int64 `[records + 1]`.
        offset: Byte offset of the buffer in the file.
    """
    pairs = zip((starts[:-1] + offset).tolist(), np.diff(starts).tolist(), strict=True)
    return "".join(f"{start} {size}\n" for start, size in pairs)


def check_indexable(compression: Compression | None) -> None:
    """Refuses an index into compressed files."""
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
        """Refuses limits below 1."""
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
        partition_values: Value by partition column, None for null.
    """

    info: ShardInfo
    split_offsets: tuple[int, ...]
    statistics: dict[str, Any] | None = None
    has_index: bool = False
    partition_values: Mapping[str, str | None] = field(default_factory=dict)

"""Data files of an output directory: their places, their limits, and what is known of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from conf.errors import ConfigError, InputDataError, InternalError
from conf.manifest import ShardInfo
from conf.storage.locations import Compression


@dataclass(frozen=True)
class DataFile:
    """A file to read: absolute path or URI, size, partition values (None: null).

    `split_offsets` are byte offsets of records; None where no manifest lists the file.
    """

    path: str
    bytes: int
    partition: tuple[str | None, ...] = ()
    split_offsets: tuple[int, ...] | None = None


@dataclass(frozen=True)
class WrittenShard:
    """A finished file; its path is relative to the root that it was written under."""

    info: ShardInfo
    split_offsets: tuple[int, ...]
    statistics: dict[str, Any] | None = None
    has_index: bool = False
    partition_values: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True)
class ShardLimits:
    """Records and stored bytes of a file at most; a longer record gets a file of its own."""

    rows: int | None = None
    bytes: int | None = None

    def __post_init__(self) -> None:
        """Refuses limits below 1."""
        bad = {name: n for name, n in vars(self).items() if n is not None and n < 1}
        if bad:
            raise ConfigError("bad limit per shard", received=bad, allowed="1 or more, or none")

    @property
    def is_none(self) -> bool:
        return self.rows is None and self.bytes is None


@dataclass(frozen=True)
class ShardRange:
    """Shards of one folder, by successive Spark partitions from `start`, one each."""

    folder: str
    start: int
    count: int


def find_stem(ranges: Sequence[ShardRange], partition: int) -> str:
    """Path of the shard of a Spark partition, without its ending."""
    for shards in ranges:
        if shards.start <= partition < shards.start + shards.count:
            name = f"part-{partition - shards.start:05d}-of-{shards.count:05d}"
            return str(PurePosixPath(shards.folder, name))
    raise InternalError("no shard is planned for a partition that has rows", received=partition)


def list_folders(names: Iterable[str]) -> list[str]:
    """Folders of files and the folders around those, outermost first, the root left out."""
    folders = {str(p) for name in names for p in PurePosixPath(name).parents if str(p) != "."}
    return sorted(folders)


def make_folders(root: Path, names: Iterable[str]) -> None:
    """Makes the folders of files; never the root, which may have been removed on purpose."""
    for name in list_folders(names):
        (root / name).mkdir(exist_ok=True)


def index_path(shard: str) -> str:
    """Where the side file of a shard lies, hidden from readers; both below the root."""
    return f"_index/{shard}.idx"


def check_indexable(compression: Compression | None) -> None:
    """Refuses an index into compressed files, of which no record can be sought."""
    if compression is not None:
        received = f"index=true with compression={compression.lower()}"
        raise ConfigError("an index needs uncompressed shards", received=received)


def refuse_missing(where: object, listed: Collection[str], found: Collection[str]) -> None:
    """Refuses rows that went without a word."""
    missing = sorted(set(listed) - set(found))
    if missing:
        raise InputDataError(
            f"{where}/{missing[0]} is missing: its manifest lists it, but it is not there",
            received=f"{len(missing)} of {len(listed)} listed files missing",
            fix="restore the files, or remove the manifest to read what is left",
        )

"""Reads every byte of a dataset version again and compares it with the manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from conf.errors import InputDataError
from conf.manifest import FileInfo, Manifest, ShardInfo
from etl.tfrecord.codec.crc32c import crc32c
from etl.tfrecord.commit.output_manifest import OutputShard
from etl.tfrecord.files.framing import read_record_blocks
from etl.tfrecord.files.locations import Compression

_PIECE_BYTES = 4 << 20

OnBytes = Callable[[int], None]
"""Called with the number of bytes just read."""


@dataclass(frozen=True)
class Problem:
    """A file that is not what the manifest says.

    Attributes:
        file: Relative to the version, or the file as given.
        what: The difference; where a record is damaged, its byte offset.
    """

    file: str
    what: str


@dataclass(frozen=True)
class Verification:
    """Outcome of reading everything.

    Attributes:
        files: Files read.
        rows: Sound records found; of a damaged file a lower bound.
        bytes: Bytes read.
        problems: Differences; empty where all is well.
    """

    files: int
    rows: int
    bytes: int
    problems: tuple[Problem, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns the outcome as a JSON object."""
        return {"ok": not self.problems, **asdict(self)}


def verify_dataset(
    version: Path, manifest: Manifest, progress: OnBytes = lambda _: None
) -> Verification:
    """Recomputes size, CRC-32C and row count of each listed file; goes on after a bad one.

    Args:
        version: Directory of the version.
        manifest: Its manifest.
        progress: Called with the size of each piece read.
    """
    rows, problems = 0, []
    shards = [shard for split in manifest.splits for shard in split.shards]
    for shard in shards:
        found, whats = verify_shard(version, shard, manifest.compression, progress)
        rows += found
        problems += [Problem(shard.path, what) for what in whats]
    problems += check_files(version, manifest.other_files, progress)
    files = len(shards) + len(manifest.other_files)
    return Verification(files, rows, manifest.bytes, tuple(problems))


def verify_shard(
    version: Path, shard: ShardInfo, compression: str | None, progress: OnBytes = lambda _: None
) -> tuple[int, list[str]]:
    """Reads one shard.

    Args:
        version: Directory that its path starts from.
        shard: Its entry in the manifest.
        compression: The manifest's compression.
        progress: Called with the size of each piece read.

    Returns:
        Sound records found, and what differs.
    """
    whats = [problem.what for problem in check_files(version, [shard], progress)]
    path = version / shard.path
    if not path.is_file() or not path.resolve().is_relative_to(version.resolve()):
        return 0, whats
    named: dict[str | None, Compression] = {"gzip": "GZIP", "zlib": "ZLIB"}
    rows, damage = count_records(path, named.get(compression and compression.lower()))
    if damage:
        whats.append(damage)
    elif rows != shard.rows:
        whats.append(f"holds {rows:,} records, the manifest says {shard.rows:,}")
    elif whats:
        whats.append("every record is whole, so no offset can be named: another file?")
    return rows, whats


def count_records(
    path: Path, compression: Compression | Literal["auto"] | None
) -> tuple[int, str | None]:
    """Counts a file's records and verifies each.

    Returns:
        The count, and None; for a damaged file a lower bound of the sound records before the
        damage, and what is wrong, with the byte offset.
    """
    rows = 0
    try:
        for block in read_record_blocks(path, compression=compression):
            rows += len(block.index)
    except InputDataError as error:
        return rows, error.what.removeprefix(f"{path}: ")
    return rows, None


def check_files(
    root: Path,
    listed: Iterable[ShardInfo | FileInfo | OutputShard],
    progress: OnBytes = lambda _: None,
) -> Iterator[Problem]:
    """Compares the size and checksum of files with what a manifest says.

    Args:
        root: Directory that the manifest's paths start from.
        listed: The manifest's entries.
        progress: Called with the size of each piece read.
    """
    for item in listed:
        path = root / item.path
        if not path.resolve().is_relative_to(root.resolve()):
            yield Problem(item.path, "lies outside its dataset version")
        elif not path.is_file():
            yield Problem(item.path, "is missing")
        else:
            size, checksum = path.stat().st_size, read_checksum(path, progress)
            if size != item.bytes:
                what = f"is {size:,} bytes long, the manifest says {item.bytes:,}"
                yield Problem(item.path, what)
            if checksum != item.crc32c:
                yield Problem(item.path, f"CRC-32C is {checksum}, the manifest says {item.crc32c}")


def read_checksum(path: Path, progress: OnBytes = lambda _: None) -> str:
    """Returns the CRC-32C of a file's bytes, 8 hex digits."""
    checksum = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            checksum = crc32c(piece, checksum)
            progress(len(piece))
    return f"{checksum:08x}"

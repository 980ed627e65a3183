"""Reads every byte of a dataset version again and compares it with the manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from conf.errors import InputDataError
from conf.manifest import Manifest, ShardInfo
from etl.tfrecord.codec.crc32c import crc32c
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
        what: What differs; names the byte offset wherever a record is damaged.
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
        problems: What differs; empty where all is well.
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
        progress: Told of each piece read.
    """
    files, rows, read = 0, 0, 0
    problems: list[Problem] = []
    for split in manifest.splits:
        for shard in split.shards:
            found, whats = verify_shard(version, shard, manifest.compression, progress)
            files, rows, read = files + 1, rows + found, read + shard.bytes
            problems += [Problem(shard.path, what) for what in whats]
    for item in manifest.other_files:
        files, read = files + 1, read + item.bytes
        whats = list(_check_bytes(version, item.path, item.bytes, item.crc32c, progress))
        problems += [Problem(item.path, what) for what in whats]
    return Verification(files, rows, read, tuple(problems))


def verify_shard(
    version: Path, shard: ShardInfo, compression: str | None, progress: OnBytes = lambda _: None
) -> tuple[int, list[str]]:
    """Reads one shard.

    Args:
        version: Directory that its path starts from.
        shard: What it should be.
        compression: The manifest's compression.
        progress: Told of each piece read.

    Returns:
        Sound records found, and what differs.
    """
    whats = list(_check_bytes(version, shard.path, shard.bytes, shard.crc32c, progress))
    path = version / shard.path
    if not path.is_file() or not path.resolve().is_relative_to(version.resolve()):
        return 0, whats
    rows, damage = count_records(path, _wire_compression(compression))
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


def _check_bytes(
    root: Path, relative: str, size: int, checksum: str, progress: OnBytes
) -> Iterator[str]:
    path = root / relative
    if not path.resolve().is_relative_to(root.resolve()):
        yield "lies outside its dataset version"
        return
    if not path.is_file():
        yield "is missing"
        return
    found = path.stat().st_size
    if found != size:
        yield f"is {found:,} bytes long, the manifest says {size:,}"
    actual = read_checksum(path, progress)
    if actual != checksum:
        yield f"CRC-32C is {actual}, the manifest says {checksum}"


def read_checksum(path: Path, progress: OnBytes = lambda _: None) -> str:
    """Returns the CRC-32C of a file's bytes, 8 hex digits."""
    checksum = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            checksum = crc32c(piece, checksum)
            progress(len(piece))
    return f"{checksum:08x}"


def _wire_compression(compression: str | None) -> Compression | None:
    names: dict[str, Compression] = {"gzip": "GZIP", "zlib": "ZLIB"}
    return None if compression is None else names.get(compression.lower())

"""Reads every byte of a dataset version again and compares it with the manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from conf.errors import InputDataError
from conf.local_paths import absolute_path
from conf.manifest import FileInfo, Manifest, ShardInfo
from etl.tfrecord.codec.crc32c import describe_file
from etl.tfrecord.codec.framing import RecordBlock, read_record_blocks
from etl.tfrecord.commit.output_directory import OutputShard

OnBytes = Callable[[int], None]
"""Called with the number of bytes just read."""


class Problem(NamedTuple):
    """A file that is not what the manifest says."""

    file: str  # relative to the version, or the file as given
    what: str  # the difference; where a record is damaged, its byte offset


class Verification(NamedTuple):
    """Outcome of reading everything."""

    files: int
    rows: int  # sound records found; of a damaged file a lower bound
    bytes: int  # of the files as they should be
    problems: tuple[Problem, ...]  # empty where all is well

    def to_json(self) -> dict[str, Any]:
        """Returns the outcome as a JSON object."""
        problems = [problem._asdict() for problem in self.problems]
        return {"ok": not problems, **self._asdict(), "problems": problems}


def verify_dataset(
    version: Path, manifest: Manifest, progress: OnBytes = lambda _: None
) -> Verification:
    """Compares all files of a version with its manifest, see `verify_files`."""
    shards = [shard for split in manifest.splits for shard in split.shards]
    return verify_files(version, [*shards, *manifest.other_files], progress)


def verify_files(
    root: Path,
    listed: Iterable[ShardInfo | FileInfo | OutputShard],
    progress: OnBytes = lambda _: None,
) -> Verification:
    """Compares size, CRC-32C and, of shards, row count of each file; goes on after a bad one.

    Args:
        root: Directory that the manifest's paths start from.
        listed: The manifest's entries.
        progress: Called with the size of each file read.
    """
    entries, rows, problems = list(listed), 0, []
    for entry in entries:
        found, whats = _verify_file(root, entry)
        rows += found
        problems += [Problem(entry.path, what) for what in whats]
        progress(entry.bytes)
    return Verification(len(entries), rows, sum(e.bytes for e in entries), tuple(problems))


def _verify_file(root: Path, entry: ShardInfo | FileInfo | OutputShard) -> tuple[int, list[str]]:
    """Returns the sound records of a shard, and what differs."""
    path = root / entry.path
    if not absolute_path(path).is_relative_to(absolute_path(root)):
        return 0, ["lies outside its dataset version"]
    if not path.is_file():
        return 0, ["is missing"]
    file, whats = describe_file(root, path), []
    if file.bytes != entry.bytes:
        whats.append(f"is {file.bytes:,} bytes long, the manifest says {entry.bytes:,}")
    if file.crc32c != entry.crc32c:
        whats.append(f"CRC-32C is {file.crc32c}, the manifest says {entry.crc32c}")
    if not isinstance(entry, ShardInfo):
        return 0, whats
    rows, damage = count_records(path)
    if damage:
        whats.append(damage)
    elif rows != entry.rows:
        whats.append(f"holds {rows:,} records, the manifest says {entry.rows:,}")
    elif whats:
        whats.append("every record is whole, so no offset can be named: another file?")
    return rows, whats


def count_records(
    path: Path, on_block: Callable[[RecordBlock], None] = lambda _: None
) -> tuple[int, str | None]:
    """Counts a file's records and verifies each.

    Args:
        path: TFRecord file, plain or compressed.
        on_block: Called with the records; may refuse them by `InputDataError`.

    Returns:
        The count, and None; for a damaged file a lower bound of the sound records before the
        damage, and what is wrong, with the byte offset.
    """
    rows = 0
    try:
        for block in read_record_blocks(path):
            rows += len(block.index)
            on_block(block)
    except InputDataError as error:
        return rows, error.what.removeprefix(f"{path}: ")
    return rows, None

"""The data files of an output directory, and digests of what they were at a moment."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from conf.errors import InputDataError


def is_data_file(name: str) -> bool:
    """Whether a file is a shard by its name, whichever connector wrote it."""
    return not name.startswith((".", "_")) and (name.startswith("part-") or ".tfrecord" in name)


def is_partition(name: str) -> bool:
    """Whether a directory is a partition by its name."""
    return "=" in name and not name.startswith((".", "_", "="))


def _walk(folder: Path, relative: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.is_dir(follow_symlinks=False):
                if is_partition(entry.name):
                    yield from _walk(folder / entry.name, f"{relative}{entry.name}/")
            elif is_data_file(entry.name) and entry.is_file():
                yield f"{relative}{entry.name}", entry


def list_data_files(root: Path) -> list[str]:
    """Lists the shards of a directory and of its partition directories.

    Args:
        root: Output directory; need not exist.

    Returns:
        Paths relative to it. Other files, and folders that are no partitions, are passed over.
    """
    return [relative for relative, _ in _walk(root, "")]


def digest_partitions(root: Path) -> dict[str, str]:
    """Digests name, size, time and inode of the shards in each partition directory.

    Args:
        root: Output directory; need not exist.

    Returns:
        Digest by directory relative to the root, "" for the root itself; directories without
        shards are left out.
    """
    digests: dict[str, hashlib._Hash] = {}
    for relative, entry in _walk(root, ""):
        with contextlib.suppress(FileNotFoundError):
            stat = entry.stat()
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


def refuse_missing(listed: Sequence[Path], root: Path) -> None:
    """Refuses rows that went without a word; a partition removed as a whole was meant to go.

    Args:
        listed: Files that a manifest lists.
        root: Only files below it count.

    Raises:
        InputDataError: One is gone.
    """
    missing = [
        path
        for path in listed
        if path.is_relative_to(root) and path.parent.is_dir() and not path.exists()
    ]
    if missing:
        raise InputDataError(
            f"{missing[0]} is missing, but its manifest lists it",
            received=f"{len(missing)} of {len(listed)} listed files missing",
            fix="restore the files, or write the directory again; to read what is left, remove "
            "the manifest",
        )

"""Atomic replacement of an output file or directory, whole or not at all."""

from __future__ import annotations

import ctypes
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from conf.errors import UpstreamNotReadyError
from conf.storage.processes import hold_file_lock

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
PRIVATE = 0o640
"""Mode of files that hold what users did: for their owner and group alone."""


@contextmanager
def staged_directory(target: Path) -> Iterator[Path]:
    """Yields an empty directory that takes the target's place when the block ends well."""
    target.parent.mkdir(parents=True, exist_ok=True)
    lock, staging, replaced = (
        target.with_name(f".{target.name}.{kind}") for kind in ("lock", "staging", "replaced")
    )
    refusal = UpstreamNotReadyError(
        f"{target} is being written by another process right now",
        received=f"a lock on {lock}",
        fix="wait for it to end, then run again",
    )
    with hold_file_lock(lock, refusal):
        if replaced.exists() and not target.exists():
            replaced.rename(target)  # A kill came between the two renames of `_put_in_place`.
        _remove(replaced)
        _remove(staging)
        staging.mkdir()
        try:
            yield staging
            sync_tree(staging)
            _put_in_place(staging, target, replaced)
        finally:
            _remove(staging)


def exchange(first: Path, second: Path) -> bool:
    """Swaps two names in one atomic step; False where the system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    names = [(_AT_FDCWD, os.fsencode(path)) for path in (first, second)]
    return bool(renameat2(*names[0], *names[1], _RENAME_EXCHANGE) == 0)


def _put_in_place(staging: Path, target: Path, replaced: Path) -> None:
    if not target.exists():
        staging.rename(target)
    elif not exchange(staging, target):
        target.rename(replaced)
        staging.rename(target)
        _remove(replaced)
    sync_directory(target.parent)


def _remove(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)


def sync_tree(root: Path) -> None:
    """Makes all files below a directory survive a power cut; what links lead to is not its own."""
    for directory, _, files in os.walk(root):
        for path in (*(Path(directory, name) for name in files), Path(directory)):
            if path == root or not path.is_symlink():
                sync_directory(path)


def sync_directory(path: Path) -> None:
    """Makes renames inside a directory survive a power cut; of a file, what it holds."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


UNFINISHED_SUFFIX = ".tmp"


def write_text_atomic(path: Path, text: str) -> None:
    """Writes a text file in UTF-8; see `write_bytes_atomic`."""
    write_bytes_atomic(path, text.encode("utf-8"))


def write_bytes_atomic(path: Path, data: bytes | memoryview) -> None:
    """Writes a file so that readers see the old content or the new, never a part."""
    with atomic_file(path) as unfinished:
        unfinished.write_bytes(data)


@contextmanager
def atomic_file(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Gives a hidden path to write, which takes the file's name when the block ends well."""
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}{UNFINISHED_SUFFIX}")
    try:
        yield unfinished
        if durable:
            sync_directory(unfinished)
        unfinished.replace(path)
        if durable:
            sync_directory(path.parent)
    except OSError as error:
        if error.errno and error.filename is None:
            error.filename = str(path)  # a full disk does not say what it had no room for
        raise
    finally:
        unfinished.unlink(missing_ok=True)


def remove_unfinished(path: Path) -> None:
    """Removes what killed writers of a file left beside it; none may be at work."""
    for unfinished in path.parent.glob(f".{path.name}.*{UNFINISHED_SUFFIX}"):
        unfinished.unlink()


def link_file(source: Path, target: Path) -> None:
    """Gives a file a second name, or copies it where the file system has no links."""
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError:
        shutil.copyfile(source, target)

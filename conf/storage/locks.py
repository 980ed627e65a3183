"""Locks on files of this machine, or of a shared file system that carries `flock` between them.

The kernel frees it when its process ends, however it ends. The lock file stays: removing it would
let two processes lock two different files. By such a lock a folder lasts as long as its process.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from conf.errors import SluiceError


@contextmanager
def hold_file_lock(file: Path, refusal: SluiceError | None = None) -> Iterator[None]:
    """Holds a lock while the block runs; without a refusal it waits for another holder to end."""
    # Imported late: Spark's executors import `conf` and need not have the library.
    from filelock import FileLock, Timeout

    # A soft lock, its answer to a file system without locks, would outlive a killed process.
    lock = FileLock(file, fallback_to_soft=False)
    try:
        lock.acquire(blocking=refusal is None)
    except Timeout as error:
        if refusal is None:
            raise
        raise refusal from error
    try:
        yield
    finally:
        lock.release()


_LOCK = "lock"


class _HeldError(SluiceError):
    pass


@contextmanager
def hold_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """Makes a folder for the time of the block; removes those of its prefix that the dead left."""
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    _sweep(parent, prefix)
    # It is named once it is locked, so that no other process takes it for a dead one's.
    new = Path(tempfile.mkdtemp(prefix=f"new-{prefix}", dir=parent))
    folder = parent / new.name.removeprefix("new-")
    try:
        with hold_file_lock(new / _LOCK):
            new.rename(folder)
            yield folder
    finally:
        for path in (new, folder):
            shutil.rmtree(path, ignore_errors=True)


def _sweep(parent: Path, prefix: str) -> None:
    for folder in parent.glob(f"{prefix}*"):
        try:
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            with hold_file_lock(folder / _LOCK, _HeldError("held")):
                shutil.rmtree(folder, ignore_errors=True)
        except (OSError, _HeldError):
            continue  # Of a live process, or gone already.

"""Atomic replacement of an output file or directory, whole or not at all."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from conf.errors import UpstreamNotReadyError
from conf.locks import hold_file_lock
from conf.paths import sync_directory

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextmanager
def staged_directory(target: Path) -> Iterator[Path]:
    """Yields an empty directory that takes the target's place when the block ends well.

    The target is never missing or incomplete: where the kernel can swap two names in one step, a
    kill at any moment leaves either the old content or the new. What a killed process left
    behind is swept by the next one.

    Args:
        target: Directory to create or replace.

    Raises:
        UpstreamNotReadyError: Another process is writing the same target.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = target.with_name(f".{target.name}.lock")
    refusal = UpstreamNotReadyError(
        f"{target} is being written by another process right now",
        received=f"a lock on {lock}",
        fix="wait for it to end, then run again",
    )
    with hold_file_lock(lock, refusal):
        staging = target.with_name(f".{target.name}.staging")
        _recover(target)
        _remove(staging)
        staging.mkdir()
        try:
            yield staging
            _sync_tree(staging)
            _put_in_place(staging, target)
        finally:
            _remove(staging)


def exchange(first: Path, second: Path) -> bool:
    """Swaps two names in one atomic step; False where the system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    status = renameat2(
        _AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE
    )
    return bool(status == 0)


def _put_in_place(staging: Path, target: Path) -> None:
    if not target.exists():
        staging.rename(target)
    elif not exchange(staging, target):
        # Two steps: a kill in between is repaired by the next writer (`_recover`).
        replaced = _replaced(target)
        _remove(replaced)
        target.rename(replaced)
        staging.rename(target)
        _remove(replaced)
    sync_directory(target.parent)


def _recover(target: Path) -> None:
    replaced = _replaced(target)
    if replaced.exists() and not target.exists():
        replaced.rename(target)
    _remove(replaced)


def _replaced(target: Path) -> Path:
    return target.with_name(f".{target.name}.replaced")


def _remove(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)


def _sync_tree(root: Path) -> None:
    for directory, _, files in os.walk(root):
        for name in files:
            with (Path(directory) / name).open("rb") as handle:
                os.fsync(handle.fileno())
        sync_directory(Path(directory))

"""Folders of this machine that last as long as their process; what killed ones left is removed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from conf.errors import SluiceError
from conf.storage.locks import hold_file_lock

_LOCK = "lock"


class _HeldError(SluiceError):
    pass


@contextmanager
def hold_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """Makes a folder for the time of the block, and removes those that a killed process left.

    Args:
        prefix: Begins its name; folders beside it whose names begin with it are of its kind.
        parent: Where it is made; None: `TMPDIR`.
    """
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

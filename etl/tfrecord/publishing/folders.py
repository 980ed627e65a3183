"""Folders of files that are given by paths relative to a root."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path, PurePosixPath


def list_folders(names: Iterable[str]) -> list[str]:
    """Folders of files and the folders around those, outermost first, the root left out."""
    folders = {str(p) for name in names for p in PurePosixPath(name).parents if str(p) != "."}
    return sorted(folders)


def make_folders(root: Path, names: Iterable[str]) -> None:
    """Makes the folders of files; never the root, which may have been removed on purpose.

    Raises:
        FileNotFoundError: The root is not there.
    """
    for name in list_folders(names):
        (root / name).mkdir(exist_ok=True)

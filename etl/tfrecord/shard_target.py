"""Where the bytes of a shard go: a local file, or an upload; there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path
from typing import Any, Protocol, TextIO

from conf.dataset import sync_directory
from etl.tfrecord.publishing.folders import make_folders
from etl.tfrecord.side_index import index_path
from etl.tfrecord.storage import Storage


class ShardTarget(Protocol):
    """Takes the bytes of one shard and, where it has one, the lines of its side file."""

    name: str
    has_index: bool

    def write(self, data: Any) -> None:
        """Appends bytes."""

    def write_index(self, text: str) -> None:
        """Appends lines to the side file."""

    def finish(self) -> None:
        """Makes the shard appear."""

    def discard(self) -> None:
        """Leaves nothing, unless it has appeared already."""


class LocalTarget:
    """A temporary file next to the target, which takes its name in the end."""

    def __init__(self, path: Path, index: Path | None = None) -> None:
        """Opens the files.

        Args:
            path: Target; its directory must exist.
            index: Side file, or None.

        Raises:
            OSError: The files cannot be created.
        """
        self.name, self.has_index = path.name, index is not None
        self._path = path
        self._temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
        self._file = self._temporary.open("xb", buffering=1 << 18)
        self._index: TextIO | None = None
        if index is not None:
            self._index = index.open("x", encoding="ascii")

    def write(self, data: Any) -> None:
        """Appends bytes."""
        self._file.write(data)

    def write_index(self, text: str) -> None:
        """Appends lines to the side file."""
        if self._index is not None:
            self._index.write(text)

    def finish(self) -> None:
        """Gives the file its name.

        Raises:
            OSError: The file cannot be written; nothing is left of it.
        """
        try:
            for file in (self._file, self._index):
                if file is not None:
                    file.flush()
                    os.fsync(file.fileno())
            self._temporary.replace(self._path)
            sync_directory(self._path.parent)
        finally:
            self.discard()

    def discard(self) -> None:
        """Closes the file and removes it, unless it has its name already."""
        try:
            if self._index is not None:
                self._index.close()
            self._file.close()  # flushes, and so fails on a full disk
        finally:
            self._temporary.unlink(missing_ok=True)


class StoredTarget:
    """An upload to an object that no one else writes."""

    def __init__(self, storage: Storage, key: str, index: str | None = None) -> None:
        """Opens the uploads.

        Args:
            storage: Directory of the task attempt.
            key: Target in it.
            index: Side file, or None.

        Raises:
            OSError: The store refuses.
        """
        self.name, self.has_index = key.rpartition("/")[2], index is not None
        self._storage, self._keys = storage, [key, *([index] if index else [])]
        self._streams = [storage.open_output(key) for key in self._keys]
        self._is_finished = False

    def write(self, data: Any) -> None:
        """Appends bytes."""
        self._streams[0].write(data)

    def write_index(self, text: str) -> None:
        """Appends lines to the side file."""
        if self.has_index:
            self._streams[1].write(text.encode("ascii"))

    def finish(self) -> None:
        """Ends the uploads, the shard's last.

        Raises:
            OSError: The store refuses.
        """
        for stream in reversed(self._streams):
            stream.close()
        self._is_finished = True

    def discard(self) -> None:
        """Ends the uploads, which cannot be called off, and deletes what came of them."""
        if self._is_finished:
            return
        self._is_finished = True
        for key, stream in zip(self._keys, self._streams, strict=True):
            with contextlib.suppress(OSError):
                stream.close()
            with contextlib.suppress(OSError):
                self._storage.delete(key)


def open_target(root: Path | Storage, path: str, has_index: bool) -> ShardTarget:
    """Opens a shard below a directory that exists, folders in between are made.

    Args:
        root: The directory.
        path: The shard, relative to it.
        has_index: Whether it gets a side file.

    Raises:
        OSError: It cannot be created.
    """
    side = index_path(path) if has_index else None
    if isinstance(root, Storage):
        return StoredTarget(root, path, side)
    make_folders(root, [path, *([side] if side else [])])
    return LocalTarget(root / path, root / side if side else None)

"""Files in object stores, read as those of a file system are."""

from __future__ import annotations

import contextlib
import errno
import functools
import posixpath
from collections.abc import Iterator
from dataclasses import dataclass, replace

from etl.tfrecord.connectors import unreachable
from etl.tfrecord.storage import Storage, StoredObject

# What is at most this long is fetched once per process, as long as it stays what it was.
_KEPT_BYTES, _KEPT_FILES = 8 << 20, 32


@dataclass(frozen=True)
class StoredPath:
    """A place in an object store, used like a `pathlib.Path`: a `conf.place.Place`.

    What a store refuses ends in a ConfigError, what is not there in a FileNotFoundError.

    Attributes:
        storage: The place.
    """

    storage: Storage

    def __str__(self) -> str:
        """Its URI."""
        return self.storage.uri

    @property
    def name(self) -> str:
        """Last part of the path."""
        return self.storage.name

    def __truediv__(self, key: str, /) -> StoredPath:
        """A place below this one."""
        return StoredPath(self.storage.child(key))

    def absolute(self) -> StoredPath:
        """The same place: there is no working directory."""
        return self

    def resolve(self) -> StoredPath:
        """The same place, without `..`."""
        return StoredPath(replace(self.storage, root=posixpath.normpath(self.storage.root)))

    def is_relative_to(self, other: StoredPath, /) -> bool:
        """Whether the other one is this one, or around it."""
        mine, others = (f"{path.storage.uri}/" for path in (self, other))
        return mine.startswith(others)

    def is_file(self) -> bool:
        """Whether there is an object."""
        return self._find() is not None

    def read_bytes(self) -> bytes:
        """The content of the object."""
        found = self._find()
        if found is not None and found.bytes <= _KEPT_BYTES:
            return _read_small(self.storage, found)
        return _read(self.storage)

    def read_text(self, encoding: str | None = None, errors: str | None = None) -> str:
        """The content of the object, decoded."""
        return self.read_bytes().decode(encoding or "utf-8", errors or "strict")

    def list_bytes(self) -> dict[str, int]:
        """Size of each object below, by its path from here."""
        with _reaching(self.storage):
            return {key: item.bytes for key, item in self.storage.list_objects().items()}

    def has_bucket(self) -> bool:
        """Whether the bucket is there, or the store does not tell."""
        bucket = replace(self.storage, root=self.storage.root.partition("/")[0])
        try:
            return bucket.is_directory()
        except OSError:
            return True

    def _find(self) -> StoredObject | None:
        with _reaching(self.storage):
            return self.storage.find()


@functools.lru_cache(_KEPT_FILES)
def _read_small(storage: Storage, found: StoredObject) -> bytes:
    return _read(storage)


def _read(storage: Storage) -> bytes:
    with _reaching(storage):
        data = storage.read("")
    if data is None:
        raise FileNotFoundError(errno.ENOENT, "there is no such object", storage.uri)
    return data


@contextlib.contextmanager
def _reaching(storage: Storage) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise unreachable(storage.uri, error) from error

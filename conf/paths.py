"""Places that are only read: files and folders here or in an object store, by one interface."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol, Self, TypeVar, runtime_checkable

from conf.errors import ConfigError


class ReadablePath(Protocol):
    """A file or directory that is only read: what readers use of `pathlib.Path`, which is one.

    Its text is the path or URI that a user would write.
    """

    @property
    def name(self) -> str:
        """Last part of the path."""
        ...

    @property
    def parent(self) -> Self:
        """The directory around it."""
        ...

    def __truediv__(self, key: str, /) -> Self:
        """A path below this one."""
        ...

    def absolute(self) -> Self:
        """The same file, whatever the working directory."""
        ...

    def resolve(self) -> Self:
        """The same file, without `..` and links."""
        ...

    def is_relative_to(self, other: Self, /) -> bool:
        """Whether the other one is this one, or around it."""
        ...

    def is_file(self) -> bool:
        """Whether there is a file."""
        ...

    def read_bytes(self) -> bytes:
        """The content of the file."""
        ...

    def read_text(self, encoding: str | None = None, errors: str | None = None) -> str:
        """The content of the file, decoded."""
        ...


@runtime_checkable
class StoreDirectory(Protocol):
    """A directory in an object store: what a `ReadablePath` there can say besides."""

    def list_bytes(self) -> dict[str, int]:
        """Size of each object below, by its path from here."""
        ...

    def list_folders(self) -> set[str]:
        """The folders in this one by name."""
        ...

    def has_bucket(self) -> bool:
        """Whether the bucket is there, or the store does not tell."""
        ...


def list_folders(place: ReadablePath) -> set[str]:
    """Returns the names of the directories in one, wherever it lies; none where it is not there."""
    if isinstance(place, StoreDirectory):
        return place.list_folders()
    directory = Path(str(place))
    return {p.name for p in directory.iterdir() if p.is_dir()} if directory.is_dir() else set()


def require_bucket(place: object) -> None:
    """Refuses a place in a bucket that is not there.

    Raises:
        ConfigError: There is no such bucket.
    """
    if isinstance(place, StoreDirectory) and not place.has_bucket():
        raise no_such_bucket(place)


def no_such_bucket(place: object) -> ConfigError:
    """Builds the error of a path whose bucket is not there."""
    return ConfigError(
        "there is no such bucket",
        received=str(place),
        fix="correct the path, or the endpoint and region that the environment names",
    )


ReadablePathT = TypeVar("ReadablePathT", bound=ReadablePath)

CURRENT_FILE = "CURRENT"
WRITABLE_STORES = ("s3", "s3a", "gs", "az", "hdfs")
"""Schemes of stores that published directories may lie in."""


def open_sizes(version: ReadablePath) -> Callable[[str], int | None]:
    """Returns what gives the size of a file by its path below a directory; None: it is missing.

    In an object store one listing gives all sizes.
    """
    if isinstance(version, StoreDirectory):
        return version.list_bytes().get
    return partial(_find_bytes, version)


def _find_bytes(version: ReadablePath, relative: str) -> int | None:
    try:
        return Path(str(version), relative).stat().st_size
    except OSError:
        return None

"""Where a dataset lies, as its readers see it: on a file system, or elsewhere."""

from __future__ import annotations

from typing import Protocol, Self


class Place(Protocol):
    """A file or directory that is only read: what readers use of `pathlib.Path`, which is one.

    Its text is the path or URI that a user would write.
    """

    @property
    def name(self) -> str:
        """Last part of the path."""
        ...

    def __truediv__(self, key: str, /) -> Self:
        """A place below this one."""
        ...

    def absolute(self) -> Self:
        """The same place, whatever the working directory."""
        ...

    def resolve(self) -> Self:
        """The same place, without `..` and links."""
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

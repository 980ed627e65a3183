"""What Sluice asks of every object store, and of HDFS."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal, Protocol, cast

Settings = tuple[tuple[str, str], ...]
Version = Mapping[str, str]
"""Tells the contents that an object has had apart; what it holds is the store's affair."""

_READ_BYTES = 4 << 20


@dataclass(frozen=True)
class StoredObject:
    """An object as a listing shows it.

    Attributes:
        bytes: Its size.
        mtime_ns: When it was written, by the store's clock; 0 where the store does not say.
    """

    bytes: int
    mtime_ns: int


class Upload(Protocol):
    """An object on its way, which appears when this is closed."""

    def write(self, data: Any, /) -> object:
        """Appends bytes."""
        ...

    def close(self) -> None:
        """Ends it."""
        ...


class StoreClient(Protocol):
    """What is asked of a bucket or of HDFS; paths are relative to its root.

    All raise an `OSError` where the store does not answer, or refuses.
    """

    def head(self, path: str) -> StoredObject | None:
        """Looks for an object."""
        ...

    def list_below(self, folder: str) -> Iterator[tuple[str, StoredObject]]:
        """Gives the path of each object below a folder."""
        ...

    def list_folders(self, folder: str) -> Iterator[str]:
        """Gives the path of each folder in a folder."""
        ...

    def has_bucket(self) -> bool:
        """Whether the bucket is there."""
        ...

    def get(self, path: str) -> tuple[bytes, Version]:
        """Reads an object as it is at one moment; raises `FileNotFoundError` without one."""
        ...

    def open_input(self, path: str) -> BinaryIO:
        """Opens an object for reading and seeking; raises `FileNotFoundError` without one."""
        ...

    def put(self, path: str, data: bytes, over: Version | Literal["any"] | None) -> None:
        """Creates or replaces an object in one step.

        Args:
            path: The object.
            data: Its content.
            over: The version that it must have, None where there must be none.

        Raises:
            FileExistsError: There is another one.
        """
        ...

    def open_output(self, path: str) -> Upload:
        """Opens an upload."""
        ...

    def move(self, source: str, target: str) -> None:
        """Gives an object another name, in place of what has it.

        Where the store can only copy, the source stays: whoever calls deletes it afterwards.
        """
        ...

    def delete(self, path: str, within: str) -> None:
        """Deletes an object, if it is there.

        Args:
            path: The object.
            within: A folder; those below it that become empty go too, where folders are more
                than a part of names.
        """
        ...

    def move_folder(self, source: str, target: str) -> bool:
        """Moves a folder in one step; returns False, and does nothing, where the store cannot."""
        ...

    def remove_folder(self, folder: str) -> bool:
        """Removes a folder with all in it, uploads too, in one step.

        Returns:
            False, having done nothing, where the store cannot.
        """
        ...

    def remove_uploads(self, folder: str, held: str) -> None:
        """Removes the uploads below a folder that never ended, where the store shows them.

        Args:
            folder: Nobody else is writing there,
            held: but in folders below it that hold an object of this name, which are left alone.
        """
        ...


class _RangeReader(io.RawIOBase):
    """Reads an object piece by piece."""

    def __init__(self, size: int, fetch: Callable[[int, int], Any]) -> None:
        self._size, self._fetch, self._position = size, fetch, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = start + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        length = max(0, min(len(buffer), self._size - self._position))
        if length:
            buffer[:length] = memoryview(self._fetch(self._position, length))
            self._position += length
        return length


def open_ranges(size: int, fetch: Callable[[int, int], Any]) -> BinaryIO:
    """Opens what is fetched piece by piece for reading and seeking.

    Args:
        size: Of all of it, in bytes.
        fetch: Gives the bytes from an offset on, so many of them.
    """
    return cast(BinaryIO, io.BufferedReader(_RangeReader(size, fetch), _READ_BYTES))

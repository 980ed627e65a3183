"""A file of a read, wherever it lies."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DataFile:
    """A file to read.

    Attributes:
        path: Absolute path, or URI of an object.
        bytes: Its size.
        partition: Partition values in the order of the columns, None for null.
        split_offsets: Byte offsets of records as the manifest lists them; None where it does not
            list the file.
    """

    path: str
    bytes: int
    partition: tuple[str | None, ...] = ()
    split_offsets: tuple[int, ...] | None = None

"""A file as the manifest lists it."""

from __future__ import annotations

from pathlib import Path

from conf.manifest import FileInfo
from etl.tfrecord.crc32c import crc32c

_READ_BYTES = 4 << 20


def describe_file(root: Path, path: Path) -> FileInfo:
    """Describes a file for the manifest.

    Args:
        root: Directory that holds the manifest.
        path: The file.
    """
    checksum = size = 0
    with path.open("rb") as handle:
        while piece := handle.read(_READ_BYTES):
            checksum, size = crc32c(piece, checksum), size + len(piece)
    return FileInfo(str(path.relative_to(root)), size, f"{checksum:08x}")

"""Side files with the place of every record, in the text form that NVIDIA DALI reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from conf.errors import ConfigError
from etl.tfrecord.byte_source import Compression

# Hidden, so that no reader takes the side files for data.
INDEX_DIRECTORY = "_index"


def index_path(shard: str) -> str:
    """Where the side file of a shard lies, both relative to the output directory."""
    return f"{INDEX_DIRECTORY}/{shard}.idx"


def format_index(starts: np.ndarray, offset: int) -> str:
    """Formats entries of consecutive records.

    Args:
        starts: Offset of each record in a buffer and, last, of the end; int64 `[records + 1]`.
        offset: Byte offset of the buffer in the file.

    Returns:
        A line `<byte offset> <bytes>` per record, framing included.
    """
    pairs = zip((starts[:-1] + offset).tolist(), np.diff(starts).tolist(), strict=True)
    return "".join(f"{start} {size}\n" for start, size in pairs)


def read_index(path: str | Path) -> Iterator[tuple[int, int]]:
    """Reads a side file: offset and bytes of each record, in file order."""
    with Path(path).open(encoding="ascii") as file:
        for line in file:
            start, size = line.split()
            yield int(start), int(size)


def check_indexable(compression: Compression | None) -> None:
    """Refuses an index into compressed files.

    Raises:
        ConfigError: The files are compressed.
    """
    if compression is not None:
        raise ConfigError(
            "an index needs uncompressed shards: records of a compressed one cannot be sought",
            received=f"index=true with compression={compression.lower()}",
            fix="leave out one of the two",
        )

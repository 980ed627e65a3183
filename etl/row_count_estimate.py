"""About how many rows files hold, for what shows how long reading them will take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from conf.storage.table_files import open_parquet
from etl.tfrecord.codec.framing import detect_compression, scan_buffer

SAMPLE_BYTES = 1 << 20


def estimate_rows(files: Sequence[Path], file_format: str) -> int | None:
    """Estimates the rows of files: exactly of Parquet, else by the start of the first of them.

    Args:
        files: Of one format.
        file_format: `tfrecord`, `parquet` or `csv`; a CSV file has a header.

    Returns:
        None where it cannot be told: compressed or damaged files, and a start without a whole row.
    """
    try:
        if file_format == "parquet":
            return sum(open_parquet(file).metadata.num_rows for file in files)
        with files[0].open("rb") as file:
            start = file.read(SAMPLE_BYTES)
        rows, length = (_count_records if file_format == "tfrecord" else _count_lines)(start)
        size = sum(file.stat().st_size for file in files)
    except (OSError, ValueError):  # Who converts says what is wrong with a file.
        return None
    return None if rows == 0 else max(1, round(size * rows / length))


def _count_records(start: bytes) -> tuple[int, int]:
    """Counts whole records, and their bytes."""
    if detect_compression(start[:12]) is not None:
        return 0, 0
    found, end, _, _ = scan_buffer(np.frombuffer(start, np.uint8), verify=False)
    return len(found), end


def _count_lines(start: bytes) -> tuple[int, int]:
    """Counts whole lines, and their bytes; a last line may have no end."""
    if len(start) < SAMPLE_BYTES and not start.endswith(b"\n"):
        start += b"\n"
    return max(0, start.count(b"\n") - 1), start.rfind(b"\n") + 1

"""What tests read of TFRecord files and their side files: payloads, places, damage set aside."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from etl.tfrecord.codec.framing import read_record_blocks
from etl.tfrecord.spark.read_task import QuarantinedRange


def read_records(path: str | Path) -> Iterator[bytes]:
    """A file's payloads one by one, plain or compressed."""
    for block in read_record_blocks(path):
        for start, length in block.index.tolist():
            yield block.data[start : start + length].tobytes()


def read_index(path: Path) -> list[tuple[int, int]]:
    """Offset and bytes of each record, in file order, of a side file."""
    lines = path.read_text(encoding="ascii").splitlines()
    return [(int(start), int(size)) for start, size in map(str.split, lines)]


def read_quarantine(directory: Path) -> list[QuarantinedRange]:
    """What a `quarantinePath` holds, by file and offset; a range found by several reads once."""
    paths = sorted(directory.glob("*.jsonl"))
    lines = [line for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
    ranges = [QuarantinedRange(**json.loads(line)) for line in lines]
    found = {(bad.file, bad.offset): bad for bad in ranges}
    return [found[key] for key in sorted(found)]

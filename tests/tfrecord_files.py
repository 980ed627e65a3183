"""What tests read of TFRecord files: payloads, columns, places of records, damage set aside."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from etl.tfrecord.codec.decode import build_decoder, read_batches
from etl.tfrecord.codec.framing import read_record_blocks
from etl.tfrecord.codec.infer import infer_features
from etl.tfrecord.spark.read_task import QuarantinedRange
from etl.tfrecord.types.features import RecordType, WireFeature


def read_records(path: str | Path) -> Iterator[bytes]:
    """A file's payloads one by one, plain or compressed."""
    for block in read_record_blocks(path):
        for start, length in block.index.tolist():
            yield block.data[start : start + length].tobytes()


def read_file(
    path: str | Path,
    features: Sequence[WireFeature] | None = None,
    *,
    record_type: RecordType = "Example",
) -> pa.Table:
    """A whole file, one column per feature; without `features`, of those that it holds."""
    if features is None:
        features = infer_features([path], record_type=record_type)
    batches = list(read_batches(path, features, record_type=record_type))
    return pa.Table.from_batches(batches, build_decoder(features, record_type).schema)


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

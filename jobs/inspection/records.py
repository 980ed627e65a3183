"""What TFRecord files hold: the first records as plain values, features and lengths of all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from conf.errors import InputDataError
from conf.manifest import Manifest
from conf.schema import PackedSlot
from etl.tfrecord.codec.decode import read_batches
from etl.tfrecord.codec.framing import HEADER_BYTES, RecordBlock, detect_compression
from etl.tfrecord.codec.infer import FeatureCollector, infer_features
from etl.tfrecord.types.features import RecordType, WireFeature
from jobs.inspection.verify import count_records


def read_first(
    files: Sequence[Path],
    count: int,
    manifest: Manifest | None = None,
    record_type: RecordType = "Example",
) -> list[dict[str, Any]]:
    """Reads the first records of some files.

    Args:
        files: TFRecord files, in order.
        count: Records wanted.
        manifest: Says which features there are; None infers them, which reads all files.
        record_type: Type of the payloads.

    Returns:
        One dictionary per record, without the features that the record lacks.

    Raises:
        InputDataError: A file is damaged, or holds other records.
    """
    slots: Sequence[PackedSlot] = ()
    if manifest is None:
        features = infer_features(files, record_type=record_type)
    else:
        specs, slots = manifest.schema.features, manifest.slots
        features = [WireFeature(spec.name, spec.dtype, spec.is_list) for spec in specs]
    records: list[dict[str, Any]] = []
    for path in files:
        for batch in read_batches(path, features, record_type=record_type, slots=slots):
            for row in batch.slice(0, count - len(records)).to_pylist():
                records.append({k: _plain(value) for k, value in row.items() if value is not None})
            if len(records) >= count:
                return records
    return records


def read_dataset_head(
    version: Path, manifest: Manifest, count: int, split: str | None
) -> list[dict[str, Any]]:
    """Reads the first records of a split, over as many shards as it takes.

    Args:
        version: Directory of the version.
        manifest: Its manifest.
        count: Records wanted.
        split: The split; None for the first that holds any.

    Raises:
        InputDataError: There is no such split, or a shard is damaged.
    """
    name = split or next((s.name for s in manifest.splits if s.rows), None)
    if name is None:
        raise InputDataError("this dataset version holds no records", received=version)
    return read_first([version / s.path for s in manifest.split(name).shards], count, manifest)


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value


class Content:
    """Content of the files read so far.

    Attributes:
        rows: Sound records.
        bytes: Size of the files.
        compressions: Of the files; `none` for plain ones.
        lengths: Records by length, without their framing.
    """

    def __init__(self) -> None:
        """Starts with no file."""
        self.rows = self.bytes = 0
        self.compressions: set[str] = set()
        self.lengths: Counter[int] = Counter()
        # Every Example reads as a SequenceExample without feature lists; None for raw payloads.
        self._collector: FeatureCollector | None = FeatureCollector("SequenceExample")

    def read(self, path: Path) -> str | None:
        """Adds a file; returns its damage, or None."""
        with path.open("rb") as file:
            self.compressions.add(detect_compression(file.read(HEADER_BYTES)) or "none")
        rows, damage = count_records(path, lambda block: self._add(block, str(path)))
        self.rows += rows
        self.bytes += path.stat().st_size
        return damage

    def _add(self, block: RecordBlock, name: str) -> None:
        """Adds a block; the first one decides whether the payloads are Examples at all."""
        lengths, counts = np.unique(block.index[:, 1], return_counts=True)
        self.lengths.update(dict(zip(lengths.tolist(), counts.tolist(), strict=True)))
        if self._collector is not None:
            try:
                self._collector.update(block, name)
            except InputDataError:
                if self._collector.records:
                    raise
                self._collector = None

    @property
    def features(self) -> list[WireFeature]:
        """Features found; none in raw payloads."""
        return [] if self._collector is None else self._collector.features()

    @property
    def record_type(self) -> RecordType:
        """The record type that the payloads look like."""
        if self._collector is None or not self._collector.records:
            return "ByteArray"
        is_sequence = any(feature.is_sequence for feature in self.features)
        return "SequenceExample" if is_sequence else "Example"


def describe_lengths(lengths: Mapping[int, int]) -> dict[str, Any]:
    """Returns a histogram of records by length, in bins whose bounds are powers of two.

    Args:
        lengths: Number of records by length.
    """
    if not lengths:
        return {"shortest": None, "longest": None, "mean": None, "bins": []}
    by_bits: Counter[int] = Counter()
    for length, records in lengths.items():
        by_bits[length.bit_length()] += records
    total = sum(length * records for length, records in lengths.items())
    return {
        "shortest": min(lengths),
        "longest": max(lengths),
        "mean": total / by_bits.total(),
        "bins": [
            {"from": (1 << bits) >> 1, "to": (1 << bits) - 1, "records": by_bits[bits]}
            for bits in range(min(by_bits), max(by_bits) + 1)
        ],
    }

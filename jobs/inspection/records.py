"""The first records of shards as plain values, features of the packed layout by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conf.errors import InputDataError
from conf.manifest import Manifest
from conf.schema import FeatureSchema, PackedSlot
from etl.tfrecord.codec.decode import read_batches
from etl.tfrecord.codec.infer import infer_features
from etl.tfrecord.types.features import RecordType, WireFeature


def list_packed_features(manifest: Manifest) -> list[dict[str, Any]]:
    """Returns as JSON which features share list features, and their places in these, from 0."""
    return [
        {
            "name": slot.feature,
            "feature": slot.packed,
            "places": [slot.offset, slot.offset + slot.length - 1],
            "type": manifest.schema[slot.feature].dtype,
        }
        for slot in manifest.slots
    ]


def wire_features(schema: FeatureSchema) -> list[WireFeature]:
    """Returns what the codec must decode for a schema."""
    return [WireFeature(spec.name, spec.dtype, spec.is_list) for spec in schema.features]


def read_first(
    files: Sequence[Path],
    count: int,
    features: Sequence[WireFeature] | None = None,
    record_type: RecordType = "Example",
    slots: Sequence[PackedSlot] = (),
) -> list[dict[str, Any]]:
    """Reads the first records of some files.

    Args:
        files: TFRecord files, in order.
        count: Records wanted.
        features: Features to decode; None infers them, which reads all files.
        record_type: Type of the payloads.
        slots: Places of features in packed features, from the manifest.

    Returns:
        One dictionary per record, without the features that the record lacks.

    Raises:
        InputDataError: A file is damaged, or holds other records.
    """
    if features is None and record_type == "ByteArray":
        features = [WireFeature("byteArray", "bytes")]
    wanted = infer_features(files, record_type=record_type) if features is None else features
    records: list[dict[str, Any]] = []
    for path in files:
        for batch in read_batches(path, wanted, record_type=record_type, slots=slots):
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
    shards = [version / shard.path for shard in manifest.split(name).shards]
    return read_first(shards, count, wire_features(manifest.schema), slots=manifest.slots)


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value

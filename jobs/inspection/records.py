"""The first records of shards as plain values, features of the packed layout by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.errors import InputDataError
from conf.manifest import Manifest
from conf.schema import FeatureSchema, PackedSlot
from etl.tfrecord.codec.decode import build_decoder, read_batches
from etl.tfrecord.codec.infer import infer_features
from etl.tfrecord.files.framing import read_record_blocks
from etl.tfrecord.types.features import RecordType, WireFeature


@dataclass(frozen=True)
class PackedColumn:
    """A feature inside of a packed feature.

    Attributes:
        name: The feature.
        feature: The list feature that holds it.
        place: Position of its first value in each record's list, from 0.
        width: How many values it has there.
        type: The feature's type.
    """

    name: str
    feature: str
    place: int
    width: int
    type: str

    def to_json(self) -> dict[str, Any]:
        """Returns the column as a JSON object."""
        return {
            "name": self.name,
            "feature": self.feature,
            "places": [self.place, self.place + self.width - 1],
            "type": self.type,
        }


def list_packed_features(manifest: Manifest) -> tuple[PackedColumn, ...]:
    """Lists the features of a dataset version that share list features."""
    schema = manifest.schema
    return tuple(
        PackedColumn(s.feature, s.packed, s.offset, s.length, schema[s.feature].dtype)
        for s in manifest.slots
    )


def wire_features(schema: FeatureSchema) -> list[WireFeature]:
    """Returns what the wire must decode for a schema."""
    return [WireFeature(spec.name, spec.dtype, spec.is_list) for spec in schema.features]


def read_head(
    path: Path,
    count: int,
    features: Sequence[WireFeature] | None = None,
    slots: Sequence[PackedSlot] = (),
) -> list[dict[str, Any]]:
    """Reads the first records of a shard.

    Args:
        path: TFRecord file of `tf.train.Example`.
        count: Records wanted.
        features: What to decode; None to infer it, which reads the whole file.
        slots: Places of features in packed features, as the manifest tells them.

    Returns:
        One dictionary per record; a feature that the record lacks is left out.

    Raises:
        InputDataError: The file is damaged, or holds other records.
    """
    wanted = infer_features([path]) if features is None else features
    records: list[dict[str, Any]] = []
    for batch in read_batches(path, wanted, slots=slots):
        for row in batch.slice(0, count - len(records)).to_pylist():
            present = {name: _plain(value) for name, value in row.items() if value is not None}
            records.append(present)
        if len(records) >= count:
            break
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
    records: list[dict[str, Any]] = []
    for shard in manifest.split(name).shards:
        if len(records) >= count:
            break
        wanted = wire_features(manifest.schema)
        left = count - len(records)
        records += read_head(version / shard.path, left, wanted, manifest.slots)
    return records


def read_files_head(
    files: Sequence[Path], count: int, record_type: RecordType
) -> list[dict[str, Any]]:
    """Reads the first records of files of any record type; see `read_head`.

    Args:
        files: The files, in order.
        count: Records wanted.
        record_type: What their payloads are.
    """
    records: list[dict[str, Any]] = []
    features = [WireFeature("byteArray", "bytes")]
    if record_type != "ByteArray":
        features = infer_features(files, record_type=record_type)
    decoder = build_decoder(features, record_type)
    for block in (block for path in files for block in read_record_blocks(path)):
        for row in decoder.decode_block(block).slice(0, count - len(records)).to_pylist():
            present = {name: _plain(value) for name, value in row.items() if value is not None}
            records.append(present)
        if len(records) >= count:
            break
    return records


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value

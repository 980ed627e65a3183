"""The first records of shards as plain values, columns of the packed layout by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.errors import InputDataError
from conf.manifest import Manifest
from conf.schema import FeatureSchema, PackedSlot
from etl.tfrecord.codec.decode import build_decoder, read_batches
from etl.tfrecord.codec.infer import infer_features
from etl.tfrecord.commit.output_manifest import OutputManifest
from etl.tfrecord.files.framing import read_record_blocks
from etl.tfrecord.types.features import RecordType, WireFeature
from etl.tfrecord.types.to_example import read_description


@dataclass(frozen=True)
class PackedColumn:
    """A column inside of a packed feature.

    Attributes:
        name: The column, or the part of one that has a place of its own.
        feature: The list feature that holds it.
        place: Position of its first value in each record's list, from 0.
        width: How many values it has there.
        type: Spark's type of the column, or a feature's type; None where the manifest does not
            say.
    """

    name: str
    feature: str
    place: int
    width: int
    type: str | None

    def to_json(self) -> dict[str, Any]:
        """Returns the column as a JSON object."""
        return {
            "name": self.name,
            "feature": self.feature,
            "places": [self.place, self.place + self.width - 1],
            "type": self.type,
        }


def list_packed_columns(committed: OutputManifest | None) -> tuple[PackedColumn, ...]:
    """Lists the packed columns that a directory's manifest names, in the order of their places.

    Raises:
        InputDataError: The manifest's account of the columns is damaged.
    """
    if committed is None:
        return ()
    fields = (committed.columns or {}).get("fields", ())
    types = {field["name"]: field["type"] for field in fields if isinstance(field["type"], str)}
    columns = []
    for feature, slots in read_description(committed.lowering)[1].items():
        place = 0
        for slot in slots:
            columns.append(
                PackedColumn(slot.name, feature, place, slot.width, types.get(slot.name))
            )
            place += slot.width
    return tuple(columns)


def list_packed_features(manifest: Manifest) -> tuple[PackedColumn, ...]:
    """Lists the features of a dataset version that share list features."""
    schema = manifest.schema
    return tuple(
        PackedColumn(s.feature, s.packed, s.offset, s.length, schema[s.feature].dtype)
        for s in manifest.slots
    )


def unpack_record(record: Mapping[str, Any], columns: Sequence[PackedColumn]) -> dict[str, Any]:
    """Returns a record with its packed columns by name, in the place of the packed features.

    A list that is not as long as the manifest says stays as it is: its places mean nothing.
    """
    lengths: dict[str, int] = {}
    for column in columns:
        lengths[column.feature] = column.place + column.width
    known = {name for name, size in lengths.items() if len(_as_list(record.get(name))) == size}
    unpacked = {name: value for name, value in record.items() if name not in known}
    for column in columns:
        if column.feature in known:
            values = _as_list(record[column.feature])[column.place : column.place + column.width]
            unpacked[column.name] = values[0] if column.width == 1 else values
    return unpacked


def _as_list(value: Any) -> list[Any]:
    """A list of one value may be decoded as the value itself."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


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
    files: Sequence[Path],
    count: int,
    record_type: RecordType,
    packed: Sequence[PackedColumn] = (),
) -> list[dict[str, Any]]:
    """Reads the first records of files of any record type; see `read_head`.

    Args:
        files: The files, in order.
        count: Records wanted.
        record_type: What their payloads are.
        packed: Columns that share a list feature; records show them by name.
    """
    records: list[dict[str, Any]] = []
    features = [WireFeature("byteArray", "bytes")]
    if record_type != "ByteArray":
        features = infer_features(files, record_type=record_type)
    decoder = build_decoder(features, record_type)
    for block in (block for path in files for block in read_record_blocks(path)):
        for row in decoder.decode_block(block).slice(0, count - len(records)).to_pylist():
            present = {name: _plain(value) for name, value in row.items() if value is not None}
            records.append(unpack_record(present, packed) if packed else present)
        if len(records) >= count:
            break
    return records


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value

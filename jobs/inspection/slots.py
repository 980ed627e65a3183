"""Columns that share a list feature in the packed layout, by name: what stands at which place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conf.manifest import Manifest
from etl.tfrecord.committed import Committed
from etl.tfrecord.lowering.description import read_description


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


def list_packed_columns(committed: Committed | None) -> tuple[PackedColumn, ...]:
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


def list_slots(manifest: Manifest) -> tuple[PackedColumn, ...]:
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

"""The packed layout of records: scalars of one type side by side in one list of fixed length."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from conf.errors import ConfigError
from conf.schema import DType, FeatureSchema

PACKED_FEATURES: Mapping[DType, str] = {
    "int64": "packed.int64",
    "float32": "packed.float",
    "bytes": "packed.bytes",
}
"""Name of the list that holds the scalars of a type."""
ABSENT_FEATURE = "packed.absent"
"""Name of the int64 list that tells which slots of a record stand for no value; absent if none."""


@dataclass(frozen=True)
class PackedSlot:
    """A feature's place in a packed feature.

    Attributes:
        feature: The feature.
        packed: The list feature that holds it.
        offset: Position of its first value in each record's list, from 0.
        length: How many values it has there.
    """

    feature: str
    packed: str
    offset: int
    length: int = 1


def plan_slots(schema: FeatureSchema) -> tuple[PackedSlot, ...]:
    """Plans the packed layout of a schema: scalars get slots, lists stay features of their own.

    Returns:
        The slots, type by type, each in record order; their numbers are what `ABSENT_FEATURE`
        holds.
    """
    return tuple(
        PackedSlot(name, packed, offset)
        for dtype, packed in PACKED_FEATURES.items()
        for offset, name in enumerate(
            spec.name for spec in schema.features if spec.dtype == dtype and not spec.is_list
        )
    )


def packed_lengths(slots: Sequence[PackedSlot]) -> dict[str, int]:
    """Length of each packed feature's lists, which is the same in every record."""
    lengths: dict[str, int] = {}
    for slot in slots:
        lengths[slot.packed] = max(lengths.get(slot.packed, 0), slot.offset + slot.length)
    return lengths


def dump_slots(slots: Sequence[PackedSlot]) -> str:
    """Returns slots as JSON, for an option."""
    return json.dumps([asdict(slot) for slot in slots])


def parse_slots(text: str) -> tuple[PackedSlot, ...]:
    """Parses what `dump_slots` returned.

    Raises:
        ConfigError: It is something else.
    """
    try:
        return tuple(PackedSlot(**item) for item in json.loads(text))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            "bad value of TFRecord option 'packedSlots'",
            received=text,
            allowed="a JSON list of slots, as a dataset's manifest holds it",
        ) from error

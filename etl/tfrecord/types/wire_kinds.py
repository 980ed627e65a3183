"""Arrow types as kinds of features: which list of a record holds a value, said in one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

Lane = Literal["int32", "int64", "float32", "float64", "binary"]
FeatureKind = Literal["int64", "float", "bytes"]

_KIND_OF_LANE: dict[Lane, FeatureKind] = {
    "int32": "int64", "int64": "int64", "float32": "float", "float64": "float", "binary": "bytes",
}  # fmt: skip


@dataclass(frozen=True)
class WireKind:
    """How values of a type go onto the wire.

    Attributes:
        lane: How the encoder reads them from memory.
        cast: Arrow type that they are cast to first; None: they are read as they are.
    """

    lane: Lane
    cast: pa.DataType | None = None

    @property
    def feature(self) -> FeatureKind:
        """The list of a `tf.train.Feature` that holds them."""
        return _KIND_OF_LANE[self.lane]


def find_wire_kind(data_type: pa.DataType) -> WireKind | None:
    """Returns how values of a type go onto the wire; None: it has no place for them."""
    t = pa.types
    if t.is_dictionary(data_type):
        found = find_wire_kind(data_type.value_type)
        return None if found is None else WireKind(found.lane, found.cast or data_type.value_type)
    if t.is_boolean(data_type) or (t.is_integer(data_type) and data_type.bit_width < 32):
        return WireKind("int32", pa.int32())
    for matches, found in _KINDS:
        if matches(data_type):
            return found
    return None


_KINDS = (
    (pa.types.is_int64, WireKind("int64")),
    (pa.types.is_int32, WireKind("int32")),
    (pa.types.is_uint32, WireKind("int64", pa.int64())),
    (pa.types.is_float32, WireKind("float32")),
    (pa.types.is_float64, WireKind("float64")),
    (pa.types.is_float16, WireKind("float32", pa.float32())),
    (pa.types.is_decimal, WireKind("float64", pa.float64())),
    (pa.types.is_large_string, WireKind("binary")),
    (pa.types.is_large_binary, WireKind("binary")),
    (pa.types.is_string, WireKind("binary")),
    (pa.types.is_binary, WireKind("binary")),
)

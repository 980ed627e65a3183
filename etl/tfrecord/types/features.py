"""Features of a record: how a reader asks for them, and which types of Arrow become which kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

Kind = Literal["int64", "float32", "bytes"]

# Numbers of the members of Feature's oneof (tensorflow/core/example/feature.proto).
KIND_CODES: dict[Kind, int] = {"bytes": 1, "float32": 2, "int64": 3}
_VALUE_TYPES: dict[Kind, pa.DataType] = {
    "bytes": pa.binary(),
    "float32": pa.float32(),
    "int64": pa.int64(),
}
# By kind and depth of lists; asked for with each column of each batch.
_ARROW_TYPES: dict[tuple[Kind, int], pa.DataType] = {
    (kind, depth): lists
    for kind, value in _VALUE_TYPES.items()
    for depth, lists in enumerate((value, pa.list_(value), pa.list_(pa.list_(value))))
}


@dataclass(frozen=True)
class WireFeature:
    """A feature to decode.

    Attributes:
        name: Key in `tf.train.Example`, or in the context or feature lists of a
            `tf.train.SequenceExample`.
        kind: `"int64"`, `"float32"` or `"bytes"`.
        is_list: Whether a row holds a list; otherwise one value at most.
        is_sequence: Whether it is a feature list of `tf.train.SequenceExample`: a list of lists
            per row, whatever `is_list` says.
    """

    name: str
    kind: Kind
    is_list: bool = False
    is_sequence: bool = False

    @property
    def arrow_type(self) -> pa.DataType:
        """Type of the decoded column."""
        return _ARROW_TYPES[self.kind, 2 if self.is_sequence else int(self.is_list)]


# A ByteArray record as a column; the name is the one that other Spark connectors give it.
BYTE_ARRAY_COLUMN = "byteArray"
BYTE_ARRAY_FEATURE = WireFeature(BYTE_ARRAY_COLUMN, "bytes")


RecordType = Literal["Example", "SequenceExample", "ByteArray"]
RECORD_TYPES: tuple[RecordType, ...] = ("Example", "SequenceExample", "ByteArray")

Lane = Literal["int32", "int64", "float32", "float64", "binary"]


@dataclass(frozen=True)
class WireKind:
    """How the encoder takes values of a type: as what it reads them, once cast where need be."""

    lane: Lane
    cast: pa.DataType | None = None


def find_wire_kind(data_type: pa.DataType) -> WireKind | None:
    """Returns how the encoder takes values of a type; None: it does not."""
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

"""Features of a record: how a reader asks for them, which columns become which kind; types."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

import pyarrow as pa

Kind = Literal["int64", "float32", "bytes"]

# Numbers of the members of Feature's oneof (tensorflow/core/example/feature.proto).
KIND_CODES: dict[Kind, int] = {"bytes": 1, "float32": 2, "int64": 3}
# By kind and depth of lists; asked for with each column of each batch.
_ARROW_TYPES: dict[tuple[Kind, int], pa.DataType] = {
    ("bytes", 0): pa.binary(),
    ("float32", 0): pa.float32(),
    ("int64", 0): pa.int64(),
}
for _depth in (1, 2):
    for _kind in KIND_CODES:
        _ARROW_TYPES[_kind, _depth] = pa.list_(_ARROW_TYPES[_kind, _depth - 1])


@dataclass(frozen=True)
class WireFeature:
    """A feature to decode: one value at most per row, or a list.

    `is_sequence`: it is a feature list of a `tf.train.SequenceExample`, a list of lists per row.
    """

    name: str
    kind: Kind
    is_list: bool = False
    is_sequence: bool = False

    @property
    def arrow_type(self) -> pa.DataType:
        return _ARROW_TYPES[self.kind, 2 if self.is_sequence else int(self.is_list)]

    @property
    def text_type(self) -> pa.DataType:
        """The same with text in place of bytes."""
        return _as_text(self.arrow_type)


def _as_text(data_type: pa.DataType) -> pa.DataType:
    if pa.types.is_list(data_type):
        return pa.list_(_as_text(data_type.value_type))
    return pa.string() if pa.types.is_binary(data_type) else data_type


# A ByteArray record as a column; the name is the one that other Spark connectors give it.
BYTE_ARRAY_COLUMN = "byteArray"
BYTE_ARRAY_FEATURE = WireFeature(BYTE_ARRAY_COLUMN, "bytes")

RecordType = Literal["Example", "SequenceExample", "ByteArray"]
RECORD_TYPES: tuple[RecordType, ...] = ("Example", "SequenceExample", "ByteArray")


@dataclass(frozen=True)
class TypeOptions:
    """How columns of a type become features, in all of a job; what each means: `TYPE_OPTIONS`.

    A column that is to become something else is cast before the write. `error` refuses the type,
    or the values that would be lost.
    """

    float64: Literal["error", "cast"] = "error"
    dates: Literal["error", "days", "iso"] = "error"
    timestamps: Literal["error", "s", "ms", "us", "iso"] = "error"
    maps: Literal["error", "entries"] = "error"
    vectors: Literal["dense", "sparse"] = "dense"

    def chosen(self) -> dict[str, str]:
        """What is not as by default, by option; `read_type_options` reads it."""
        default = TypeOptions()
        return {n: v for n, v in asdict(self).items() if v != getattr(default, n)}


Lane = Literal["int32", "int64", "float32", "float64", "binary"]


@dataclass(frozen=True)
class WireKind:
    """How the encoder takes values of a type: as what it reads them, once cast where need be."""

    lane: Lane
    cast: pa.DataType | None = None


def find_wire_kind(data_type: pa.DataType) -> WireKind | None:
    """Returns how the encoder takes values of a type; None: it does not."""
    if pa.types.is_dictionary(data_type):
        found = find_wire_kind(data_type.value_type)
        return None if found is None else WireKind(found.lane, found.cast or data_type.value_type)
    if pa.types.is_decimal(data_type):
        return WireKind("float64", pa.float64())
    return _WIRE_KINDS.get(data_type)


_SMALL = (pa.bool_(), pa.int8(), pa.int16(), pa.uint8(), pa.uint16())
_BYTES = (pa.binary(), pa.large_binary(), pa.string(), pa.large_string())
_WIRE_KINDS: dict[pa.DataType, WireKind] = {
    **dict.fromkeys(_SMALL, WireKind("int32", pa.int32())),
    pa.int32(): WireKind("int32"),
    pa.uint32(): WireKind("int64", pa.int64()),
    pa.int64(): WireKind("int64"),
    pa.float16(): WireKind("float32", pa.float32()),
    pa.float32(): WireKind("float32"),
    pa.float64(): WireKind("float64"),
    **dict.fromkeys(_BYTES, WireKind("binary")),
}


def is_list(data_type: pa.DataType) -> bool:
    """Whether a type is a list of any layout, fixed-size ones included."""
    return (
        pa.types.is_list(data_type)
        or pa.types.is_large_list(data_type)
        or pa.types.is_fixed_size_list(data_type)
    )


def innermost(data_type: pa.DataType) -> pa.DataType:
    """Type of the values in lists of any depth."""
    while is_list(data_type):
        data_type = data_type.value_type
    return data_type


def is_bytes(data_type: pa.DataType) -> bool:
    return pa.types.is_binary(data_type) or pa.types.is_large_binary(data_type)


def is_text(data_type: pa.DataType) -> bool:
    return pa.types.is_string(data_type) or pa.types.is_large_string(data_type)


def buffer_address(buffer: pa.Buffer | None) -> int:
    """Address of an Arrow buffer, 0 where there is none."""
    return 0 if buffer is None else buffer.address

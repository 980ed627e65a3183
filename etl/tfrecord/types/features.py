"""Features as a reader asks for them, and the kinds of records that a TFRecord file may hold."""

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

"""Features as a reader asks for them, and their keys in the form that the decoder looks up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa

from etl.tfrecord import decode_kernels_keys as k
from etl.tfrecord.walk_kernels import BYTES, FLOAT, INT

Kind = Literal["int64", "float32", "bytes"]

KIND_CODES: dict[Kind, int] = {"int64": INT, "float32": FLOAT, "bytes": BYTES}
_ARROW_TYPES = {INT: pa.int64(), FLOAT: pa.float32(), BYTES: pa.binary()}


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
        value_type = _ARROW_TYPES[KIND_CODES[self.kind]]
        if self.is_sequence:
            return pa.list_(pa.list_(value_type))
        return pa.list_(value_type) if self.is_list else value_type


# A ByteArray record as a column; the name is the one that other Spark connectors give it.
BYTE_ARRAY_FEATURE = WireFeature("byteArray", "bytes")


def _cell_head(key: bytes) -> np.ndarray:
    """First bytes of a cell, its own length left out, padded to whole words with zeros."""
    lengths = bytes([0x0A, 0, 0x0A, len(key) & 0xFF])
    return np.frombuffer(lengths + key + bytes(-(len(key) + 4) % 8), np.uint8)


class KeyTable:
    """Feature keys in memory, and their hash table."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        heads = [_cell_head(key) for key in keys]
        self._memory = np.concatenate([*heads, np.zeros(8, np.uint8)])
        starts = np.cumsum([0, *(head.size for head in heads)], dtype=np.int64)
        self.places = [
            (self._memory.ctypes.data + int(start), len(key))
            for key, start in zip(keys, starts[:-1], strict=True)
        ]
        fields = np.zeros((max(1, len(keys)), k.FEATURE_FIELDS), np.int64)
        for row, (address, length) in enumerate(self.places):
            fields[row, k.HEAD], fields[row, k.KEY_BYTES] = address, length
        if not keys:
            fields[0, k.KEY_BYTES] = -1  # a key of no length at all: matches nothing
        self.fields = fields
        self.table = np.empty(1 << (2 * len(keys) + 1).bit_length(), np.int64)
        k.build_key_table(fields[: len(keys)], self.table)

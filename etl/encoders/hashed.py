"""Hashed ids: buckets and 64-bit keys by Fingerprint64, crosses of fields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conf.operations import CROSS_SEPARATOR
from conf.schema import FIRST_TOKEN_ID, OOV_ID
from etl.encoders.buffers import to_arrow, valid_mask
from etl.encoders.casting import cast_values
from etl.encoders.fingerprint import fingerprint_values


def hash_to_buckets(values: pa.Array, buckets: int) -> np.ndarray:
    """Returns the bucket of each value, int64 `[rows]`: `tf.strings.to_hash_bucket_fast`."""
    return (fingerprint_values(values) % np.uint64(buckets)).astype(np.int64)


@dataclass(frozen=True)
class HashEncoder:
    """Ids from the hash of each value's text; null is OOV.

    Attributes:
        raw_type: Type that the raw column was declared with.
        buckets: Number of buckets, or None for the whole fingerprint as a key. The two keys that
            would read as padding and OOV are moved up by 2.
    """

    raw_type: pa.DataType
    buckets: int | None
    output_type = pa.int64()

    def encode(self, values: pa.Array) -> pa.Array:
        """Hashes values `[values]` to int64 ids `[values]`."""
        values = cast_values(values, self.raw_type)
        if self.buckets is None:
            ids = fingerprint_values(values).view(np.int64)
            ids[(ids >= 0) & (ids < FIRST_TOKEN_ID)] += FIRST_TOKEN_ID
        else:
            ids = hash_to_buckets(values, self.buckets) + FIRST_TOKEN_ID
        ids[~valid_mask(values)] = OOV_ID
        return to_arrow(ids)


@dataclass(frozen=True)
class CrossEncoder:
    """Ids from the hash of several fields; OOV where one of them is null.

    Attributes:
        raw_types: Declared type of each column.
        buckets: Number of buckets.
    """

    raw_types: tuple[pa.DataType, ...]
    buckets: int
    output_type = pa.int64()

    def encode(self, columns: Sequence[pa.Array]) -> pa.Array:
        """Crosses scalar columns `[rows]` to int64 ids `[rows]`."""
        texts = [
            _to_bytes(cast_values(column, raw_type))
            for column, raw_type in zip(columns, self.raw_types, strict=True)
        ]
        joined = pc.binary_join_element_wise(
            *texts, CROSS_SEPARATOR.encode(), null_handling="emit_null"
        )
        return HashEncoder(pa.binary(), self.buckets).encode(joined)


def _to_bytes(values: pa.Array) -> pa.Array:
    text = values if values.type == pa.binary() else cast_values(values, pa.string())
    return text.cast(pa.binary())

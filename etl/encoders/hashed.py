"""Hashed ids: buckets and 64-bit keys by Fingerprint64, crosses of fields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conf.operations import CROSS_SEPARATOR
from conf.schema import FIRST_TOKEN_ID, OOV_ID
from etl.encoders.base import Encoder
from etl.encoders.buffers import to_arrow, valid_mask
from etl.encoders.casting import cast_values
from etl.encoders.fingerprint import fingerprint_values
from etl.encoders.lists import flatten_lists
from etl.encoders.products import multiply_lists


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
    """Ids from the hash of several fields; OOV where one of them is missing.

    Attributes:
        fields: By column, what makes the field of it: a cast, or an encoder whose ids are the
            field, missing where the id is OOV.
        buckets: Number of buckets.
        shape: What is kept of the lists where a field is one: then each combination of their
            values is crossed, the last list's varying fastest. None where all are scalars.
    """

    fields: tuple[CrossField, ...]
    buckets: int
    shape: ListShape | None = None

    @property
    def output_type(self) -> pa.DataType:
        """Type of the feature's column."""
        return pa.int64() if self.shape is None else pa.list_(pa.int64())

    def encode(self, columns: Sequence[pa.Array]) -> pa.Array:
        """Crosses columns `[rows]` to int64 ids `[rows]`, or lists of them."""
        if self.shape is None:
            return self._hash(
                [field.read(column) for field, column in zip(self.fields, columns, strict=True)]
            )
        # The first `max_len` combinations hold no later value of any list.
        lists = [
            flatten_lists(column, self.shape.max_len, self.shape.exact_len)
            for field, column in zip(self.fields, columns, strict=True)
            if field.is_list
        ]
        product = multiply_lists(lists, self.shape.max_len)
        values, positions = iter(lists), iter(product.positions)
        texts = [
            field.read(next(values).values).take(pa.array(next(positions)))
            if field.is_list
            else field.read(column).take(pa.array(product.rows))
            for field, column in zip(self.fields, columns, strict=True)
        ]
        return product.rebuild(self._hash(texts)).cast(self.output_type)

    def _hash(self, texts: Sequence[pa.Array]) -> pa.Array:
        joined = pc.binary_join_element_wise(
            *texts, CROSS_SEPARATOR.encode(), null_handling="emit_null"
        )
        return HashEncoder(pa.binary(), self.buckets).encode(joined)


@dataclass(frozen=True)
class ListShape:
    """How many values of a list are kept, or how many it must have."""

    max_len: int | None
    exact_len: int | None


@dataclass(frozen=True)
class CrossField:
    """A field of a cross.

    Attributes:
        raw_type: Declared type of its column.
        encoder: What makes ids of the values that take their place, or None.
        is_list: Whether its column holds lists.
    """

    raw_type: pa.DataType
    encoder: Encoder | None = None
    is_list: bool = False

    def read(self, column: pa.Array) -> pa.Array:
        """Returns the text of each value, binary `[values]`, null where it is missing."""
        if self.encoder is None:
            return _to_bytes(cast_values(column, self.raw_type))
        ids = self.encoder.encode(column)
        return _to_bytes(pc.if_else(pc.equal(ids, OOV_ID), pa.scalar(None, pa.int64()), ids))


def _to_bytes(values: pa.Array) -> pa.Array:
    text = values if values.type == pa.binary() else cast_values(values, pa.string())
    return text.cast(pa.binary())

"""Hashed ids: FarmHash Fingerprint64, buckets, 64-bit keys, crosses of fields.

Fingerprint64 is the hash of `tf.strings.to_hash_bucket_fast`, so that a served model computes
the same ids (google/farmhash, `farmhashna::Hash64`, which it is defined to be for ever).
`mix64` and `hash_bytes` are not the hash of any feature: they serve lookup tables.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conf.encoders import ColumnEncoding
from conf.encoders.declaration import Operation
from conf.encoders.hashing import CROSS_SEPARATOR, Cross, CrossConfig, Hash
from conf.encoders.numbers import QuantileConfig
from conf.schema import FIRST_TOKEN_ID, OOV_ID, FeatureSpec
from etl.encoders.arrow_columns import (
    BYTES_TYPES,
    bytes_buffers,
    cast_values,
    flatten_lists,
    has_value,
    int64_buffers,
    load_span,
    multiply_lists,
    to_arrow,
    valid_mask,
)
from etl.encoders.base import (
    RAW_TYPES,
    Encoder,
    Fitted,
    fits,
    number_requests,
    row_encoders,
    value_encoders,
)
from etl.encoders.number_fit import NumberRequest, name_request
from etl.encoders.numbers import cut_equally, request_quantiles
from etl.tfrecord.codec.kernels import (
    inlined,
    kernel,
    load_i64,
    load_u8,
    load_u32,
    load_u64,
    outlined,
    store_u8,
)

if TYPE_CHECKING:
    from conf.etl.encodings import FeatureConfig
    from etl.encoders.fit import OperationFit
    from etl.features.plan import FeaturePlan

_WEYL = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, odd
_MIX_1 = np.uint64(0xFF51AFD7ED558CCD)
_MIX_2 = np.uint64(0xC4CEB9FE1A85EC53)
_HALF_WORD = np.uint64(32)
_SHIFT = np.uint64(33)


@inlined
def mix64(key: np.uint64) -> np.uint64:
    """Spreads each bit of a key over all 64 bits, one to one (MurmurHash3's `fmix64`)."""
    mixed = (key ^ (key >> _SHIFT)) * _MIX_1
    mixed = (mixed ^ (mixed >> _SHIFT)) * _MIX_2
    return mixed ^ (mixed >> _SHIFT)


@inlined
def hash_bytes(address: int, length: int) -> np.uint64:
    """Hashes `length` bytes at `address` word by word; reads nothing outside of them."""
    state = np.uint64(length) * _WEYL
    i = 0
    while i + 8 <= length:
        state = (state ^ load_u64(address + i)) * _WEYL
        state ^= state >> _HALF_WORD
        i += 8
    rest = length - i
    tail = np.uint64(0)
    if rest >= 4:  # two words that may overlap
        tail = np.uint64(load_u32(address + i)) | (
            np.uint64(load_u32(address + length - 4)) << _HALF_WORD
        )
    elif rest > 0:  # first, middle and last byte: all of 1 to 3
        tail = (
            np.uint64(load_u8(address + i))
            | (np.uint64(load_u8(address + i + (rest >> 1))) << np.uint64(8))
            | (np.uint64(load_u8(address + length - 1)) << np.uint64(16))
        )
    return mix64(state ^ tail)


_K0 = np.uint64(0xC3A5C85C97CB3127)
_K1 = np.uint64(0xB492B66FBE98F273)
_K2 = np.uint64(0x9AE16A3B2F90404F)
_SEED = np.uint64(81)
_WORD_BITS = np.uint64(64)
_DECIMAL_BYTES = 20  # of the least int64, its sign included


def fingerprint_values(values: pa.Array) -> np.ndarray:
    """Hashes the text of each value; integers stand for their decimal text.

    Args:
        values: Integers, strings or binaries `[rows]`, possibly sliced; nulls give any number.

    Returns:
        uint64 `[rows]`.

    Raises:
        pa.ArrowInvalid: Values of a type that has no exact text.
    """
    hashes = np.zeros(len(values), np.uint64)
    if values.type in BYTES_TYPES:
        _fingerprint_bytes(bytes_buffers(values), hashes)
        return hashes
    if not pa.types.is_integer(values.type) or values.type == pa.uint64():
        return fingerprint_values(cast_values(values, pa.string()))
    values = cast_values(values, pa.int64())
    digits = np.empty(_DECIMAL_BYTES, np.uint8)
    _fingerprint_int64(int64_buffers(values), digits.ctypes.data, hashes)
    return hashes


@kernel
def _fingerprint_bytes(buffers, hashes):
    for row in range(hashes.size):
        if has_value(buffers, row):
            address, length = load_span(buffers, row)
            hashes[row] = fingerprint64(address, length)


@kernel
def _fingerprint_int64(buffers, digits, hashes):
    for row in range(hashes.size):
        if has_value(buffers, row):
            value = load_i64(buffers[2] + 8 * (buffers[3] + row))
            rest = np.uint64(value)
            if value < 0:
                rest = ~rest + np.uint64(1)
            at = digits + _DECIMAL_BYTES
            while True:
                at -= 1
                tenth = rest // np.uint64(10)
                store_u8(at, np.uint8(rest - tenth * np.uint64(10)) + np.uint8(48))
                rest = tenth
                if rest == np.uint64(0):
                    break
            if value < 0:
                at -= 1
                store_u8(at, np.uint8(45))
            hashes[row] = fingerprint64(at, digits + _DECIMAL_BYTES - at)


@outlined
def fingerprint64(address, length):
    """Fingerprint64 of `length` bytes at `address`, uint64; reads nothing outside of them."""
    if length <= 16:
        return _hash_to_16(address, length)
    if length <= 32:
        return _hash_to_32(address, length)
    if length <= 64:
        return _hash_to_64(address, length)
    return _hash_long(address, length)


@inlined
def _rotate(value, bits):
    return (value >> np.uint64(bits)) | (value << (_WORD_BITS - np.uint64(bits)))


@inlined
def _shift_mix(value):
    return value ^ (value >> np.uint64(47))


@inlined
def _hash_16(low, high, factor):
    mixed = _shift_mix((low ^ high) * factor)
    return _shift_mix((high ^ mixed) * factor) * factor


@inlined
def _hash_to_16(address, length):
    size = np.uint64(length)
    if length >= 8:
        factor = _K2 + size * np.uint64(2)
        a = load_u64(address) + _K2
        b = load_u64(address + length - 8)
        c = _rotate(b, 37) * factor + a
        d = (_rotate(a, 25) + b) * factor
        return _hash_16(c, d, factor)
    if length >= 4:
        factor = _K2 + size * np.uint64(2)
        first = np.uint64(load_u32(address))
        last = np.uint64(load_u32(address + length - 4))
        return _hash_16(size + (first << np.uint64(3)), last, factor)
    if length > 0:
        first = np.uint64(load_u8(address))
        middle = np.uint64(load_u8(address + (length >> 1)))
        last = np.uint64(load_u8(address + length - 1))
        y = first + (middle << np.uint64(8))
        z = size + (last << np.uint64(2))
        return _shift_mix((y * _K2) ^ (z * _K0)) * _K2
    return _K2


@inlined
def _fold_ends(address, length, first):
    """Factor of the length, and two words of the first and last 16 bytes."""
    factor = _K2 + np.uint64(length) * np.uint64(2)
    a = load_u64(address) * first
    b = load_u64(address + 8)
    c = load_u64(address + length - 8) * factor
    d = load_u64(address + length - 16) * _K2
    return factor, _rotate(a + b, 43) + _rotate(c, 30) + d, a + _rotate(b + _K2, 18) + c


@inlined
def _hash_to_32(address, length):
    factor, y, z = _fold_ends(address, length, _K1)
    return _hash_16(y, z, factor)


@inlined
def _hash_to_64(address, length):
    factor, y, z = _fold_ends(address, length, _K2)
    z = _hash_16(y, z, factor)
    a = load_u64(address) * _K2
    e = load_u64(address + 16) * factor
    f = load_u64(address + 24)
    g = (y + load_u64(address + length - 32)) * factor
    h = (z + load_u64(address + length - 24)) * factor
    return _hash_16(_rotate(e + f, 43) + _rotate(g, 30) + h, e + _rotate(f + a, 18) + g, factor)


@inlined
def _weak_hash_32(address, a, b):
    """Two words from 32 bytes and two seeds."""
    last = load_u64(address + 24)
    a += load_u64(address)
    b = _rotate(b + a + last, 21)
    seed = a
    a += load_u64(address + 8)
    a += load_u64(address + 16)
    b += _rotate(a, 44)
    return a + last, b + seed


@inlined
def _hash_long(address, length):
    """More than 64 bytes: blocks of 64, then the last 64 bytes, which may overlap."""
    x = _SEED * _K2 + load_u64(address)
    y = _SEED * _K1 + np.uint64(113)
    z = _shift_mix(y * _K2 + np.uint64(113)) * _K2
    v0, v1, w0, w1 = np.uint64(0), np.uint64(0), np.uint64(0), np.uint64(0)
    end = address + ((length - 1) // 64) * 64
    last = end + ((length - 1) & 63) - 63
    while address != end:
        x = _rotate(x + y + v0 + load_u64(address + 8), 37) * _K1
        y = _rotate(y + v1 + load_u64(address + 48), 42) * _K1
        x ^= w1
        y += v0 + load_u64(address + 40)
        z = _rotate(z + w0, 33) * _K1
        v0, v1 = _weak_hash_32(address, v1 * _K1, x + w0)
        w0, w1 = _weak_hash_32(address + 32, z + w1, y + load_u64(address + 16))
        x, z = z, x
        address += 64
    factor = _K1 + ((z & np.uint64(0xFF)) << np.uint64(1))
    w0 += np.uint64((length - 1) & 63)
    v0 += w0
    w0 += v0
    x = _rotate(x + y + v0 + load_u64(last + 8), 37) * factor
    y = _rotate(y + v1 + load_u64(last + 48), 42) * factor
    x ^= w1 * np.uint64(9)
    y += v0 * np.uint64(9) + load_u64(last + 40)
    z = _rotate(z + w0, 33) * factor
    v0, v1 = _weak_hash_32(last, v1 * factor, x + w0)
    w0, w1 = _weak_hash_32(last + 32, z + w1, y + load_u64(last + 16))
    x, z = z, x
    return _hash_16(
        _hash_16(v0, w0, factor) + _shift_mix(y) * _K0 + z, _hash_16(v1, w1, factor) + x, factor
    )


def hash_to_buckets(values: pa.Array, buckets: int) -> np.ndarray:
    """Returns the bucket of each value, int64 `[rows]`: `tf.strings.to_hash_bucket_fast`."""
    return (fingerprint_values(values) % np.uint64(buckets)).astype(np.int64)


@value_encoders.declare(Hash)
@dataclass(frozen=True)
class HashEncoder:
    """Ids from the hash of each value's text; null is OOV.

    Attributes:
        raw_type: Type that the raw column was declared with.
        operation: Number of buckets, or none for the whole fingerprint as a key. The two keys that
            would read as padding and OOV are moved up by 2.
    """

    raw_type: pa.DataType
    operation: Hash
    output_type = pa.int64()

    def encode(self, values: pa.Array) -> pa.Array:
        """Hashes values `[values]` to int64 ids `[values]`."""
        values = cast_values(values, self.raw_type)
        if self.operation.buckets is None:
            ids = fingerprint_values(values).view(np.int64)
            ids[(ids >= 0) & (ids < FIRST_TOKEN_ID)] += FIRST_TOKEN_ID
        else:
            ids = hash_to_buckets(values, self.operation.buckets) + FIRST_TOKEN_ID
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
        return HashEncoder(pa.binary(), Hash(self.buckets)).encode(joined)


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


@row_encoders.declare(Cross)
def _build_cross(
    operation: Cross, spec: FeatureSpec, column: ColumnEncoding, _: Fitted
) -> CrossEncoder:
    fields = []
    for number, raw in enumerate(column.inputs):
        raw_type, preparation = RAW_TYPES[raw.dtype], operation.preparation(number)
        prepare = None
        if preparation is not None:
            prepare = value_encoders[preparation](raw_type, preparation)
        fields.append(CrossField(raw_type, prepare, raw.is_list))
    shape = None
    if spec.is_list:
        shape = ListShape(spec.max_len, None if spec.is_ragged else spec.shape[0])
    return CrossEncoder(tuple(fields), operation.buckets, shape)


@number_requests.declare(CrossConfig)
def _request_quantiles(
    feature: FeatureConfig, config: CrossConfig, plan: FeaturePlan
) -> Mapping[str, NumberRequest]:
    return {
        name_request(feature, column): request_quantiles(own, column, plan.is_list(column))
        for column, own in config.prepared.items()
        if isinstance(own, QuantileConfig)
    }


@fits.declare(CrossConfig)
def _fit_cross(feature: FeatureConfig, config: CrossConfig, fit: OperationFit) -> Cross:
    if not config.prepared:
        return Cross(config.buckets)
    made: list[Operation | None] = []
    for column in feature.columns:
        own = config.prepared.get(column)
        if isinstance(own, QuantileConfig):
            made.append(cut_equally(fit.numbers[name_request(feature, column)]))
        else:
            made.append(None if own is None else own.state())
    return Cross(config.buckets, tuple(made))

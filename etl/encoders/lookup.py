"""Immutable token -> id tables for Arrow columns: exact, built once, no Python object per row.

Open addressing with linear probing at a load of at most one half. A slot is 16 bytes, so that a
probe costs one cache line: (token, id) for integers, (64-bit hash, id) for strings, whose bytes
are compared where the hash agrees. Tokens lie in id order, which is falling frequency, so the
bytes of the common ones share few cache lines.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import pyarrow as pa

from conf.errors import InputDataError
from conf.schema import FIRST_TOKEN_ID, OOV_ID
from etl.encoders.casting import cast_values
from etl.encoders.hashing import hash_bytes, mix64
from etl.tfrecord.kernels import inlined, is_valid, kernel, load_i32, load_i64, load_u8, load_u64

_EMPTY = 0  # no token has the id 0
_MIN_SLOTS = 16
_WIDE_TYPES = (pa.large_string(), pa.large_binary())
_BYTES_TYPES = (pa.string(), pa.binary(), *_WIDE_TYPES)


class TokenLookup(Protocol):
    """A vocabulary in the form in which columns are encoded."""

    output_type: pa.DataType

    def __len__(self) -> int:
        """Number of tokens."""

    def encode(self, values: pa.Array | pa.ChunkedArray) -> pa.Array:
        """Returns the id of each token, int64 `[rows]`, without nulls."""


class Int64Lookup:
    """Ids of integer tokens.

    Args:
        tokens: Tokens in id order, int64 `[tokens]`; the first has id `FIRST_TOKEN_ID`.

    Raises:
        InputDataError: A token is null or stands there twice.
    """

    output_type = pa.int64()

    def __init__(self, tokens: pa.Array) -> None:
        _refuse_nulls(tokens)
        self._size = len(tokens)
        self._slots = np.zeros((_slot_count(len(tokens)), 2), np.int64)
        repeated = _fill_int64(tokens.to_numpy(zero_copy_only=True), FIRST_TOKEN_ID, self._slots)
        _refuse_repeated(tokens, repeated)

    def __len__(self) -> int:
        return self._size

    def encode(self, values: pa.Array | pa.ChunkedArray) -> pa.Array:
        """Looks up each token.

        Args:
            values: Integers (or what casts to int64 without loss) `[rows]`, sliced or chunked.

        Returns:
            Ids, int64 `[rows]`; `OOV_ID` for nulls and unknown tokens.

        Raises:
            pa.ArrowInvalid: A value is no int64.
        """
        if isinstance(values, pa.ChunkedArray):
            return _encode_chunks(self, values)
        if values.type != pa.int64():
            values = cast_values(values, pa.int64())
        ids = np.empty(len(values), np.int64)
        validity, data = _addresses(values)
        _find_int64(data, validity, values.offset, self._slots, ids)
        return _to_arrow(ids)


class BytesLookup:
    """Ids of string tokens, compared byte by byte.

    Args:
        tokens: Tokens in id order, string or binary `[tokens]`; the first has id
            `FIRST_TOKEN_ID`.

    Raises:
        InputDataError: A token is null or stands there twice.
    """

    output_type = pa.int64()

    def __init__(self, tokens: pa.Array) -> None:
        _refuse_nulls(tokens)
        # A copy of its own, at offset 0; it lives as long as the table that points into it.
        self._tokens = pa.concat_arrays([tokens.cast(pa.large_binary())])
        self._slots = np.zeros((_slot_count(len(tokens)), 2), np.int64)
        _, self._offsets, self._data = _bytes_addresses(self._tokens)
        start = self._tokens.offset
        self._offsets += 8 * start
        repeated = _fill_bytes(self._offsets, self._data, len(tokens), FIRST_TOKEN_ID, self._slots)
        _refuse_repeated(tokens, repeated)

    def __len__(self) -> int:
        return len(self._tokens)

    def encode(self, values: pa.Array | pa.ChunkedArray) -> pa.Array:
        """Looks up each token.

        Args:
            values: Strings or binaries, of 32 or 64 bit offsets, or integers, which stand for
                their decimal text; `[rows]`, sliced or chunked.

        Returns:
            Ids, int64 `[rows]`; `OOV_ID` for nulls and unknown tokens.

        Raises:
            pa.ArrowInvalid: Values of a type that has no exact text.
        """
        if isinstance(values, pa.ChunkedArray):
            return _encode_chunks(self, values)
        if values.type not in _BYTES_TYPES:
            values = cast_values(values, pa.string())
        ids = np.empty(len(values), np.int64)
        validity, offsets, data = _bytes_addresses(values)
        _find_bytes(
            (validity, offsets, data, values.offset, values.type in _WIDE_TYPES),
            (self._offsets, self._data),
            self._slots,
            ids,
        )
        return _to_arrow(ids)


def build_lookup(tokens: pa.Array | pa.ChunkedArray) -> Int64Lookup | BytesLookup:
    """Builds the table of a vocabulary.

    Args:
        tokens: Tokens in id order, int64, string or binary `[tokens]`.

    Raises:
        InputDataError: Another type, a null, or a token twice.
    """
    if isinstance(tokens, pa.ChunkedArray):
        tokens = tokens.combine_chunks()
    if tokens.type == pa.int64():
        return Int64Lookup(tokens)
    if tokens.type in _BYTES_TYPES:
        return BytesLookup(tokens)
    raise InputDataError(
        "a vocabulary has tokens of another type",
        received=tokens.type,
        allowed="int64, string, binary",
    )


def _slot_count(tokens: int) -> int:
    return max(_MIN_SLOTS, 1 << (2 * tokens - 1).bit_length() if tokens else 0)


def _refuse_nulls(tokens: pa.Array) -> None:
    if tokens.null_count:
        raise InputDataError(
            "a vocabulary holds a null token",
            received=f"{tokens.null_count} nulls",
            fix="fit the vocabulary again; null always has the OOV id",
        )


def _refuse_repeated(tokens: pa.Array, position: int) -> None:
    if position >= 0:
        raise InputDataError(
            "a vocabulary holds a token twice",
            received=f"{tokens[position].as_py()!r}, again at row {position}",
            fix="fit the vocabulary again",
        )


def _encode_chunks(lookup: TokenLookup, values: pa.ChunkedArray) -> pa.Array:
    chunks = [lookup.encode(chunk) for chunk in values.chunks]
    return pa.concat_arrays(chunks) if chunks else pa.array([], lookup.output_type)


def _address(buffer: pa.Buffer | None) -> int:
    return 0 if buffer is None else buffer.address


def _addresses(values: pa.Array) -> tuple[int, int]:
    """Addresses of the validity bitmap (0: all valid) and of the values, offset not applied."""
    validity, data = values.buffers()
    return (_address(validity) if values.null_count else 0), _address(data)


def _bytes_addresses(values: pa.Array) -> tuple[int, int, int]:
    """Addresses of validity bitmap (0: all valid), offsets and bytes, offset not applied."""
    validity, offsets, data = values.buffers()
    return (
        (_address(validity) if values.null_count else 0),
        _address(offsets),
        _address(data),
    )


def _to_arrow(ids: np.ndarray) -> pa.Array:
    return pa.Array.from_buffers(pa.int64(), len(ids), [None, pa.py_buffer(ids)], null_count=0)


@kernel
def _fill_int64(tokens, first_id, slots):  # type: ignore[no-untyped-def]
    """Fills the table; returns the position of a token seen before, or -1."""
    mask = np.uint64(slots.shape[0] - 1)
    for i in range(tokens.size):
        slot = mix64(np.uint64(tokens[i])) & mask
        while slots[slot, 1] != _EMPTY:
            if slots[slot, 0] == tokens[i]:
                return i
            slot = (slot + np.uint64(1)) & mask
        slots[slot, 0] = tokens[i]
        slots[slot, 1] = first_id + i
    return -1


@kernel
def _find_int64(data, validity, offset, slots, ids):  # type: ignore[no-untyped-def]
    mask = np.uint64(slots.shape[0] - 1)
    for i in range(ids.size):
        found = OOV_ID
        if is_valid(validity, offset + i):
            token = load_i64(data + 8 * (offset + i))
            slot = mix64(np.uint64(token)) & mask
            while slots[slot, 1] != _EMPTY:
                if slots[slot, 0] == token:
                    found = slots[slot, 1]
                    break
                slot = (slot + np.uint64(1)) & mask
        ids[i] = found


@inlined
def _equal_bytes(left: int, right: int, length: int) -> bool:
    i = 0
    while i + 8 <= length:
        if load_u64(left + i) != load_u64(right + i):
            return False
        i += 8
    while i < length:
        if load_u8(left + i) != load_u8(right + i):
            return False
        i += 1
    return True


@kernel
def _fill_bytes(offsets, data, count, first_id, slots):  # type: ignore[no-untyped-def]
    """Fills the table; returns the position of a token seen before, or -1."""
    mask = np.uint64(slots.shape[0] - 1)
    for i in range(count):
        start = load_i64(offsets + 8 * i)
        length = load_i64(offsets + 8 * i + 8) - start
        tag = hash_bytes(data + start, length)
        slot = tag & mask
        while slots[slot, 1] != _EMPTY:
            if slots[slot, 0] == np.int64(tag):
                other = offsets + 8 * (slots[slot, 1] - first_id)
                other_start = load_i64(other)
                if load_i64(other + 8) - other_start == length and _equal_bytes(
                    data + start, data + other_start, length
                ):
                    return i
            slot = (slot + np.uint64(1)) & mask
        slots[slot, 0] = np.int64(tag)
        slots[slot, 1] = first_id + i
    return -1


@kernel
def _find_bytes(values, tokens, slots, ids):  # type: ignore[no-untyped-def]
    """Fills `ids`.

    Args:
        values: Addresses of validity, offsets and bytes, position of the first row, and whether
            the offsets have 64 bits.
        tokens: Addresses of the tokens' 64-bit offsets and bytes.
        slots: The table, int64 `[slots, 2]`.
        ids: Result, int64 `[rows]`.
    """
    validity, offsets, data, first, wide = values
    token_offsets, token_data = tokens
    mask = np.uint64(slots.shape[0] - 1)
    for i in range(ids.size):
        found = OOV_ID
        row = first + i
        if is_valid(validity, row):
            if wide:
                start = load_i64(offsets + 8 * row)
                length = load_i64(offsets + 8 * row + 8) - start
            else:
                start = np.int64(load_i32(offsets + 4 * row))
                length = np.int64(load_i32(offsets + 4 * row + 4)) - start
            tag = hash_bytes(data + start, length)
            slot = tag & mask
            while slots[slot, 1] != _EMPTY:
                if slots[slot, 0] == np.int64(tag):
                    other = token_offsets + 8 * (slots[slot, 1] - FIRST_TOKEN_ID)
                    other_start = load_i64(other)
                    if load_i64(other + 8) - other_start == length and _equal_bytes(
                        data + start, token_data + other_start, length
                    ):
                        found = slots[slot, 1]
                        break
                slot = (slot + np.uint64(1)) & mask
        ids[i] = found

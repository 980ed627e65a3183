"""Lookup of tokens: known ones to their ids, unknown ones to OOV or its buckets.

Tables are immutable and exact: open addressing with linear probing at a load of at most one
half. A slot is 16 bytes, so that a probe costs one cache line: (token, id) for integers, (64-bit
hash, id) for strings, whose bytes are compared where the hash agrees. Tokens lie in id order,
which is falling frequency, so the bytes of the common ones share few cache lines.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conf.artefacts.encoder_files import RETIRED_COLUMN
from conf.encoders import VocabularySpec
from conf.errors import InputDataError
from conf.schema import FIRST_TOKEN_ID, OOV_ID, PAD_ID
from etl.encoders.arrow_columns import (
    BYTES_TYPES,
    bytes_buffers,
    cast_values,
    has_value,
    int64_buffers,
    load_span,
    to_arrow,
    valid_mask,
)
from etl.encoders.hashing import hash_bytes, hash_to_buckets, mix64
from etl.tfrecord.codec.kernels import inlined, kernel, load_i64, load_u8, load_u64

_EMPTY = 0  # no token has the position 0


@inlined
def _probe_int64(token, slots):
    """Slot of a token, and whether it is there; else the slot is free."""
    mask = np.uint64(slots.shape[0] - 1)
    slot = mix64(np.uint64(token)) & mask
    while slots[slot, 1] != _EMPTY:
        if slots[slot, 0] == token:
            return slot, True
        slot = (slot + np.uint64(1)) & mask
    return slot, False


@kernel
def fill_int64(tokens, retired, slots):
    """Fills the table of integers; returns the position of a token seen before, or -1.

    A slot holds a token and its position from 1, negative where the token is retired.

    Args:
        tokens: int64 `[tokens]`.
        retired: Tokens that are found as OOV, bool `[tokens]`.
        slots: The table, int64 `[slots, 2]`, zeros.
    """
    for i in range(tokens.size):
        slot, found = _probe_int64(tokens[i], slots)
        if found:
            return i
        slots[slot, 0] = tokens[i]
        slots[slot, 1] = -1 - i if retired[i] else 1 + i
    return -1


@kernel
def find_int64(buffers, first_id, slots, ids):
    """Fills `ids`, int64 `[rows]`, from an int64 array's buffers."""
    for row in range(ids.size):
        ids[row] = OOV_ID
        if has_value(buffers, row):
            slot, found = _probe_int64(load_i64(buffers[2] + 8 * (buffers[3] + row)), slots)
            if found and slots[slot, 1] > 0:
                ids[row] = first_id + slots[slot, 1] - 1


@inlined
def _equal_bytes(left, right, length):
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


@inlined
def _probe_bytes(address, length, tokens, slots):
    """Slot of some bytes, and whether they are there; else the slot is free."""
    mask = np.uint64(slots.shape[0] - 1)
    tag = hash_bytes(address, length)
    slot = tag & mask
    while slots[slot, 1] != _EMPTY:
        if slots[slot, 0] == np.int64(tag):
            token, token_length = load_span(tokens, abs(slots[slot, 1]) - 1)
            if token_length == length and _equal_bytes(address, token, length):
                return slot, True
        slot = (slot + np.uint64(1)) & mask
    return slot, False


@kernel
def fill_bytes(tokens, retired, slots):
    """Fills the table of strings; returns the position of a token seen before, or -1.

    A slot holds the hash of a token and its position from 1, negative where it is retired.

    Args:
        tokens: Buffers of the tokens.
        retired: Tokens that are found as OOV, bool `[tokens]`.
        slots: The table, int64 `[slots, 2]`, zeros.
    """
    for i in range(retired.size):
        address, length = load_span(tokens, i)
        slot, found = _probe_bytes(address, length, tokens, slots)
        if found:
            return i
        slots[slot, 0] = np.int64(hash_bytes(address, length))
        slots[slot, 1] = -1 - i if retired[i] else 1 + i
    return -1


@kernel
def find_bytes(buffers, tokens, first_id, slots, ids):
    """Fills `ids`, int64 `[rows]`, from the buffers of strings or binaries."""
    for row in range(ids.size):
        ids[row] = OOV_ID
        if has_value(buffers, row):
            address, length = load_span(buffers, row)
            slot, found = _probe_bytes(address, length, tokens, slots)
            if found and slots[slot, 1] > 0:
                ids[row] = first_id + slots[slot, 1] - 1


_MIN_TABLE_SLOTS = 16


class TokenLookup(ABC):
    """A vocabulary in the form in which columns are encoded.

    Args:
        tokens: Tokens in id order `[tokens]`.
        first_id: Id of the first of them.
        retired: Tokens that are no longer known, though they keep their ids, bool `[tokens]`;
            None: no token is.

    Raises:
        InputDataError: A token is null or stands there twice.
    """

    output_type = pa.int64()

    def __init__(
        self, tokens: pa.Array, first_id: int = FIRST_TOKEN_ID, retired: np.ndarray | None = None
    ) -> None:
        _refuse_nulls(tokens)
        # A copy of its own, at offset 0; it lives as long as the table that points into it.
        self._tokens = self._own_tokens(tokens)
        self._first_id = first_id
        if retired is None:
            retired = np.zeros(len(tokens), np.bool_)
        self._slots = np.zeros((_slot_count(len(tokens)), 2), np.int64)
        _refuse_repeated(tokens, self._fill(retired))

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self._tokens)

    def encode(self, values: pa.Array | pa.ChunkedArray) -> pa.Array:
        """Looks up each token.

        Args:
            values: What `cast` takes, `[rows]`, sliced or chunked.

        Returns:
            Ids, int64 `[rows]`; `OOV_ID` for nulls and unknown tokens.

        Raises:
            pa.ArrowInvalid: A value cannot be a token.
        """
        if isinstance(values, pa.ChunkedArray):
            chunks = [self.encode(chunk) for chunk in values.chunks]
            return pa.concat_arrays(chunks) if chunks else pa.array([], self.output_type)
        values = self.cast(values)
        ids = np.empty(len(values), np.int64)
        self._find(values, ids)
        return to_arrow(ids)

    @abstractmethod
    def cast(self, values: pa.Array) -> pa.Array:
        """Returns values in a type that can be looked up; refuses what would lose them."""

    @abstractmethod
    def _own_tokens(self, tokens: pa.Array) -> pa.Array:
        """A copy of the tokens."""

    @abstractmethod
    def _fill(self, retired: np.ndarray) -> int:
        """Fills the slots; returns the position of a token seen before, or -1."""

    @abstractmethod
    def _find(self, values: pa.Array, ids: np.ndarray) -> None:
        """Fills `ids` `[rows]`."""


class Int64Lookup(TokenLookup):
    """Ids of integer tokens; looks up integers, and what casts to int64 without loss."""

    def cast(self, values: pa.Array) -> pa.Array:
        """Returns int64 values."""
        return cast_values(values, pa.int64())

    def _own_tokens(self, tokens: pa.Array) -> pa.Array:
        return pa.concat_arrays([tokens])

    def _fill(self, retired: np.ndarray) -> int:
        tokens = self._tokens.to_numpy(zero_copy_only=True)
        return int(fill_int64(tokens, retired, self._slots))

    def _find(self, values: pa.Array, ids: np.ndarray) -> None:
        find_int64(int64_buffers(values), self._first_id, self._slots, ids)


class BytesLookup(TokenLookup):
    """Ids of string tokens, compared byte by byte.

    Looks up strings and binaries, of 32 or 64 bit offsets, and integers, which stand for their
    decimal text.
    """

    def cast(self, values: pa.Array) -> pa.Array:
        """Returns strings or binaries."""
        return values if values.type in BYTES_TYPES else cast_values(values, pa.string())

    def _own_tokens(self, tokens: pa.Array) -> pa.Array:
        return pa.concat_arrays([tokens.cast(pa.large_binary())])

    def _fill(self, retired: np.ndarray) -> int:
        tokens = bytes_buffers(self._tokens)
        return int(fill_bytes(tokens, retired, self._slots))

    def _find(self, values: pa.Array, ids: np.ndarray) -> None:
        tokens = bytes_buffers(self._tokens)
        find_bytes(bytes_buffers(values), tokens, self._first_id, self._slots, ids)


def build_lookup(
    tokens: pa.Array | pa.ChunkedArray,
    first_id: int = FIRST_TOKEN_ID,
    retired: np.ndarray | None = None,
) -> TokenLookup:
    """Builds the table of a vocabulary.

    Args:
        tokens: Tokens in id order, int64, string or binary `[tokens]`.
        first_id: Id of the first of them.
        retired: Tokens that are no longer known, bool `[tokens]`, or None.

    Raises:
        InputDataError: Another type, a null, or a token twice.
    """
    if isinstance(tokens, pa.ChunkedArray):
        tokens = tokens.combine_chunks()
    if tokens.type == pa.int64():
        return Int64Lookup(tokens, first_id, retired)
    if tokens.type in BYTES_TYPES:
        return BytesLookup(tokens, first_id, retired)
    raise InputDataError(
        "a vocabulary has tokens of another type",
        received=tokens.type,
        allowed="int64, string, binary",
    )


def _slot_count(tokens: int) -> int:
    return max(_MIN_TABLE_SLOTS, 1 << (2 * tokens - 1).bit_length() if tokens else 0)


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


class TokenEncoder:
    """Ids of tokens.

    Args:
        spec: The plan's entry.
        table: The vocabulary.

    Raises:
        InputDataError: The table holds a null or a token twice.
    """

    output_type = pa.int64()

    def __init__(self, spec: VocabularySpec, table: pa.Table) -> None:
        retired = None
        if RETIRED_COLUMN in table.schema.names:
            retired = table[RETIRED_COLUMN].to_numpy()
        self._lookup = build_lookup(table["token"], spec.first_token_id, retired)
        self._oov_buckets = spec.oov_buckets

    def encode(self, values: pa.Array) -> pa.Array:
        """Encodes tokens `[values]` to int64 ids `[values]`; null is always `OOV_ID`."""
        if self._oov_buckets is None:
            return self._lookup.encode(values)
        values = self._lookup.cast(values)
        ids = self._lookup.encode(values).to_numpy().copy()
        unknown = (ids == OOV_ID) & valid_mask(values)
        if unknown.any():
            rest = values.filter(pa.array(unknown))
            ids[unknown] = hash_to_buckets(rest, self._oov_buckets) + FIRST_TOKEN_ID
        return to_arrow(np.ascontiguousarray(ids))


class ListTokenEncoder:
    """Ids of the tokens of lists that the raw data pads.

    Args:
        tokens: Encoder of a token.
        pad_token: The token that pads; its id is `PAD_ID`.
    """

    output_type = pa.int64()

    def __init__(self, tokens: TokenEncoder, pad_token: int) -> None:
        self._tokens, self._pad_token = tokens, pad_token

    def encode(self, values: pa.Array) -> pa.Array:
        """Encodes the tokens of lists `[values]` to int64 ids `[values]`."""
        is_pad = pc.equal(values, pa.scalar(self._pad_token, values.type)).fill_null(False)
        return pc.if_else(is_pad, pa.scalar(PAD_ID, pa.int64()), self._tokens.encode(values))

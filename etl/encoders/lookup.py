"""Immutable token -> id tables for Arrow columns: exact, built once, no Python object per row.

Open addressing with linear probing at a load of at most one half. A slot is 16 bytes, so that a
probe costs one cache line: (token, id) for integers, (64-bit hash, id) for strings, whose bytes
are compared where the hash agrees. Tokens lie in id order, which is falling frequency, so the
bytes of the common ones share few cache lines.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import pyarrow as pa

from conf.errors import InputDataError
from conf.schema import FIRST_TOKEN_ID
from etl.encoders import lookup_kernels
from etl.encoders.buffers import BYTES_TYPES, bytes_cells, int64_cells, to_arrow
from etl.encoders.casting import cast_values

_MIN_SLOTS = 16


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
        return int(lookup_kernels.fill_int64(tokens, retired, self._slots))

    def _find(self, values: pa.Array, ids: np.ndarray) -> None:
        lookup_kernels.find_int64(int64_cells(values), self._first_id, self._slots, ids)


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
        tokens = bytes_cells(self._tokens)
        return int(lookup_kernels.fill_bytes(tokens, retired, self._slots))

    def _find(self, values: pa.Array, ids: np.ndarray) -> None:
        tokens = bytes_cells(self._tokens)
        lookup_kernels.find_bytes(bytes_cells(values), tokens, self._first_id, self._slots, ids)


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

"""Lookup of tokens: their ids, OOV or its buckets where they are unknown.

Tables are immutable and exact: open addressing with linear probing at a load of at most one
half. A slot is 16 bytes, so that a probe costs one cache line: (token, id) for integers, (64-bit
hash, id) for strings, whose bytes are compared where the hash agrees. Tokens lie in id order,
which is falling frequency, so the bytes of the common ones share few cache lines.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conf.artefacts.encoder_files import RETIRED_COLUMN
from conf.encoders import VocabularySpec
from conf.schema import FIRST_TOKEN_ID, OOV_ID
from etl.encoders.arrow_columns import (
    as_text,
    bytes_buffers,
    cast_values,
    has_value,
    int64_buffers,
    load_span,
    to_arrow,
    valid_mask,
)
from etl.encoders.hashing import fingerprint64, hash_to_buckets
from etl.tfrecord.codec.kernels import inlined, kernel, load_i64, load_u8, load_u64

_EMPTY = 0  # no token has the position 0
_MIN_TABLE_SLOTS = 16
_SHIFT = np.uint64(33)


@inlined
def _mix64(key):
    """Spreads each bit of a key over all 64 bits, one to one (MurmurHash3's `fmix64`)."""
    mixed = (key ^ (key >> _SHIFT)) * np.uint64(0xFF51AFD7ED558CCD)
    mixed = (mixed ^ (mixed >> _SHIFT)) * np.uint64(0xC4CEB9FE1A85EC53)
    return mixed ^ (mixed >> _SHIFT)


@inlined
def _probe_int64(token, slots):
    """Slot of a token, and whether it is there; else the slot is free."""
    mask = np.uint64(slots.shape[0] - 1)
    slot = _mix64(np.uint64(token)) & mask
    while slots[slot, 1] != _EMPTY:
        if slots[slot, 0] == token:
            return slot, True
        slot = (slot + np.uint64(1)) & mask
    return slot, False


@kernel
def _fill_int64(tokens, retired, slots):
    """Fills the table of integers, int64 `[slots, 2]`, zeros before.

    A slot holds a token and its position from 1; a retired token has none: it is unknown.
    """
    for i in range(tokens.size):
        if not retired[i]:
            slot, _ = _probe_int64(tokens[i], slots)
            slots[slot, 0] = tokens[i]
            slots[slot, 1] = 1 + i


@kernel
def _find_int64(buffers, first_id, slots, ids):
    """Fills `ids`, int64 `[rows]`, from an int64 array's buffers."""
    for row in range(ids.size):
        ids[row] = OOV_ID
        if has_value(buffers, row):
            slot, found = _probe_int64(load_i64(buffers[2] + 8 * (buffers[3] + row)), slots)
            if found:
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
    tag = fingerprint64(address, length)
    slot = tag & mask
    while slots[slot, 1] != _EMPTY:
        if slots[slot, 0] == np.int64(tag):
            token, token_length = load_span(tokens, slots[slot, 1] - 1)
            if token_length == length and _equal_bytes(address, token, length):
                return slot, True
        slot = (slot + np.uint64(1)) & mask
    return slot, False


@kernel
def _fill_bytes(tokens, retired, slots):
    """Fills the table of strings; a slot holds the hash of a token and its position, as above."""
    for i in range(retired.size):
        if not retired[i]:
            address, length = load_span(tokens, i)
            slot, _ = _probe_bytes(address, length, tokens, slots)
            slots[slot, 0] = np.int64(fingerprint64(address, length))
            slots[slot, 1] = 1 + i


@kernel
def _find_bytes(buffers, tokens, first_id, slots, ids):
    """Fills `ids`, int64 `[rows]`, from the buffers of strings or binaries."""
    for row in range(ids.size):
        ids[row] = OOV_ID
        if has_value(buffers, row):
            address, length = load_span(buffers, row)
            slot, found = _probe_bytes(address, length, tokens, slots)
            if found:
                ids[row] = first_id + slots[slot, 1] - 1


class TokenEncoder:
    """Ids of distinct tokens in id order, int64, string or binary `[tokens]`.

    Unknown tokens are `OOV_ID`, or hashed to `oov_buckets` ids before the first token. So are
    `retired` ones, bool `[tokens]`, though they keep their ids.
    """

    def __init__(
        self,
        tokens: pa.Array,
        oov_buckets: int | None = None,
        retired: np.ndarray | None = None,
    ) -> None:
        self._is_integer = tokens.type == pa.int64()
        self._oov_buckets = oov_buckets
        # A copy of its own, at offset 0; it lives as long as the table that points into it.
        owned = tokens if self._is_integer else tokens.cast(pa.large_binary())
        self._tokens = pa.concat_arrays([owned])
        retired = np.zeros(len(tokens), np.bool_) if retired is None else retired
        slots = max(_MIN_TABLE_SLOTS, 1 << (2 * len(tokens) - 1).bit_length() if len(tokens) else 0)
        self._slots = np.zeros((slots, 2), np.int64)
        if self._is_integer:
            _fill_int64(self._tokens.to_numpy(zero_copy_only=True), retired, self._slots)
        else:
            _fill_bytes(bytes_buffers(self._tokens), retired, self._slots)

    @classmethod
    def of(cls, spec: VocabularySpec, table: pa.Table) -> TokenEncoder:
        """Builds the encoder of a vocabulary's table."""
        is_incremental = RETIRED_COLUMN in table.schema.names
        retired = table[RETIRED_COLUMN].to_numpy() if is_incremental else None
        return cls(table["token"].combine_chunks(), spec.oov_buckets, retired)

    def encode(self, values: pa.Array) -> pa.Array:
        """Encodes tokens `[values]` to int64 ids; null is always `OOV_ID`.

        Integers stand for their decimal text, where tokens are strings.

        Raises:
            pa.ArrowInvalid: A value cannot be a token.
        """
        ids, first_id = np.empty(len(values), np.int64), FIRST_TOKEN_ID + (self._oov_buckets or 0)
        if self._is_integer:
            values = cast_values(values, pa.int64())
            _find_int64(int64_buffers(values), first_id, self._slots, ids)
        else:
            values, tokens = as_text(values), bytes_buffers(self._tokens)
            _find_bytes(bytes_buffers(values), tokens, first_id, self._slots, ids)
        _hash_unknown(values, ids, self._oov_buckets)
        return to_arrow(ids)


def _hash_unknown(values: pa.Array, ids: np.ndarray, oov_buckets: int | None) -> None:
    """Gives the values that are no token, `OOV_ID` before, the ids of their buckets."""
    if oov_buckets is None:
        return
    unknown = (ids == OOV_ID) & valid_mask(values)
    if unknown.any():
        rest = values.filter(pa.array(unknown))
        ids[unknown] = hash_to_buckets(rest, oov_buckets) + FIRST_TOKEN_ID


def found_column(vocabulary: str, column: str) -> str:
    """Returns the column that holds what a join has found of the tokens of a raw column.

    Its values are structs: `id`, null where the token is not in the vocabulary, and `unknown`, that
    token where it has a bucket. Both are null where there is no token.
    """
    return f"__found:{vocabulary}:{column}"


@dataclass(frozen=True)
class JoinedTokenEncoder:
    """Ids of tokens that a join has looked up; the values are those of a `found_column`."""

    oov_buckets: int | None = None

    def encode(self, values: pa.Array) -> pa.Array:
        """Encodes structs `[values]` to int64 ids."""
        found = pc.struct_field(values, "id").fill_null(OOV_ID)
        ids = np.array(found.to_numpy(zero_copy_only=False), np.int64)
        _hash_unknown(pc.struct_field(values, "unknown"), ids, self.oov_buckets)
        return to_arrow(ids)

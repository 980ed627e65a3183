"""Lookup of tokens: their ids, OOV or its buckets where they are unknown.

Tables are immutable and exact: open addressing with linear probing at a load of at most one
half. A slot is 16 bytes, so that a probe costs one cache line: (tag, position). The tag of an
integer is the integer, that of a string the 64-bit hash of its bytes, which are compared where it
agrees. Tokens lie in id order, which is falling frequency, so the bytes of the common ones share
few cache lines.
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
    array_buffers,
    as_text,
    cast_values,
    has_value,
    load_span,
    to_arrow,
    valid_mask,
)
from etl.encoders.hashing import fingerprint64, hash_to_buckets
from etl.tfrecord.codec.kernels import inlined, kernel, load_i64, load_u8, load_u64

_EMPTY = 0  # no token has the position 0
_SHIFT = np.uint64(33)


@inlined
def _mix64(key):
    """Spreads each bit of a key over all 64 bits, one to one (MurmurHash3's `fmix64`)."""
    mixed = (key ^ (key >> _SHIFT)) * np.uint64(0xFF51AFD7ED558CCD)
    mixed = (mixed ^ (mixed >> _SHIFT)) * np.uint64(0xC4CEB9FE1A85EC53)
    return mixed ^ (mixed >> _SHIFT)


@inlined
def _read_tag(buffers, row):
    """The value of an integer, the hash of a string: int64."""
    if buffers[1] == 0:
        return load_i64(buffers[2] + 8 * (buffers[3] + row))
    address, length = load_span(buffers, row)
    return np.int64(fingerprint64(address, length))


@inlined
def _same_bytes(left, left_row, right, right_row):
    """Whether tokens of one tag are the same: integers are."""
    if left[1] == 0:
        return True
    one, length = load_span(left, left_row)
    other, other_length = load_span(right, right_row)
    if length != other_length:
        return False
    i = 0
    while i + 8 <= length:
        if load_u64(one + i) != load_u64(other + i):
            return False
        i += 8
    while i < length:
        if load_u8(one + i) != load_u8(other + i):
            return False
        i += 1
    return True


@inlined
def _probe(buffers, row, tag, tokens, slots):
    """Slot of a value, and whether it is a token; else the slot is free."""
    mask = np.uint64(slots.shape[0] - 1)
    slot = _mix64(np.uint64(tag)) & mask
    while slots[slot, 1] != _EMPTY:
        if slots[slot, 0] == tag and _same_bytes(buffers, row, tokens, slots[slot, 1] - 1):
            return slot, True
        slot = (slot + np.uint64(1)) & mask
    return slot, False


@kernel
def _fill(tokens, retired, slots):
    """Fills a table, int64 `[slots, 2]`, zeros before.

    A slot holds a token's tag and its position from 1; a retired token has none: it is unknown.
    """
    for i in range(retired.size):
        if not retired[i]:
            tag = _read_tag(tokens, i)
            slot, _ = _probe(tokens, i, tag, tokens, slots)
            slots[slot, 0] = tag
            slots[slot, 1] = 1 + i


@kernel
def _find(buffers, tokens, first_id, slots, ids):
    """Fills `ids`, int64 `[rows]`, from the buffers of an array."""
    for row in range(ids.size):
        ids[row] = OOV_ID
        if has_value(buffers, row):
            slot, found = _probe(buffers, row, _read_tag(buffers, row), tokens, slots)
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
        self._slots = np.zeros((1 << (2 * len(tokens) - 1).bit_length(), 2), np.int64)
        _fill(array_buffers(self._tokens), retired, self._slots)

    @classmethod
    def of(cls, spec: VocabularySpec, table: pa.Table) -> TokenEncoder:
        """Builds the encoder of a vocabulary's table."""
        is_incremental = RETIRED_COLUMN in table.schema.names
        retired = table[RETIRED_COLUMN].to_numpy() if is_incremental else None
        return cls(table["token"].combine_chunks(), spec.oov_buckets, retired)

    def encode(self, values: pa.Array) -> pa.Array:
        """Encodes tokens `[values]` to int64 ids; null is always `OOV_ID`.

        Integers stand for their decimal text, where tokens are strings.
        """
        ids, first_id = np.empty(len(values), np.int64), FIRST_TOKEN_ID + (self._oov_buckets or 0)
        values = cast_values(values, pa.int64()) if self._is_integer else as_text(values)
        _find(array_buffers(values), array_buffers(self._tokens), first_id, self._slots, ids)
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

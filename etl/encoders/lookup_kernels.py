"""Compiled loops of the token lookups: fill a table, find ids in it."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import numpy as np

from conf.schema import OOV_ID
from etl.encoders.buffers import has_value, load_span
from etl.encoders.hashing import hash_bytes, mix64
from etl.tfrecord.kernels import inlined, kernel, load_i64, load_u8, load_u64

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
def find_int64(cells, first_id, slots, ids):
    """Fills `ids`, int64 `[rows]`, from an int64 array's cells."""
    for row in range(ids.size):
        ids[row] = OOV_ID
        if has_value(cells, row):
            slot, found = _probe_int64(load_i64(cells[2] + 8 * (cells[3] + row)), slots)
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
        tokens: Cells of the tokens.
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
def find_bytes(cells, tokens, first_id, slots, ids):
    """Fills `ids`, int64 `[rows]`, from the cells of strings or binaries."""
    for row in range(ids.size):
        ids[row] = OOV_ID
        if has_value(cells, row):
            address, length = load_span(cells, row)
            slot, found = _probe_bytes(address, length, tokens, slots)
            if found and slots[slot, 1] > 0:
                ids[row] = first_id + slots[slot, 1] - 1

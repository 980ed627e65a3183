"""Encoders of text: hashed n-grams of words or characters, in compiled passes over the bytes."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from conf.encoders.text import Ngrams
from conf.schema import FIRST_TOKEN_ID
from etl.encoders.arrow_columns import (
    ArrayBuffers,
    bytes_buffers,
    cast_values,
    has_value,
    load_span,
)
from etl.encoders.base import row_encoders
from etl.encoders.hashing import fingerprint64
from etl.tfrecord.codec.kernels import inlined, kernel, load_u8, store_u8

_SPACE = np.uint8(32)


@dataclass(frozen=True)
class NgramEncoder:
    """Hashed n-grams of a text; null stays null, text without words gives an empty list.

    Attributes:
        operation: What to hash.
        max_len: N-grams kept of each text, from the start of the list; None keeps all.
    """

    operation: Ngrams
    max_len: int | None
    output_type = pa.list_(pa.int64())

    def encode(self, columns: Sequence[pa.Array]) -> pa.Array:
        """Encodes one text column `[rows]` to lists of int64 ids `[rows]`."""
        texts = cast_values(columns[0], pa.string())
        by_word, sizes = self.operation.unit == "word", np.array(self.operation.sizes, np.int64)
        buffers = bytes_buffers(texts)
        size = _text_bytes(buffers, texts)
        bounds = np.zeros(len(texts) + 1, np.int64)
        # A byte of slack: an empty buffer has no address of its own.
        plain = np.empty(size + 1, np.uint8)
        _simplify(buffers, self.operation.lower, plain.ctypes.data, bounds)
        longest = int(np.diff(bounds).max(initial=0))
        spans = np.empty((longest + 1, 2), np.int64)
        limit = -1 if self.max_len is None else self.max_len
        offsets = np.zeros(len(texts) + 1, np.int64)
        shape = (by_word, sizes, limit)
        _count_grams(plain.ctypes.data, bounds, shape, spans, offsets)
        ids = np.empty(offsets[-1], np.int64)
        buckets = np.uint64(self.operation.buckets)
        _hash_grams(plain.ctypes.data, bounds, shape, spans, (offsets, buckets), ids)
        if offsets[-1] >= 2**31:
            raise pa.ArrowInvalid(f"{offsets[-1]} n-grams in one batch; at most 2**31 - 1 fit")
        mask = texts.is_null() if texts.null_count else None
        return pa.ListArray.from_arrays(
            pa.array(offsets.astype(np.int32)), pa.array(ids), mask=mask
        )


row_encoders.declare(Ngrams)(lambda operation, spec, *_: NgramEncoder(operation, spec.max_len))


def _text_bytes(buffers: ArrayBuffers, texts: pa.Array) -> int:
    """Bytes of all texts, nulls' included."""
    return int(_sum_lengths(buffers, len(texts)))


@kernel
def _sum_lengths(buffers, rows):
    total = 0
    for row in range(rows):
        total += load_span(buffers, row)[1]
    return total


@inlined
def _separates(byte):
    """Whether a byte is ASCII and neither letter nor digit."""
    letter = byte | np.uint8(32)
    is_letter = letter >= np.uint8(97) and letter <= np.uint8(122)
    is_digit = byte >= np.uint8(48) and byte <= np.uint8(57)
    return byte < np.uint8(128) and not is_letter and not is_digit


@kernel
def _simplify(buffers, lower, plain, bounds):
    """Copies the words of each text with one space between; `bounds[row + 1]` is where it ends."""
    at = 0
    for row in range(bounds.size - 1):
        start = at
        if has_value(buffers, row):
            address, length = load_span(buffers, row)
            pending = False
            for i in range(length):
                byte = load_u8(address + i)
                if _separates(byte):
                    pending = at > start
                    continue
                if pending:
                    store_u8(plain + at, _SPACE)
                    at += 1
                    pending = False
                if lower and byte >= np.uint8(65) and byte <= np.uint8(90):
                    byte = byte + np.uint8(32)
                store_u8(plain + at, byte)
                at += 1
        bounds[row + 1] = at


@inlined
def _find_units(plain, start, end, by_word, spans):
    """Writes first and last position of each word or character; returns how many there are."""
    count = 0
    for i in range(start, end):
        byte = load_u8(plain + i)
        if by_word:
            begins = i == start or load_u8(plain + i - 1) == _SPACE
        else:
            begins = (byte & np.uint8(0xC0)) != np.uint8(0x80)
        if begins and not (by_word and byte == _SPACE):
            spans[count, 0] = i
            count += 1
        if not (by_word and byte == _SPACE):
            spans[count - 1, 1] = i + 1
    return count


@kernel
def _count_grams(plain, bounds, shape, spans, offsets):
    by_word, sizes, limit = shape
    for row in range(bounds.size - 1):
        units = _find_units(plain, bounds[row], bounds[row + 1], by_word, spans)
        grams = 0
        for size in sizes:
            grams += max(0, units - size + 1)
        offsets[row + 1] = offsets[row] + (grams if limit < 0 else min(grams, limit))


@kernel
def _hash_grams(plain, bounds, shape, spans, target, ids):
    by_word, sizes, _ = shape
    offsets, buckets = target
    for row in range(bounds.size - 1):
        units = _find_units(plain, bounds[row], bounds[row + 1], by_word, spans)
        at = offsets[row]
        for size in sizes:
            for i in range(units - size + 1):
                if at == offsets[row + 1]:
                    break
                begin = spans[i, 0]
                length = spans[i + size - 1, 1] - begin
                ids[at] = FIRST_TOKEN_ID + np.int64(fingerprint64(plain + begin, length) % buckets)
                at += 1

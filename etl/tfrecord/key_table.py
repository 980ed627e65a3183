"""Keys of features in the form that the decoder looks up."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from etl.tfrecord import decode_kernels_keys as k


def _cell_head(key: bytes) -> np.ndarray:
    """First bytes of a cell, its own length left out, padded to whole words with zeros."""
    lengths = bytes([0x0A, 0, 0x0A, len(key) & 0xFF])
    return np.frombuffer(lengths + key + bytes(-(len(key) + 4) % 8), np.uint8)


class KeyTable:
    """Feature keys in memory, and their hash table."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        heads = [_cell_head(key) for key in keys]
        self._memory = np.concatenate([*heads, np.zeros(8, np.uint8)])
        starts = np.cumsum([0, *(head.size for head in heads)], dtype=np.int64)
        self.places = [
            (self._memory.ctypes.data + int(start), len(key))
            for key, start in zip(keys, starts[:-1], strict=True)
        ]
        fields = np.zeros((max(1, len(keys)), k.FEATURE_FIELDS), np.int64)
        for row, (address, length) in enumerate(self.places):
            fields[row, k.HEAD], fields[row, k.KEY_BYTES] = address, length
        if not keys:
            fields[0, k.KEY_BYTES] = -1  # a key of no length at all: matches nothing
        self.fields = fields
        self.table = np.empty(1 << (2 * len(keys) + 1).bit_length(), np.int64)
        k.build_key_table(fields[: len(keys)], self.table)

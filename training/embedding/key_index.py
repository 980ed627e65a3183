"""Rows of 64-bit keys, numbered in order of arrival: an open-addressing index in host memory."""

from __future__ import annotations

import threading

import numpy as np

from conf.schema import FIRST_TOKEN_ID, OOV_ID, PAD_ID
from etl.tfrecord.reading import inlined, kernel

FIRST_ROW = FIRST_TOKEN_ID
"""Row of the first key; the two before are padding's and that of unknown keys."""
MIN_SLOTS = 1 << 10
# Of eight slots five are filled at most: a search then looks at two or three of them.
_FILLED, _OF = 5, 8


class KeyIndex:
    """Maps keys to rows.

    Key 0 is padding and has row 0. Unknown keys have row 1, every other key a row from 2 on, in
    order of arrival. Rows are never renumbered, so the first `n` rows of an index are the index
    as it was when it had `n` rows. Methods may be called from several threads.

    Args:
        max_rows: Keys that get a row, at most; None: no limit.
    """

    def __init__(self, max_rows: int | None = None) -> None:
        self.max_rows = max_rows
        self._most = np.iinfo(np.int64).max if max_rows is None else max_rows + FIRST_ROW
        self._lock = threading.Lock()
        self._count = FIRST_ROW
        self._clear(MIN_SLOTS)

    def __len__(self) -> int:
        """Rows, those of padding and of unknown keys included."""
        return self._count

    @property
    def bytes(self) -> int:
        """Memory that it takes."""
        return self._slots.nbytes + self._keys.nbytes

    def map(self, keys: np.ndarray) -> tuple[np.ndarray, int]:
        """Returns the rows of keys; new keys get one, as long as there are any.

        Args:
            keys: int64 `[n]`, of any value, repeats allowed.

        Returns:
            Rows, int64 `[n]`, and how many of the keys were refused a row: theirs is 1.
        """
        keys = np.ascontiguousarray(keys, np.int64)
        rows = np.empty(len(keys), np.int64)
        with self._lock:
            done = refused = 0
            while done < len(keys):
                done, self._count, more = _map_keys(
                    self._slots, self._keys, self._count, self._most, keys, rows, done
                )
                refused += more
                if done < len(keys):
                    self._grow()
        return rows, refused

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Returns the rows of keys, int64 `[n]`; 1 where a key is unknown. Nothing changes."""
        keys = np.ascontiguousarray(keys, np.int64)
        rows = np.empty(len(keys), np.int64)
        with self._lock:
            _find_rows(self._slots, keys, rows)
        return rows

    def read_keys(self, start: int, stop: int) -> np.ndarray:
        """Returns a copy of the keys of rows `[start, stop)`, int64; `start` is 2 or more."""
        with self._lock:
            return self._keys[start:stop].copy()

    def set_keys(self, keys: np.ndarray) -> None:
        """Forgets all keys and gives rows from 2 on to others.

        Args:
            keys: int64 `[n]`, each once and none 0.

        Raises:
            ValueError: A key occurs twice or is 0, or there are more than `max_rows`. All keys
                are forgotten.
        """
        keys = np.ascontiguousarray(keys, np.int64)
        with self._lock:
            slots = MIN_SLOTS
            while slots * _FILLED // _OF < len(keys) + FIRST_ROW:
                slots *= 2
            self._clear(slots)
            if len(keys) + FIRST_ROW > self._most:
                raise ValueError(f"{len(keys):,} keys, and max_rows is {self.max_rows:,}")
            rows = np.empty(len(keys), np.int64)
            _, self._count, _ = _map_keys(
                self._slots, self._keys, self._count, self._most, keys, rows, 0
            )
            if self._count != len(keys) + FIRST_ROW:
                self._clear(MIN_SLOTS)
                raise ValueError("a key occurs twice, or is that of padding")

    def truncate(self, count: int) -> None:
        """Forgets the keys of the rows from `count` on."""
        if count < len(self):
            self.set_keys(self.read_keys(FIRST_ROW, count))

    def _clear(self, slots: int) -> None:
        self._slots = np.zeros((slots, 2), np.int64)  # key, row; row 0 marks an empty slot
        self._keys = np.zeros(slots * _FILLED // _OF, np.int64)  # by row
        self._count = FIRST_ROW

    def _grow(self) -> None:
        slots = np.zeros((2 * len(self._slots), 2), np.int64)
        keys = np.zeros(len(slots) * _FILLED // _OF, np.int64)
        keys[: self._count] = self._keys[: self._count]
        _place_keys(slots, keys, self._count)
        self._slots, self._keys = slots, keys


@inlined
def mix_key(key):  # type: ignore[no-untyped-def]
    """The finalizer of MurmurHash3 (Appleby 2011): every bit of the key moves every bit."""
    mixed = np.uint64(key)
    mixed = (mixed ^ (mixed >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    mixed = (mixed ^ (mixed >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return mixed ^ (mixed >> np.uint64(33))


@inlined
def _search(slots, key, mask):  # type: ignore[no-untyped-def]
    """The slot that a key is in, or the empty one where it would go."""
    slot = np.int64(mix_key(key) & np.uint64(mask))
    while slots[slot, 1] != 0 and slots[slot, 0] != key:
        slot = (slot + 1) & mask
    return slot


@kernel
def _map_keys(slots, by_row, count, most, keys, rows, start):  # type: ignore[no-untyped-def]
    """Maps keys from `start` on; stops where there is no room. Returns where, count, refused."""
    mask, refused = len(slots) - 1, 0
    for i in range(start, len(keys)):
        key = keys[i]
        if key == PAD_ID:
            rows[i] = PAD_ID
            continue
        slot = _search(slots, key, mask)
        row = slots[slot, 1]
        if row == 0:
            if count >= most:
                rows[i] = OOV_ID
                refused += 1
                continue
            if count == len(by_row):
                return i, count, refused
            row = count
            slots[slot, 0], slots[slot, 1], by_row[row] = key, row, key
            count += 1
        rows[i] = row
    return len(keys), count, refused


@kernel
def _find_rows(slots, keys, rows):  # type: ignore[no-untyped-def]
    mask = len(slots) - 1
    for i in range(len(keys)):
        if keys[i] == PAD_ID:
            rows[i] = PAD_ID
        else:
            rows[i] = max(slots[_search(slots, keys[i], mask), 1], OOV_ID)


@kernel
def _place_keys(slots, by_row, count):  # type: ignore[no-untyped-def]
    """Fills empty slots with keys that are all different."""
    mask = len(slots) - 1
    for row in range(FIRST_ROW, count):
        slot = _search(slots, by_row[row], mask)
        slots[slot, 0], slots[slot, 1] = by_row[row], row

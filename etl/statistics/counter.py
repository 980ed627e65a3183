"""Counts values by a 64-bit key, exactly while there are few, in bounded memory always.

The first `MAX_DISTINCT` keys to appear are counted from their first occurrence on, so their counts
are exact. Later ones share counters by hash, which bound what any one of them can have reached
(one row of a count-min sketch: Cormode and Muthukrishnan, 2005).
"""

from __future__ import annotations

import numpy as np

from etl.encoders.hashing import mix64
from etl.statistics.distinct import add_hash, build_registers
from etl.tfrecord.kernels import kernel

MAX_DISTINCT = 1 << 12
"""Small enough that the tables of a shard's features stay in the cache between batches."""
_FIRST_SLOTS = 1 << 8
_MAX_SLOTS = 2 * MAX_DISTINCT
_SHARED = 1 << 10


class KeyCounter:
    """Counts 64-bit keys.

    Attributes:
        registers: Distinct-count sketch of the keys that are not counted one by one.
    """

    def __init__(self) -> None:
        self.registers = build_registers()
        self._shared = np.zeros(_SHARED, np.int64)
        self._slots = np.zeros((_FIRST_SLOTS, 2), np.int64)  # key, count; count 0: empty
        self._used = 0

    @property
    def bound(self) -> int:
        """The most occurrences that a key can have which is not counted one by one."""
        return int(self._shared.max())

    def add(self, keys: np.ndarray) -> np.ndarray:
        """Counts keys.

        Args:
            keys: int64 `[values]`.

        Returns:
            Positions of the keys that are counted one by one from now on, int64, rising.
        """
        fresh = np.empty(min(len(keys), MAX_DISTINCT - self._used), np.int64)
        added = done = 0
        while True:
            done, new = _count(keys, done, self._slots, self._used, fresh[added:])
            self._used += new
            added += new
            if done == len(keys):
                return fresh[:added]
            if len(self._slots) == _MAX_SLOTS:
                _count_known(keys[done:], self._slots, self._shared, self.registers)
                return fresh[:added]
            larger = np.zeros((4 * len(self._slots), 2), np.int64)
            _rehash(self._slots, larger[:_MAX_SLOTS])
            self._slots = larger[:_MAX_SLOTS]

    def counts(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the keys counted one by one, and their counts, int64 `[keys]` each."""
        filled = self._slots[self._slots[:, 1] > 0]
        return filled[:, 0].copy(), filled[:, 1].copy()


@kernel
def _count(keys, start, slots, used, fresh):  # type: ignore[no-untyped-def]
    """Counts keys until the table is half full and a new one appears.

    Returns:
        Position of the first key not counted, and how many keys were new.
    """
    mask = np.uint64(slots.shape[0] - 1)
    limit = slots.shape[0] // 2 - used
    added = 0
    for i in range(start, keys.size):
        slot = mix64(np.uint64(keys[i])) & mask
        while slots[slot, 1] != 0 and slots[slot, 0] != keys[i]:
            slot = (slot + np.uint64(1)) & mask
        if slots[slot, 1] == 0:
            if added == limit:
                return i, added
            slots[slot, 0] = keys[i]
            fresh[added] = i
            added += 1
        slots[slot, 1] += 1
    return keys.size, added


@kernel
def _count_known(keys, slots, shared, registers):  # type: ignore[no-untyped-def]
    """Counts the keys that the table holds one by one, the others together."""
    mask = np.uint64(slots.shape[0] - 1)
    for i in range(keys.size):
        mixed = mix64(np.uint64(keys[i]))
        slot = mixed & mask
        while slots[slot, 1] != 0 and slots[slot, 0] != keys[i]:
            slot = (slot + np.uint64(1)) & mask
        if slots[slot, 1] == 0:
            # Other bits than those that choose a slot or a register.
            shared[(mixed >> np.uint64(32)) & np.uint64(_SHARED - 1)] += 1
            add_hash(mixed, registers)
        else:
            slots[slot, 1] += 1


@kernel
def _rehash(source, target):  # type: ignore[no-untyped-def]
    mask = np.uint64(target.shape[0] - 1)
    for i in range(source.shape[0]):
        if source[i, 1] != 0:
            slot = mix64(np.uint64(source[i, 0])) & mask
            while target[slot, 1] != 0:
                slot = (slot + np.uint64(1)) & mask
            target[slot, 0] = source[i, 0]
            target[slot, 1] = source[i, 1]

"""Counts values by a 64-bit key, exactly while there are few, in bounded memory always.

Once more than `MAX_DISTINCT` keys have appeared, the most frequent so far are counted on one by
one, from their first occurrence, so their counts stay exact. All others share counters by hash,
which bound what any one of them can have reached (one row of a count-min sketch: Cormode and
Muthukrishnan, 2005).
"""

from __future__ import annotations

import numpy as np

from etl.encoders.hashing import mix64
from etl.statistics.distinct import add_hash, build_registers
from etl.tfrecord.kernels import inlined, kernel

MAX_DISTINCT = 1 << 12
KEPT = 1 << 8
"""Keys still counted one by one when there are too many; few, so that a look-up costs little."""
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
        self._frozen = False

    @property
    def bound(self) -> int:
        """The most occurrences that a key can have which is not counted one by one."""
        return int(self._shared.max())

    def add(self, keys: np.ndarray) -> np.ndarray:
        """Counts keys.

        Args:
            keys: int64 `[values]`.

        Returns:
            Positions of the keys that are counted one by one from now on, int64, rising; where
            there are too many keys, some of them may be given up at once.
        """
        fresh = np.empty(0 if self._frozen else min(len(keys), MAX_DISTINCT), np.int64)
        added = done = 0
        while not self._frozen:
            done, new = _count(keys, done, self._slots, self._used, fresh[added:])
            self._used += new
            added += new
            if done == len(keys):
                return fresh[:added]
            if len(self._slots) < _MAX_SLOTS:
                self._grow()
            else:
                self._freeze()
        _count_known(keys[done:], self._slots, self._shared, self.registers)
        return fresh[:added]

    def counts(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the keys counted one by one, and their counts, int64 `[keys]` each."""
        filled = self._slots[self._slots[:, 1] > 0]
        return filled[:, 0].copy(), filled[:, 1].copy()

    def _grow(self) -> None:
        larger = np.zeros((min(4 * len(self._slots), _MAX_SLOTS), 2), np.int64)
        _move(self._slots, 0, larger, self._shared, self.registers)
        self._slots = larger

    def _freeze(self) -> None:
        counts = self._slots[:, 1]
        least = int(np.partition(counts, len(counts) - KEPT)[len(counts) - KEPT])
        kept = np.zeros((4 * KEPT, 2), np.int64)
        _move(self._slots, least, kept, self._shared, self.registers)
        self._slots, self._frozen = kept, True


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


@inlined
def _share(mixed, count, shared, registers):  # type: ignore[no-untyped-def]
    # Other bits of the hash than those that choose a slot or a register.
    shared[(mixed >> np.uint64(32)) & np.uint64(_SHARED - 1)] += count
    add_hash(mixed, registers)


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
            _share(mixed, 1, shared, registers)
        else:
            slots[slot, 1] += 1


@kernel
def _move(source, least, target, shared, registers):  # type: ignore[no-untyped-def]
    """Moves the keys counted more than `least` times to another table, the rest to the shared."""
    mask = np.uint64(target.shape[0] - 1)
    for i in range(source.shape[0]):
        count = source[i, 1]
        mixed = mix64(np.uint64(source[i, 0]))
        if count > least:
            slot = mixed & mask
            while target[slot, 1] != 0:
                slot = (slot + np.uint64(1)) & mask
            target[slot, 0] = source[i, 0]
            target[slot, 1] = count
        elif count > 0:
            _share(mixed, count, shared, registers)

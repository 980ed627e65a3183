"""Keys in host memory, by open addressing: their rows, occurrences and times.

`KeyIndex` numbers keys in order of arrival. `KeyRecords` hold row, occurrences and time of a key
in 24 bytes: the key, the time, and row and count in 32 bits each. Where a record lies follows the
order of the keys' hashes: what examines all keys little by little reads a stretch of memory after
the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from conf.schema import FIRST_TOKEN_ID, OOV_ID, PAD_ID
from conf.training.tables import MOST_OCCURRENCES
from etl.tfrecord.codec.kernels import inlined, kernel

FIRST_ROW = FIRST_TOKEN_ID
"""Row of the first key; the two before are padding's and that of unknown keys."""
SAVED_KEYS = "by_row"
MIN_SLOTS = 1 << 10
# Of eight slots five are filled at most: a search then looks at two or three of them.
_FILLED, _OF = 5, 8
HASHES = 1 << 32
"""Hashes of keys are below."""
KEY, TIME, META = 0, 1, 2
WAITING = 1
"""Row of a key that is counted and has no row yet."""
_ROW_BITS = np.int64(32)
_ROW = np.int64(0xFFFFFFFF)
# Of five slots of records four are filled at most; memory then grows by half.
_RECORDS, _OF_SLOTS = 4, 5
NO_KEYS = np.empty(0, np.int64)


class MappedBatch(NamedTuple):
    """Where the keys of a batch are: the row of each, int64 `[n]`, and what is new, int64 `[new]`.

    `new_rows` are those of `new_keys`; other keys may have had them. `row_count` rows need memory.
    Without rules batches are not counted.
    """

    rows: np.ndarray
    row_count: int
    new_keys: np.ndarray = NO_KEYS
    new_rows: np.ndarray = NO_KEYS
    batches: int = 0


class KeyIndex:
    """Maps keys to rows.

    Key 0 is padding and has row 0. Unknown keys have row 1, every other key a row from 2 on, in
    order of arrival. Rows are never renumbered, so the first `n` rows of an index are the index
    as it was when it had `n` rows: a moment of it is a number of rows.
    """

    saved = (SAVED_KEYS,)

    def __init__(self, max_rows: int | None = None) -> None:
        self.max_rows = max_rows
        self._most = np.iinfo(np.int64).max if max_rows is None else max_rows + FIRST_ROW
        self.refused, self.row_count = 0, FIRST_ROW
        self._clear(MIN_SLOTS)

    @property
    def bytes(self) -> int:
        return self._slots.nbytes + self._keys.nbytes

    def map(
        self, keys: np.ndarray, times: np.ndarray | None = None, *, is_last: bool = False
    ) -> MappedBatch:
        """Gives new keys of a batch, int64 `[n]`, rows; `refused` counts those without."""
        keys = np.ascontiguousarray(keys, np.int64)
        rows, first, done = np.empty(len(keys), np.int64), self.row_count, 0
        while done < len(keys):
            done, self.row_count, refused = _map_keys(
                self._slots, self._keys, self.row_count, self._most, keys, rows, done
            )
            self.refused += refused
            if done < len(keys):
                self._place(self.read_keys(self.row_count), 2 * len(self._slots))
        new_keys = self._keys[first : self.row_count].copy()
        return MappedBatch(rows, self.row_count, new_keys, np.arange(first, self.row_count))

    def find(self, keys: np.ndarray, moment: int) -> np.ndarray:
        """Returns the rows of keys, int64 `[n]`; 1 where a key is unknown. Nothing changes."""
        keys = np.ascontiguousarray(keys, np.int64)
        rows = np.empty(len(keys), np.int64)
        _find_rows(self._slots, keys, rows)
        return np.where(rows < moment, rows, OOV_ID)

    @property
    def moment(self) -> int:
        return self.row_count

    def begin_epoch(self) -> None:
        self.refused = 0

    def rewind(self, moment: int) -> None:
        """Forgets the keys that came later."""
        if moment < self.row_count:
            self.set_keys(self.read_keys(moment))

    def read_keys(self, moment: int) -> np.ndarray:
        """Returns a copy of the keys of the rows from 2 on, int64."""
        return self._keys[FIRST_ROW:moment].copy()

    def set_keys(self, keys: np.ndarray, history: Mapping[str, np.ndarray] | None = None) -> None:
        """Forgets all keys and gives rows from 2 on to others; a history is of no account.

        Raises:
            ValueError: A key occurs twice or is 0, or there are more than `max_rows`.
        """
        keys = np.ascontiguousarray(keys, np.int64)
        slots = MIN_SLOTS
        while slots * _FILLED // _OF < len(keys) + FIRST_ROW:
            slots *= 2
        if len(keys) + FIRST_ROW > self._most:
            self._clear(MIN_SLOTS)
            raise ValueError(f"{len(keys):,} keys, and max_rows is {self.max_rows:,}")
        self._place(keys, slots)
        if self.row_count != len(keys) + FIRST_ROW:
            self._clear(MIN_SLOTS)
            raise ValueError("a key occurs twice, or is that of padding")

    def read_state(self, moment: int) -> dict[str, np.ndarray]:
        return {SAVED_KEYS: self.read_keys(moment)}

    def set_state(self, state: Mapping[str, np.ndarray]) -> None:
        self.set_keys(state[SAVED_KEYS])

    def describe(self, moment: int) -> dict[str, int]:
        refused = {"refused": self.refused} if self.refused else {}
        return {"keys": moment - FIRST_ROW, **refused}

    def _clear(self, slots: int) -> None:
        self._slots = np.zeros((slots, 2), np.int64)  # key, row; row 0 marks an empty slot
        self._keys = np.zeros(slots * _FILLED // _OF, np.int64)  # by row
        self.row_count = FIRST_ROW

    def _place(self, keys: np.ndarray, slots: int) -> None:
        self._clear(slots)
        rows = np.empty(len(keys), np.int64)
        _, self.row_count, _ = _map_keys(
            self._slots, self._keys, FIRST_ROW, self._most, keys, rows, 0
        )


def pack_meta(rows: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Returns rows and counts of occurrences in one number each, int64; 0 stands for no record."""
    return counts.astype(np.int64) << _ROW_BITS | rows.astype(np.int64)


def unpack_meta(meta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return meta & _ROW, meta >> _ROW_BITS


class KeyRecords:
    """Records by key; a record `[key, time, meta]` is a row of an int64 array."""

    def __init__(self) -> None:
        self._slots = np.zeros((MIN_SLOTS, 3), np.int64)
        self._used = 0

    def __len__(self) -> int:
        return self._used

    @property
    def bytes(self) -> int:
        return self._slots.nbytes

    def copy(self) -> KeyRecords:
        other = KeyRecords()
        other._slots, other._used = self._slots.copy(), self._used
        return other

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Returns the meta of keys, int64 `[n]`; 0 where there is no record."""
        meta = np.empty(len(keys), np.int64)
        _find(self._slots, keys, meta)
        return meta

    def touch(self, found: DistinctKeys) -> tuple[np.ndarray, np.ndarray]:
        """Counts the occurrences of keys that have a record; a record's time never goes back.

        Returns the records as they were, with meta 0 where there was none, and as they are; those
        of further keys have row 0. Both are int64 `[n, 3]`.
        """
        before, after = (np.empty((len(found.keys), 3), np.int64) for _ in range(2))
        _touch(self._slots, found.keys, found.occurrences, found.times, before, after)
        return before, after

    def put(self, records: np.ndarray) -> None:
        """Sets or adds records, int64 `[n, 3]`, each with a row; those with meta 0 are removed."""
        gone = records[:, META] == 0
        if gone.any():
            self.remove(np.ascontiguousarray(records[gone, KEY]))
            records = records[~gone]
        self._reserve(self._used + len(records))
        self._used += _put(self._slots, np.ascontiguousarray(records))

    def remove(self, keys: np.ndarray) -> None:
        self._used -= _remove(self._slots, keys)

    def select(self, hashes: tuple[int, int], before: int, below: int) -> np.ndarray:
        """Returns records of a range of hashes, earlier than `before` or rarer than `below`."""
        low, high = hashes
        if low >= high:
            return np.empty((0, 3), np.int64)
        return self._slots[_select(self._slots, low, high, before, below)]

    def read_all(self) -> np.ndarray:
        """Returns a copy of all records, int64 `[n, 3]`."""
        return self._slots[self._slots[:, META] != 0]

    def read_admitted(self, busy: np.ndarray) -> np.ndarray:
        """Returns a copy of the records of keys with a row, but for some rows, int64 `[n, 3]`."""
        records = self.read_all()
        rows = records[:, META] & _ROW
        return records[(rows > WAITING) & ~np.isin(rows, busy)]

    def set_times(self, time: int) -> None:
        self._slots[self._slots[:, META] != 0, TIME] = time

    def _reserve(self, count: int) -> None:
        size = len(self._slots)
        while size * _RECORDS // _OF_SLOTS <= count:
            size += size // 2
        if size > len(self._slots):
            slots = np.zeros((size, 3), np.int64)
            _move(self._slots, slots)
            self._slots = slots


class UsedRows:
    """Which rows of a matrix are taken; the lowest one that is not is given out first."""

    def __init__(self, most: int) -> None:
        self._most, self._lowest, self.count = most, 0, 0
        self._taken = np.zeros(MIN_SLOTS, np.bool_)

    @property
    def bytes(self) -> int:
        return self._taken.nbytes

    @property
    def left(self) -> int:
        return self._most - self.count

    def take(self, count: int) -> np.ndarray:
        """Takes rows, the lowest ones first, int64 `[count]`; so many must be left."""
        while len(self._taken) < self.count + count:
            self._taken = np.concatenate([self._taken, np.zeros_like(self._taken)])
        rows = np.empty(count, np.int64)
        self._lowest = _take(self._taken, self._lowest, rows)
        self.count += count
        return rows

    def give_back(self, rows: np.ndarray) -> None:
        """Frees rows that are taken."""
        self._taken[rows] = False
        self.count -= len(rows)
        self._lowest = min(self._lowest, int(rows.min(initial=self._lowest)))

    def set_to(self, rows: np.ndarray) -> None:
        """Frees all rows but these, each of which is named once."""
        self._taken = np.zeros(max(MIN_SLOTS, int(rows.max(initial=0)) + 1), np.bool_)
        self._taken[rows] = True
        self._lowest, self.count = 0, len(rows)


class DistinctKeys:
    """The keys of a batch, each once, in order of arrival; key 0 is none of them where it pads.

    `occurrences` say how often each occurs, `times` when last.
    """

    def __init__(
        self, keys: np.ndarray, times: np.ndarray | int, *, has_padding: bool = True
    ) -> None:
        keys = np.ascontiguousarray(keys, np.int64)
        slots = 1 << max(4, int(2 * len(keys)).bit_length())
        found = np.empty((3, len(keys)), np.int64)
        self._positions = np.empty(len(keys), np.int32)
        timed = not isinstance(times, int)
        given = np.ascontiguousarray(times, np.int64) if timed else keys
        scratch = np.zeros(slots, np.int32)
        count = _find_distinct(keys, given, timed, has_padding, scratch, found, self._positions)
        self.keys, self.occurrences, self.times = (part[:count] for part in found)
        if isinstance(times, int):
            self.times[:] = times

    def spread(self, rows: np.ndarray) -> np.ndarray:
        """Returns the row of each key of the batch, given each distinct one's; padding's is 0."""
        spread = np.empty(len(self._positions), np.int64)
        _spread(rows, self._positions, spread)
        return spread


def draw_occurrences(
    keys: np.ndarray, occurrences: np.ndarray, stream: int, probability: float
) -> np.ndarray:
    """Returns of which keys at least one occurrence is drawn, bool `[n]`.

    A function of the stream, 64 bits, the key and the number of the occurrence alone.
    """
    drawn = np.empty(len(keys), np.bool_)
    _draw(keys, occurrences, np.uint64(stream), probability, drawn)
    return drawn


@inlined
def mix_key(key):  # type: ignore[no-untyped-def]
    """The finalizer of MurmurHash3 (Appleby 2011): every bit of the key moves every bit."""
    mixed = np.uint64(key)
    mixed = (mixed ^ (mixed >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    mixed = (mixed ^ (mixed >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return mixed ^ (mixed >> np.uint64(33))


@inlined
def _search_row(slots, key, mask):  # type: ignore[no-untyped-def]
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
        slot = _search_row(slots, key, mask)
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
            rows[i] = max(slots[_search_row(slots, keys[i], mask), 1], OOV_ID)


@inlined
def _hash_key(key):  # type: ignore[no-untyped-def]
    return np.int64(mix_key(key) >> np.uint64(32))


@inlined
def _first_slot(key, size):  # type: ignore[no-untyped-def]
    """Slots in the order of hashes, for any number of them (Lemire 2019, "Fast random integer")."""
    return np.int64((np.uint64(_hash_key(key)) * np.uint64(size)) >> np.uint64(32))


@inlined
def _search(slots, key):  # type: ignore[no-untyped-def]
    """The slot that a key is in, or the empty one where it would go."""
    size = len(slots)
    slot = _first_slot(key, size)
    while slots[slot, 2] != 0 and slots[slot, 0] != key:
        slot += 1
        if slot == size:
            slot = 0
    return slot


@kernel
def _find(slots, keys, meta):  # type: ignore[no-untyped-def]
    for i in range(len(keys)):
        meta[i] = slots[_search(slots, keys[i]), 2]


@kernel
def _touch(slots, keys, occurrences, times, before, after):  # type: ignore[no-untyped-def]
    for i in range(len(keys)):
        slot = _search(slots, keys[i])
        time, known, count = times[i], slots[slot, 2], occurrences[i]
        before[i, 0], before[i, 1], before[i, 2] = keys[i], slots[slot, 1], known
        if known != 0:
            count, time = count + (known >> _ROW_BITS), max(time, slots[slot, 1])
        known = (min(count, MOST_OCCURRENCES) << _ROW_BITS) | (known & _ROW)
        after[i, 0], after[i, 1], after[i, 2] = keys[i], time, known
        if before[i, 2] != 0:
            slots[slot, 1], slots[slot, 2] = time, known


@kernel
def _put(slots, records):  # type: ignore[no-untyped-def]
    added = 0
    for i in range(len(records)):
        slot = _search(slots, records[i, 0])
        if slots[slot, 2] == 0:
            added += 1
        for j in range(3):
            slots[slot, j] = records[i, j]
    return added


@kernel
def _remove(slots, keys):  # type: ignore[no-untyped-def]
    """Records behind a gap move into it, as far as they may (Knuth, volume 3, algorithm 6.4R)."""
    size, removed = len(slots), 0
    for i in range(len(keys)):
        gap = _search(slots, keys[i])
        if slots[gap, 2] == 0:
            continue
        removed += 1
        slot = gap
        while True:
            slot = slot + 1 if slot + 1 < size else 0
            if slots[slot, 2] == 0:
                break
            first = _first_slot(slots[slot, 0], size)
            # How far a record is from where its search starts, and how far the gap is behind it.
            if (slot - first) % size >= (slot - gap) % size:
                for j in range(3):
                    slots[gap, j] = slots[slot, j]
                gap = slot
        for j in range(3):
            slots[gap, j] = 0
    return removed


@kernel
def _move(slots, others):  # type: ignore[no-untyped-def]
    for i in range(len(slots)):
        if slots[i, 2] != 0:
            slot = _search(others, slots[i, 0])
            for j in range(3):
                others[slot, j] = slots[i, j]


@kernel
def _select(slots, low, high, before, below):  # type: ignore[no-untyped-def]
    """Slots of the records; the last ones may lie behind the stretch of their hashes."""
    size, found = len(slots), 0
    first = np.int64((np.uint64(low) * np.uint64(size)) >> np.uint64(32))
    last = np.int64((np.uint64(high - 1) * np.uint64(size)) >> np.uint64(32))
    chosen = np.empty(1024, np.int64)
    for i in range(size):
        slot = first + i
        if slot >= size:
            slot -= size
        meta = slots[slot, 2]
        if meta == 0:
            if first + i > last:
                break
            continue
        if slots[slot, 1] >= before and (meta >> _ROW_BITS) >= below:
            continue
        if not low <= _hash_key(slots[slot, 0]) < high:
            continue
        if found == len(chosen):
            chosen = np.concatenate((chosen, np.empty_like(chosen)))
        chosen[found] = slot
        found += 1
    return chosen[:found]


@kernel
def _take(taken, lowest, rows):  # type: ignore[no-untyped-def]
    for i in range(len(rows)):
        while taken[lowest]:
            lowest += 1
        taken[lowest], rows[i] = True, lowest
    return lowest


@kernel
def _find_distinct(  # type: ignore[no-untyped-def]
    keys, times, timed, has_padding, scratch, found, positions
):
    mask, count = len(scratch) - 1, 0
    for i in range(len(keys)):
        key = keys[i]
        if has_padding and key == PAD_ID:
            positions[i] = -1
            continue
        slot = np.int64(mix_key(key) & np.uint64(mask))
        while scratch[slot] != 0 and found[0, scratch[slot] - 1] != key:
            slot = (slot + 1) & mask
        if scratch[slot] == 0:
            found[0, count], found[1, count], found[2, count] = key, 0, times[i]
            count += 1
            scratch[slot] = count
        number = scratch[slot] - 1
        found[1, number] += 1
        if timed and times[i] > found[2, number]:
            found[2, number] = times[i]
        positions[i] = number
    return count


@kernel
def _spread(rows, positions, spread):  # type: ignore[no-untyped-def]
    for i in range(len(positions)):
        spread[i] = PAD_ID if positions[i] < 0 else rows[positions[i]]


@kernel
def _draw(keys, occurrences, stream, probability, drawn):  # type: ignore[no-untyped-def]
    golden = np.uint64(0x9E3779B97F4A7C15)
    for i in range(len(keys)):
        state = mix_key(mix_key(stream + golden) ^ np.uint64(keys[i]))
        drawn[i] = False
        for _ in range(occurrences[i]):
            state += golden
            if np.float64(np.int64(mix_key(state) >> np.uint64(11))) * 2.0**-53 < probability:
                drawn[i] = True
                break

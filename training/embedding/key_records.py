"""Records of keys in host memory: row, occurrences and time of the last one, by open addressing.

A record takes 24 bytes, in one array: the key, the time, and row and count in 32 bits each. Where
a record lies follows the order of the keys' hashes, so a range of hashes is a stretch of memory:
what examines all keys little by little reads one stretch after the other.
"""

from __future__ import annotations

import numpy as np

from conf.schema import PAD_ID
from conf.training.tables import MOST_OCCURRENCES
from etl.tfrecord.reading import inlined, kernel
from training.embedding.key_index import mix_key

MIN_SLOTS = 1 << 10
HASHES = 1 << 32
"""Hashes of keys are below."""
KEY, TIME, META = 0, 1, 2
WAITING = 1
"""Row of a key that is counted and has no row yet."""
_ROW_BITS = np.int64(32)
_ROW = np.int64(0xFFFFFFFF)
# Four of five slots are filled at most; memory then grows by half.
_FILLED, _OF = 4, 5
_WORD = 64


def pack_meta(rows: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Returns rows and counts of occurrences in one number each, int64; 0 stands for no record."""
    return counts.astype(np.int64) << _ROW_BITS | rows.astype(np.int64)


def unpack_meta(meta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows and counts, int64."""
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
        """Memory that they take."""
        return self._slots.nbytes

    def copy(self) -> KeyRecords:
        """Returns records that changes of these do not reach."""
        other = KeyRecords()
        other._slots, other._used = self._slots.copy(), self._used
        return other

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Returns the meta of keys, int64 `[n]`; 0 where there is no record."""
        meta = np.empty(len(keys), np.int64)
        _find(self._slots, keys, meta)
        return meta

    def read(self, key: int) -> np.ndarray | None:
        """Returns the record of a key, or None."""
        record = np.empty((1, 3), np.int64)
        _read(self._slots, np.array([key], np.int64), record)
        return record[0] if record[0, META] else None

    def touch(
        self, keys: np.ndarray, occurrences: np.ndarray, times: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Counts occurrences of the keys that have a record.

        Args:
            keys: int64 `[n]`, each once.
            occurrences: Of each, int64 `[n]`.
            times: Latest time of each, int64 `[n]`; a record's time never goes back.

        Returns:
            The records as they were, int64 `[n, 3]` with meta 0 where there was none, and the
            meta of all keys as it is.
        """
        before, meta = np.empty((len(keys), 3), np.int64), np.empty(len(keys), np.int64)
        _touch(self._slots, keys, occurrences, times, before, meta)
        return before, meta

    def put(self, records: np.ndarray) -> None:
        """Sets or adds records, int64 `[n, 3]`, each with a row; those with meta 0 are removed."""
        gone = records[:, META] == 0
        if gone.any():
            self.remove(np.ascontiguousarray(records[gone, KEY]))
            records = records[~gone]
        self._reserve(self._used + len(records))
        self._used += _put(self._slots, np.ascontiguousarray(records))

    def remove(self, keys: np.ndarray) -> None:
        """Removes the records of keys, where there are any."""
        self._used -= _remove(self._slots, keys)

    def select(self, hashes: tuple[int, int], before: int, below: int) -> np.ndarray:
        """Returns records, int64 `[n, 3]`, of a range of hashes, by time or by count.

        Args:
            hashes: First hash, and the one behind the last.
            before: Records of an earlier time are returned.
            below: Those of fewer occurrences are, too.
        """
        low, high = hashes
        if low >= high:
            return np.empty((0, 3), np.int64)
        return self._slots[_select(self._slots, low, high, before, below)]

    def read_all(self) -> np.ndarray:
        """Returns a copy of all records, int64 `[n, 3]`."""
        return self._slots[self._slots[:, META] != 0]

    def read_admitted(self, busy: np.ndarray) -> np.ndarray:
        """Returns a copy of the records of keys with a row, but for some rows, int64 `[n, 3]`."""
        busy = busy[busy > WAITING]
        words = np.zeros(int(busy.max(initial=0)) // _WORD + 1, np.uint64)
        _mark(words, busy)
        return self._slots[_select_admitted(self._slots, words)]

    def set_times(self, time: int) -> None:
        """Sets the time of all records."""
        self._slots[self._slots[:, META] != 0, TIME] = time

    def _reserve(self, count: int) -> None:
        size = len(self._slots)
        while size * _FILLED // _OF <= count:
            size += size // 2
        if size > len(self._slots):
            slots = np.zeros((size, 3), np.int64)
            _move(self._slots, slots)
            self._slots = slots


class UsedRows:
    """Which rows of a matrix are taken; the lowest one that is not is given out first.

    Args:
        most: Rows that may be taken at once, at most.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._words = np.zeros(MIN_SLOTS // _WORD, np.uint64)
        self._lowest = 0
        self.count = 0

    @property
    def bytes(self) -> int:
        """Memory that it takes."""
        return self._words.nbytes

    @property
    def left(self) -> int:
        """Rows that may still be taken."""
        return self._most - self.count

    def take(self, count: int) -> np.ndarray:
        """Takes rows, the lowest ones first, int64 `[count]`; so many must be left."""
        wanted = self.count + count
        while len(self._words) * _WORD < wanted:
            self._words = np.concatenate([self._words, np.zeros_like(self._words)])
        rows = np.empty(count, np.int64)
        self._lowest = _take(self._words, self._lowest, rows)
        self.count += count
        return rows

    def give_back(self, rows: np.ndarray) -> None:
        """Frees rows that are taken."""
        _give_back(self._words, rows)
        self.count -= len(rows)
        if len(rows):
            self._lowest = min(self._lowest, int(rows.min()) // _WORD)

    def set_to(self, rows: np.ndarray) -> None:
        """Frees all rows but these, each of which is named once."""
        words = max(len(self._words), int(rows.max(initial=0)) // _WORD + 1)
        self._words, self._lowest = np.zeros(words, np.uint64), 0
        _mark(self._words, rows)
        self.count = len(rows)


class DistinctKeys:
    """The keys of a batch, each once, in order of arrival; key 0 is none of them where it pads.

    Args:
        keys: int64 `[n]`.
        times: Time of each, int64 `[n]`, or one for all.
        has_padding: Whether key 0 is padding.

    Attributes:
        keys: int64 `[distinct]`.
        occurrences: How often each occurs, int64 `[distinct]`.
        times: Latest time of each, int64 `[distinct]`.
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
        """Returns the row of each key of the batch, int64 `[n]`, that of padding 0.

        Args:
            rows: Row of each distinct key.
        """
        spread = np.empty(len(self._positions), np.int64)
        _spread(rows, self._positions, spread)
        return spread


def draw_occurrences(
    keys: np.ndarray, occurrences: np.ndarray, stream: int, probability: float
) -> np.ndarray:
    """Returns of which keys at least one occurrence is drawn, bool `[n]`.

    A function of stream, key and number of the occurrence alone.

    Args:
        keys: int64 `[n]`.
        occurrences: How often each is drawn.
        stream: What else the draws depend on, 64 bits.
        probability: That of each draw.
    """
    drawn = np.empty(len(keys), np.bool_)
    _draw(keys, occurrences, np.uint64(stream), probability, drawn)
    return drawn


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
def _read(slots, keys, records):  # type: ignore[no-untyped-def]
    for i in range(len(keys)):
        records[i] = slots[_search(slots, keys[i])]


@kernel
def _touch(slots, keys, occurrences, times, before, meta):  # type: ignore[no-untyped-def]
    for i in range(len(keys)):
        slot = _search(slots, keys[i])
        known = slots[slot, 2]
        before[i, 0], before[i, 1], before[i, 2] = keys[i], slots[slot, 1], known
        if known != 0:
            count = min((known >> _ROW_BITS) + occurrences[i], MOST_OCCURRENCES)
            slots[slot, 1] = max(slots[slot, 1], times[i])
            known = (count << _ROW_BITS) | (known & _ROW)
            slots[slot, 2] = known
        meta[i] = known


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
def _select_admitted(slots, busy):  # type: ignore[no-untyped-def]
    chosen, found = np.empty(len(slots), np.int64), 0
    for slot in range(len(slots)):
        row = slots[slot, 2] & _ROW
        if row <= WAITING:
            continue
        if row >> 6 < len(busy) and (busy[row >> 6] >> np.uint64(row & 63)) & np.uint64(1):
            continue
        chosen[found] = slot
        found += 1
    return chosen[:found]


@kernel
def _take(words, lowest, rows):  # type: ignore[no-untyped-def]
    full, word = np.uint64(0xFFFFFFFFFFFFFFFF), lowest
    for i in range(len(rows)):
        while words[word] == full:
            word += 1
        bit = np.int64(0)
        while (words[word] >> np.uint64(bit)) & np.uint64(1):
            bit += 1
        words[word] |= np.uint64(1) << np.uint64(bit)
        rows[i] = word * 64 + bit
    return word


@kernel
def _give_back(words, rows):  # type: ignore[no-untyped-def]
    for i in range(len(rows)):
        words[rows[i] >> 6] &= ~(np.uint64(1) << np.uint64(rows[i] & 63))


@kernel
def _mark(words, rows):  # type: ignore[no-untyped-def]
    for i in range(len(rows)):
        words[rows[i] >> 6] |= np.uint64(1) << np.uint64(rows[i] & 63)


@kernel
def _find_distinct(keys, times, timed, has_padding, scratch, found, positions):  # type: ignore[no-untyped-def]
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

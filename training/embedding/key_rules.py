"""Rules of admission and eviction, and the index of keys that follows them batch by batch.

The state after a batch is a function of the batches up to there and of nothing else: neither of
where records lie in memory nor of how far the input has read ahead. What the last batches have
changed can be taken back, so the state at any step that is still ahead of the input is there.
"""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import numpy as np

from conf.errors import InputDataError
from conf.key_lists import read_key_lines, refuse_twice
from conf.local_paths import local_path
from conf.schema import OOV_ID, PAD_ID
from conf.training.tables import (
    MOST_OCCURRENCES,
    AdmissionConfig,
    DynamicTableConfig,
    EvictionConfig,
)
from training.embedding.key_index import FIRST_ROW
from training.embedding.key_records import (
    HASHES,
    KEY,
    META,
    TIME,
    WAITING,
    DistinctKeys,
    KeyRecords,
    UsedRows,
    draw_occurrences,
    pack_meta,
    unpack_meta,
)

MOST_ROWS = (1 << 32) - 1 - FIRST_ROW
"""Rows of a table with rules: a record holds the row in 32 bits."""
EARLIEST = np.iinfo(np.int64).min
MOST_DIGITS = 40
"""Of a key in a file, zeros before it among them."""


@dataclass(frozen=True)
class KeyRules:
    """Rules of a table: which keys get rows, and which lose them.

    Attributes:
        table: Name of the table.
        seed: The run's seed; with the table's name it fixes draws.
        max_rows: Keys that have a row at a time, at most; None: no limit.
        admission: When a key gets a row; None: when it is met.
        eviction: When it loses it; None: never.
    """

    table: str
    seed: int
    max_rows: int | None = None
    admission: AdmissionConfig | None = None
    eviction: EvictionConfig | None = None

    @classmethod
    def read(cls, table: str, config: DynamicTableConfig, seed: int) -> KeyRules | None:
        """Returns the rules of a table's config; None: it has none."""
        if config.admission is None and config.eviction is None:
            return None
        return cls(table, seed, config.max_rows, config.admission, config.eviction)

    @property
    def timestamp(self) -> str | None:
        """Feature whose values are times; None: time is steps."""
        return None if self.eviction is None else self.eviction.timestamp

    @property
    def least_count(self) -> int:
        """Occurrences that a key needs for a row."""
        return 1 if self.admission is None else self.admission.least_occurrences

    @property
    def kept_count(self) -> int:
        """Occurrences that a key needs for a row, and to keep it where eviction counts them."""
        kept_from = None if self.eviction is None else self.eviction.min_count
        return max(self.least_count, kept_from or 0)

    def read_allowed(self) -> np.ndarray | None:
        """Returns the keys of the list of those that get a row; None: there is no list.

        Raises:
            InputDataError: The file cannot be read, a line is no key, or a key stands twice.
        """
        if self.admission is None or self.admission.allow_list is None:
            return None
        return read_key_list(self.admission.allow_list)

    def build_stream(self, batches: int) -> int:
        """Returns what the draws of a batch's occurrences depend on, beside the key: 64 bits."""
        table = zlib.crc32(self.table.encode())
        return (self.seed << 32 ^ table ^ batches * 0x9E3779B97F4A7C15) % (1 << 64)


def read_key_list(path: str) -> np.ndarray:
    """Reads keys from a file: a whole number of 64 bits on each line.

    Returns:
        int64 `[n]`, in the file's order, each once.

    Raises:
        InputDataError: The file cannot be read, a line is no such number, or a key stands twice.
    """
    file = local_path(path)
    keys = {number: _parse_key(path, number, key) for number, key in read_key_lines(file).items()}
    refuse_twice(file, keys.items())
    return np.array(list(keys.values()), np.int64)


def _parse_key(path: str, number: int, text: str) -> int:
    digits = text.removeprefix("-") if text.startswith("-") else text.removeprefix("+")
    is_whole = digits.isascii() and digits.isdigit() and len(digits) <= MOST_DIGITS
    if is_whole and EARLIEST <= int(text) <= np.iinfo(np.int64).max:
        return int(text)
    raise InputDataError(
        "a line of the list of keys that get a row is no key",
        received=f"{path}, line {number}: {text[:80]!r}",
        allowed="one whole number of 64 bits on each line",
        fix="list the keys as the dataset holds them: of text, its hash_key",
    )


def _find_passed(now: int | None, times: np.ndarray | None, every: int) -> int | None:
    """Returns the last multiple of `every` that a batch's times pass; None: they pass none."""
    if now is None or times is None or not len(times):
        return None
    passed = int(times.max()) // every * every
    return passed if passed > now else None


@dataclass(frozen=True)
class IndexCounters:
    """What an index counts besides its records.

    Attributes:
        batches: Batches so far; time, where no feature is named.
        now: Largest time so far; None: none yet.
        rows: Rows that there is memory for, those of padding and of unknown keys included.
        admitted: Keys that got a row in this epoch.
        rejected: Lookups of keys that were not admitted, in this epoch.
        refused: Lookups of keys that got no row, as the table was full, in this epoch.
        evicted: Keys that lost their row in this epoch.
    """

    batches: int = 0
    now: int | None = None
    rows: int = FIRST_ROW
    admitted: int = 0
    rejected: int = 0
    refused: int = 0
    evicted: int = 0

    def to_array(self) -> np.ndarray:
        """Returns the numbers as checkpoints hold them, int64 `[8]`."""
        values = {**asdict(self), "now": self.now or 0, IS_TIMED: self.now is not None}
        return np.array([values[name] for name in SAVED_COUNTERS], np.int64)

    @classmethod
    def from_array(cls, values: np.ndarray) -> IndexCounters:
        """Returns what `to_array` has made an array of."""
        saved = dict(zip(SAVED_COUNTERS, map(int, values), strict=False))
        is_timed = saved.pop(IS_TIMED)
        return cls(**{name: v for name, v in saved.items() if name != "now" or is_timed})


IS_TIMED = "is_timed"
"""Whether there is a largest time."""
SAVED_COUNTERS = (
    "batches", "now", "rows", "admitted", "rejected", "refused", "evicted", IS_TIMED
)  # fmt: skip
"""What stands where in the array of a checkpoint: new ones follow at its end."""


class MappedBatch(NamedTuple):
    """Where the keys of a batch are.

    Attributes:
        rows: Row of each key, int64 `[n]`.
        row_count: Rows that there must be memory for.
        new_keys: Keys that got a row, int64 `[new]`.
        new_rows: Their rows, which other keys may have had.
        batches: Batches so far.
    """

    rows: np.ndarray
    row_count: int
    new_keys: np.ndarray
    new_rows: np.ndarray
    batches: int


class _Undo(NamedTuple):
    """What takes a batch back: the counters before it, and records as they were, in order."""

    counters: IndexCounters
    records: list[np.ndarray]


class _Rowless:
    """The keys of a batch that have no row.

    Args:
        found: The batch's keys.
        before: Their records before the batch.
        positions: Which of them have no row.
    """

    def __init__(self, found: DistinctKeys, before: np.ndarray, positions: np.ndarray) -> None:
        self.positions, before = positions, before[positions]
        self.keys, self.occurrences = found.keys[positions], found.occurrences[positions]
        counts = unpack_meta(before[:, META])[1] + self.occurrences
        self.counts = np.minimum(counts, MOST_OCCURRENCES)
        is_known, times = before[:, META] != 0, found.times[positions]
        self._times = np.where(is_known, np.maximum(before[:, TIME], times), times)

    def build_records(self, rows: np.ndarray, *, waits: bool) -> np.ndarray:
        """Returns the records of the keys after the batch, int64 `[n, 3]`.

        Args:
            rows: Row of each of the batch's keys.
            waits: Whether keys without a row are counted; otherwise they are left out.
        """
        own = np.maximum(rows[self.positions], WAITING)
        records = np.stack([self.keys, self._times, pack_meta(own, self.counts)], axis=1)
        return records if waits else records[own >= FIRST_ROW]


class RuledIndex:
    """Keys with rows, occurrences and times, under rules.

    A batch goes through it thus: keys that are due are evicted; occurrences are counted; keys that
    qualify get the lowest rows that are free, in order of arrival.

    Args:
        rules: The rules.

    Attributes:
        rules: The rules.
        records: The records.
        counters: What it holds besides them.
    """

    def __init__(self, rules: KeyRules) -> None:
        self.rules, self.records, self.counters = rules, KeyRecords(), IndexCounters()
        self._allowed: np.ndarray | None = None
        self._most = MOST_ROWS if rules.max_rows is None else min(rules.max_rows, MOST_ROWS)
        self._used = UsedRows(self._most)
        self._undo: deque[_Undo] = deque()

    @property
    def row_keys(self) -> int:
        """Keys that have a row."""
        return self._used.count

    @property
    def bytes(self) -> int:
        """Memory that it takes, what takes batches back left out."""
        return self.records.bytes + self._used.bytes

    def prepare(self) -> None:
        """Reads the list of keys that get a row, where there is one.

        Raises:
            InputDataError: As for `KeyRules.read_allowed`.
        """
        self._allowed = self.rules.read_allowed()

    def list_unmet(self, batches: int) -> tuple[int, np.ndarray]:
        """Returns how many keys the list of those that get a row has, and which have none.

        Args:
            batches: The batch after which they have none.
        """
        if self._allowed is None:
            return 0, np.empty(0, np.int64)
        rows = self.find(self._allowed, batches)
        return len(self._allowed), self._allowed[rows < FIRST_ROW]

    def begin_epoch(self) -> None:
        """Counts what happens from nothing."""
        self.counters = replace(self.counters, admitted=0, rejected=0, refused=0, evicted=0)

    def map(self, keys: np.ndarray, times: np.ndarray | None, *, is_last: bool) -> MappedBatch:
        """Counts the keys of a batch, evicts and admits, and returns where they are.

        Args:
            keys: int64 `[n]`, of any value, repeats allowed.
            times: Time of each, int64 `[n]`; None: time is steps.
            is_last: Whether it is the last batch of an epoch.
        """
        undo = _Undo(self.counters, [])
        self._undo.append(undo)
        self.counters = replace(self.counters, batches=self.counters.batches + 1)
        self._evict_due(undo, times, is_last=is_last)
        self._move_clock(times)
        distinct = DistinctKeys(keys, self.counters.batches if times is None else times)
        before, meta = self.records.touch(distinct.keys, distinct.occurrences, distinct.times)
        undo.records.append(before)
        rows, _ = unpack_meta(meta)
        new = np.flatnonzero(rows < FIRST_ROW)
        if len(new):
            self._admit(_Rowless(distinct, before, new), rows, undo)
            new = new[rows[new] >= FIRST_ROW]
        return MappedBatch(
            distinct.spread(np.maximum(rows, OOV_ID)),
            self.counters.rows,
            distinct.keys[new],
            rows[new],
            self.counters.batches,
        )

    def _move_clock(self, times: np.ndarray | None) -> None:
        now = self.counters.now
        if times is None:
            now = self.counters.batches
        elif len(times):
            latest = int(times.max())
            if now is None:  # Keys of a run that knew no times count as seen now.
                self.records.set_times(latest)
            now = latest if now is None else max(now, latest)
        self.counters = replace(self.counters, now=now)

    def _evict_due(self, undo: _Undo, times: np.ndarray | None, *, is_last: bool) -> None:
        """Forgets the keys that time or count are against, of those whose turn it is."""
        rules, counters = self.rules.eviction, self.counters
        if rules is None or (rules.every == "epoch" and not is_last):
            return
        turns = 1 if rules.every == "epoch" else rules.every
        # Of steps the batch that comes is none yet: its keys are not known to be left out of it.
        before, now = EARLIEST, counters.now if rules.timestamp else counters.batches - 1
        if rules.every_time is not None:
            turns, now = 1, _find_passed(counters.now, times, rules.every_time)
            if now is None:
                return
        turn = (counters.batches - 1) % turns
        unused = rules.unused_time or rules.unused_steps
        if unused is not None and now is not None:
            before = max(before, now - unused + 1)
        hashes = -(-turn * HASHES // turns), -(-(turn + 1) * HASHES // turns)
        self._forget(self.records.select(hashes, before, rules.min_count or 0), undo)

    def _forget(self, records: np.ndarray, undo: _Undo) -> None:
        """Removes records, frees their rows, and notes them."""
        if not len(records):
            return
        undo.records.append(records)
        rows, _ = unpack_meta(records[:, META])
        freed = rows[rows >= FIRST_ROW] - FIRST_ROW
        self._used.give_back(freed)
        self.records.remove(np.ascontiguousarray(records[:, KEY]))
        self.counters = replace(self.counters, evicted=self.counters.evicted + len(freed))

    def _admit(self, rowless: _Rowless, rows: np.ndarray, undo: _Undo) -> None:
        """Gives those keys without a row that qualify one.

        Args:
            rowless: The keys without a row.
            rows: Row of each of the batch's keys; receives the new ones.
            undo: Receives the records that make room.
        """
        new, occurrences = rowless.positions, rowless.occurrences
        qualify = self._qualify(rowless)
        wanted = np.flatnonzero(qualify)
        if len(wanted) > self._used.left:
            self._make_room(len(wanted) - self._used.left, rows, undo)
        given = wanted[: self._used.left]
        rows[new[given]] = self._used.take(len(given)) + FIRST_ROW
        self.records.put(rowless.build_records(rows, waits=self.rules.least_count > 1))
        wanted_occurrences = int(occurrences[wanted].sum())
        counters = self.counters
        self.counters = replace(
            counters,
            rows=max(counters.rows, int(rows[new].max()) + 1),
            admitted=counters.admitted + len(given),
            refused=counters.refused + wanted_occurrences - int(occurrences[given].sum()),
            rejected=counters.rejected + int(occurrences.sum()) - wanted_occurrences,
        )

    def _qualify(self, rowless: _Rowless) -> np.ndarray:
        """Returns which keys get a row, if one is free."""
        if self._allowed is not None:
            return np.isin(rowless.keys, self._allowed)
        probability = self.rules.admission and self.rules.admission.probability
        if probability:
            stream = self.rules.build_stream(self.counters.batches)
            return draw_occurrences(rowless.keys, rowless.occurrences, stream, probability)
        return rowless.counts >= self.rules.least_count

    def _make_room(self, need: int, rows: np.ndarray, undo: _Undo) -> None:
        """Forgets keys that are not in the batch, more than are needed: it costs a look at all."""
        rules = self.rules.eviction
        if rules is None or rules.when_full is None:
            return
        records = self.records.read_admitted(rows)
        _, counts = unpack_meta(records[:, META])
        order = [records[:, TIME], counts]
        if rules.when_full == "least_frequent":
            order.reverse()
        count = max(need, int(rules.share * self._most))
        self._forget(records[find_smallest([*order, records[:, KEY]], count)], undo)

    def trim(self, batches: int) -> None:
        """Forgets how to take the batches up to one back."""
        while self._undo and self._undo[0].counters.batches < batches:
            self._undo.popleft()

    def rewind(self, batches: int) -> None:
        """Takes back all batches behind one."""
        if self.counters.batches == batches:
            return
        while self.counters.batches > batches:
            undo = self._undo.pop()
            for records in reversed(undo.records):
                self.records.put(records)
            self.counters = undo.counters
        rows, _ = unpack_meta(self.records.read_all()[:, META])
        self._used.set_to(rows[rows >= FIRST_ROW] - FIRST_ROW)

    def read(self, batches: int) -> tuple[np.ndarray, IndexCounters]:
        """Returns all records, int64 `[n, 3]`, and the counters, as they were after a batch."""
        if batches == self.counters.batches:
            return self.records.read_all(), self.counters
        records, counters = self.records.copy(), self.counters
        for undo in reversed(self._undo):
            if undo.counters.batches < batches:
                break
            for changed in reversed(undo.records):
                records.put(changed)
            counters = undo.counters
        return records.read_all(), counters

    def find(self, keys: np.ndarray, batches: int) -> np.ndarray:
        """Returns the rows of keys as they were after a batch: 1 for those without one.

        Args:
            keys: int64 `[n]`.
            batches: The batch.
        """
        meta = self.records.find(np.ascontiguousarray(keys, np.int64))
        later = [r for undo in self._undo if undo.counters.batches >= batches for r in undo.records]
        changes = np.concatenate([np.empty((0, 3), np.int64), *later])
        if len(changes):  # The first change of a key behind the batch holds what it was there.
            changed, first = np.unique(changes[:, KEY], return_index=True)
            at = np.minimum(np.searchsorted(changed, keys), len(changed) - 1)
            meta = np.where(changed[at] == keys, changes[first[at], META], meta)
        rows, _ = unpack_meta(meta)
        return np.where(keys == PAD_ID, PAD_ID, np.maximum(rows, OOV_ID))

    def set_to(self, records: np.ndarray, counters: IndexCounters) -> None:
        """Forgets all and takes records and a counters over.

        Raises:
            ValueError: A key or a row occurs twice, a key is 0, a row is beyond memory or limit.
        """
        rows, _ = unpack_meta(records[:, META])
        taken = rows[rows >= FIRST_ROW]
        if len(taken) > self._most:
            raise ValueError(f"{len(taken):,} keys, and max_rows is {self.rules.max_rows:,}")
        fresh = KeyRecords()
        fresh.put(records)
        if len(fresh) != len(records) or (records[:, KEY] == PAD_ID).any():
            raise ValueError("a key occurs twice, or is that of padding")
        self.records, self.counters = fresh, counters
        self._used.set_to(taken - FIRST_ROW)
        self._undo.clear()


def find_smallest(columns: list[np.ndarray], count: int) -> np.ndarray:
    """Returns where the smallest rows of a table are, by its columns in order; ties are decided.

    Args:
        columns: Numbers `[n]` each; no two rows are equal in all of them.
        count: How many rows; all where there are fewer.
    """
    left = np.arange(len(columns[0]))
    chosen = []
    for column in columns:
        if count >= len(left):
            break
        values = column[left]
        most = np.partition(values, count)[count]
        chosen.append(left[values < most])
        left, count = left[values == most], count - len(chosen[-1])
    return np.concatenate([*chosen, left[:count]])

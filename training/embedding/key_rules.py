"""Rules of admission and eviction, and the index of keys that follows them batch by batch.

The state after a batch is a function of the batches up to there and of nothing else: neither of
where records lie in memory nor of how far the input has read ahead. What the last batches have
changed can be taken back, so the state at any step that is still ahead of the input is there.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from conf.errors import InputDataError
from conf.key_lists import describe_unmatched, read_key_lines, refuse_twice
from conf.local_paths import local_path
from conf.schema import OOV_ID, PAD_ID
from conf.training.tables import AdmissionConfig, DynamicTableConfig
from training.embedding.key_index import (
    FIRST_ROW,
    HASHES,
    KEY,
    META,
    SAVED_KEYS,
    TIME,
    WAITING,
    DistinctKeys,
    KeyRecords,
    MappedBatch,
    UsedRows,
    draw_occurrences,
    pack_meta,
    unpack_meta,
)

MOST_ROWS = (1 << 32) - 1 - FIRST_ROW
"""Rows of a table with rules: a record holds the row in 32 bits."""
EARLIEST = np.iinfo(np.int64).min
FREED_SHARE = 0.05
"""Share of `max_rows` that a full table frees at a time."""
COUNTS, WAITING_KEYS, COUNTERS = "counts", "waiting", "moment"  # As checkpoints name them.
TIMES, STEPS = "times", "steps"
"""What the times of keys are called: values of a feature, or steps."""


class IndexCounters(NamedTuple):
    """What an index with rules counts besides its records.

    `now` is the largest time so far, if `is_timed`, and `rows` all that there is memory for. What
    happened in this epoch: keys that were admitted and evicted, lookups of keys that were not
    admitted (`rejected`) or found the table full (`refused`).
    """

    batches: int = 0
    now: int = 0
    rows: int = FIRST_ROW
    admitted: int = 0
    rejected: int = 0
    refused: int = 0
    evicted: int = 0
    is_timed: int = 0


class _Undo(NamedTuple):
    """What takes a batch back: the counters before it, and records as they were, in order."""

    counters: IndexCounters
    records: list[np.ndarray]


class RuledIndex:
    """Keys with rows, occurrences and times, under the rules of a table.

    A batch goes through it thus: keys that are due are evicted; occurrences are counted; keys that
    qualify get the lowest rows that are free, in order of arrival. A moment of it is a number of
    batches.
    """

    def __init__(self, table: str, config: DynamicTableConfig, seed: int) -> None:
        self.table, self.max_rows, self._seed = table, config.max_rows, seed
        self.admission = config.admission or AdmissionConfig(count=1)
        self.eviction = config.eviction
        self.records, self.counters = KeyRecords(), IndexCounters()
        self._allowed: np.ndarray | None = None
        self._most = min(config.max_rows or MOST_ROWS, MOST_ROWS)
        self._used = UsedRows(self._most)
        self._undo: deque[_Undo] = deque()

    @property
    def timestamp(self) -> str | None:
        """Feature whose values are times; None: time is steps."""
        return None if self.eviction is None else self.eviction.timestamp

    @property
    def clock(self) -> str:
        """What the times of keys are called in a checkpoint."""
        return STEPS if self.timestamp is None else TIMES

    @property
    def saved(self) -> tuple[str, ...]:
        return SAVED_KEYS, COUNTS, self.clock, WAITING_KEYS, COUNTERS

    @property
    def moment(self) -> int:
        return self.counters.batches

    @property
    def row_count(self) -> int:
        return self.counters.rows

    @property
    def refused(self) -> int:
        return self.counters.refused

    @property
    def bytes(self) -> int:
        return self.records.bytes + self._used.bytes

    def prepare(self) -> None:
        if self.admission.allow_list is not None:
            self._allowed = read_key_list(self.admission.allow_list)

    def begin_epoch(self) -> None:
        self.counters = self.counters._replace(admitted=0, rejected=0, refused=0, evicted=0)

    def map(
        self, keys: np.ndarray, times: np.ndarray | None = None, *, is_last: bool = False
    ) -> MappedBatch:
        """Counts the keys of a batch, evicts and admits, and returns where they are.

        Args:
            keys: int64 `[n]`, of any value, repeats allowed.
            times: Time of each, int64 `[n]`; None: time is steps.
            is_last: Whether it is the last batch of an epoch.
        """
        undo = _Undo(self.counters, [])
        self._undo.append(undo)
        self.counters = self.counters._replace(batches=self.counters.batches + 1)
        self._evict_due(undo, is_last=is_last)
        self._move_clock(times)
        distinct = DistinctKeys(keys, self.counters.batches if times is None else times)
        before, records = self.records.touch(distinct)
        undo.records.append(before)
        rows, _ = unpack_meta(records[:, META])
        new = np.flatnonzero(rows < FIRST_ROW)
        if len(new):
            rows[new] = self._admit(records[new], distinct.occurrences[new], rows, undo)
            new = new[rows[new] >= FIRST_ROW]
        return MappedBatch(
            distinct.spread(np.maximum(rows, OOV_ID)),
            self.counters.rows,
            distinct.keys[new],
            rows[new],
            self.counters.batches,
        )

    def _move_clock(self, times: np.ndarray | None) -> None:
        counters, now = self.counters, self.counters.batches
        if times is not None:
            if not len(times):
                return
            now = int(times.max())
            if not counters.is_timed:  # Keys of a run that knew no times count as seen now.
                self.records.set_times(now)
            else:
                now = max(now, counters.now)
        self.counters = counters._replace(now=now, is_timed=1)

    def _evict_due(self, undo: _Undo, *, is_last: bool) -> None:
        """Forgets the keys that time or count are against, of those whose turn it is."""
        rules, counters = self.eviction, self.counters
        if rules is None or (rules.every == "epoch" and not is_last):
            return
        turns = 1 if rules.every == "epoch" else rules.every
        turn, before = (counters.batches - 1) % turns, EARLIEST
        if rules.unused_time is not None and counters.is_timed:
            before = max(before, counters.now - rules.unused_time + 1)
        hashes = -(-turn * HASHES // turns), -(-(turn + 1) * HASHES // turns)
        self._forget(self.records.select(hashes, before, rules.min_count or 0), undo)

    def _forget(self, records: np.ndarray, undo: _Undo) -> None:
        if not len(records):
            return
        undo.records.append(records)
        rows, _ = unpack_meta(records[:, META])
        freed = rows[rows >= FIRST_ROW] - FIRST_ROW
        self._used.give_back(freed)
        self.records.remove(np.ascontiguousarray(records[:, KEY]))
        self.counters = self.counters._replace(evicted=self.counters.evicted + len(freed))

    def _admit(
        self, records: np.ndarray, occurrences: np.ndarray, busy: np.ndarray, undo: _Undo
    ) -> np.ndarray:
        """Gives those keys of a batch without a row that qualify one; returns the rows of all.

        Args:
            records: What is known of these keys, int64 `[n, 3]`.
            occurrences: How often each is in the batch.
            busy: Rows of the batch's other keys, which do not make room.
            undo: Receives the records that make room.
        """
        keys, counts = records[:, KEY], unpack_meta(records[:, META])[1]
        wanted = np.flatnonzero(self._qualify(keys, counts, occurrences))
        if len(wanted) > self._used.left:
            self._make_room(len(wanted) - self._used.left, busy, undo)
        given = wanted[: self._used.left]
        rows = np.full(len(keys), WAITING)
        rows[given] = self._used.take(len(given)) + FIRST_ROW
        records[:, META] = pack_meta(rows, counts)
        waits = self.admission.least_occurrences > 1
        self.records.put(records if waits else records[given])
        asked = int(occurrences[wanted].sum())
        counters = self.counters
        self.counters = counters._replace(
            rows=max(counters.rows, int(rows.max()) + 1),
            admitted=counters.admitted + len(given),
            refused=counters.refused + asked - int(occurrences[given].sum()),
            rejected=counters.rejected + int(occurrences.sum()) - asked,
        )
        return rows

    def _qualify(self, keys: np.ndarray, counts: np.ndarray, occurrences: np.ndarray) -> np.ndarray:
        if self._allowed is not None:
            return np.isin(keys, self._allowed)
        if self.admission.probability:
            # Draws depend on run, table, batch and key.
            table = self._seed << 32 ^ zlib.crc32(self.table.encode())
            stream = (table ^ self.counters.batches * 0x9E3779B97F4A7C15) % (1 << 64)
            return draw_occurrences(keys, occurrences, stream, self.admission.probability)
        return counts >= self.admission.least_occurrences

    def _make_room(self, need: int, busy: np.ndarray, undo: _Undo) -> None:
        """Forgets keys that are not in the batch, more than are needed: it costs a look at all."""
        if self.eviction is None or self.eviction.when_full is None:
            return
        records = self.records.read_admitted(busy)
        _, counts = unpack_meta(records[:, META])
        order = [records[:, TIME], counts]
        if self.eviction.when_full == "least_frequent":
            order.reverse()
        count = max(need, int(FREED_SHARE * self._most))
        self._forget(records[find_smallest([*order, records[:, KEY]], count)], undo)

    def trim(self, moment: int) -> None:
        """Forgets how to take the batches up to one back."""
        while self._undo and self._undo[0].counters.batches < moment:
            self._undo.popleft()

    def rewind(self, moment: int) -> None:
        """Takes back all batches behind one."""
        if self.counters.batches == moment:
            return
        while self.counters.batches > moment:
            undo = self._undo.pop()
            for records in reversed(undo.records):
                self.records.put(records)
            self.counters = undo.counters
        rows, _ = unpack_meta(self.records.read_all()[:, META])
        self._used.set_to(rows[rows >= FIRST_ROW] - FIRST_ROW)

    def read(self, moment: int) -> tuple[np.ndarray, IndexCounters]:
        """Returns all records, int64 `[n, 3]`, and the counters, as they were after a batch."""
        if moment == self.counters.batches:
            return self.records.read_all(), self.counters
        records, counters = self.records.copy(), self.counters
        for undo in reversed(self._undo):
            if undo.counters.batches < moment:
                break
            for changed in reversed(undo.records):
                records.put(changed)
            counters = undo.counters
        return records.read_all(), counters

    def find(self, keys: np.ndarray, moment: int) -> np.ndarray:
        """Returns the rows of keys, int64 `[n]`, as they were after a batch: 1 without one."""
        meta = self.records.find(np.ascontiguousarray(keys, np.int64))
        later = [r for undo in self._undo if undo.counters.batches >= moment for r in undo.records]
        changes = np.concatenate([np.empty((0, 3), np.int64), *later])
        if len(changes):  # The first change of a key behind the batch holds what it was there.
            changed, first = np.unique(changes[:, KEY], return_index=True)
            at = np.minimum(np.searchsorted(changed, keys), len(changed) - 1)
            meta = np.where(changed[at] == keys, changes[first[at], META], meta)
        rows, _ = unpack_meta(meta)
        return np.where(keys == PAD_ID, PAD_ID, np.maximum(rows, OOV_ID))

    def read_key(self, key: int) -> tuple[int, int, int] | None:
        """Returns row, occurrences and time of a key after the last batch, or None."""
        records = self.records.read_all()
        for _, time, meta in records[records[:, KEY] == key]:
            rows, counts = unpack_meta(meta)
            return int(rows), int(counts), int(time)
        return None

    def read_keys(self, moment: int) -> np.ndarray:
        """Returns the keys of the rows from 2 on, int64; 0: no key's."""
        return self.read_state(moment)[SAVED_KEYS]

    def read_state(self, moment: int) -> dict[str, np.ndarray]:
        """Returns keys, counts and times by row, the keys that wait, and the counters."""
        records, counters = self.read(moment)
        rows, counts = unpack_meta(records[:, META])
        own = rows >= FIRST_ROW
        columns = {SAVED_KEYS: records[:, KEY], COUNTS: counts, self.clock: records[:, TIME]}
        state = {name: np.zeros(counters.rows - FIRST_ROW, np.int64) for name in columns}
        for name, values in columns.items():
            state[name][rows[own] - FIRST_ROW] = values[own]
        waiting = np.stack([records[~own, KEY], records[~own, TIME], counts[~own]], axis=1)
        state[WAITING_KEYS] = waiting[np.argsort(waiting[:, 0])]
        return state | {COUNTERS: np.array(counters, np.int64)}

    def set_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Takes over what `read_state` returned; raises as `KeyIndex.set_keys` does."""
        taken = np.flatnonzero(state[SAVED_KEYS] != PAD_ID)
        if len(taken) > self._most:
            raise ValueError(f"{len(taken):,} keys, and max_rows is {self.max_rows:,}")
        columns = (state[name][taken] for name in (SAVED_KEYS, self.clock, COUNTS))
        waiting = state[WAITING_KEYS]
        keys, times, counts = (
            np.concatenate(pair) for pair in zip(columns, waiting.T, strict=True)
        )
        rows = np.concatenate([taken + FIRST_ROW, np.full(len(waiting), WAITING)])
        fresh = KeyRecords()
        fresh.put(np.stack([keys, times, pack_meta(rows, counts)], axis=1))
        if len(fresh) != len(keys) or (keys == PAD_ID).any():
            raise ValueError("a key occurs twice, or is that of padding")
        self.records, self.counters = fresh, IndexCounters(*map(int, state[COUNTERS]))
        self._used.set_to(taken)
        self._undo.clear()

    def set_keys(self, keys: np.ndarray, history: Mapping[str, np.ndarray] | None = None) -> None:
        """Gives rows from 2 on to keys, int64 `[n]`, and forgets all others.

        Keys without a history have qualified, and their times are not known; eviction by count
        spares them as it does keys that have just reached it. A history holds counts and times of
        these keys in an earlier run, the keys that waited, and the counters, by the names of
        `read_state`; times of another clock are left out.
        """
        counters = IndexCounters(rows=len(keys) + FIRST_ROW)
        kept_from = None if self.eviction is None else self.eviction.min_count
        least = max(self.admission.least_occurrences, kept_from or 0)
        counts, times = np.full(len(keys), least), np.zeros(len(keys), np.int64)
        waiting = np.empty((0, 3), np.int64)
        if history:
            before = IndexCounters(*map(int, history[COUNTERS]))
            counts, waiting = history[COUNTS], history[WAITING_KEYS].copy()
            if self.clock not in history:
                waiting[:, 1] = 0
            elif self.timestamp is None:  # Steps are counted from the start of a run.
                times, waiting[:, 1] = (
                    history[STEPS] - before.batches,
                    waiting[:, 1] - before.batches,
                )
            else:
                times = history[TIMES]
                counters = counters._replace(now=before.now, is_timed=before.is_timed)
            if self.admission.least_occurrences == 1:
                waiting = waiting[:0]
        state = {SAVED_KEYS: keys, COUNTS: counts, self.clock: times, WAITING_KEYS: waiting}
        self.set_state({**state, COUNTERS: np.array(counters, np.int64)})

    def describe(self, moment: int) -> dict[str, int]:
        keys, known, counters = self._used.count, len(self.records), self.counters
        if counters.batches != moment:  # An epoch that ends before its batches do.
            records, counters = self.read(moment)
            known, keys = len(records), int((unpack_meta(records[:, META])[0] >= FIRST_ROW).sum())
        counts = ("admitted", "rejected", "evicted", "refused")
        named = {name: getattr(counters, name) for name in counts}
        return {"keys": keys, "waiting": known - keys, **named}

    def render_unmet(self, moment: int) -> list[str]:
        """Says which keys of the list of those that get a row have none."""
        if self._allowed is None:
            return []
        unmet = self._allowed[self.find(self._allowed, moment) < FIRST_ROW].tolist()
        place = f"table {self.table}, admission.allow_list"
        return [describe_unmatched(place, len(self._allowed), unmet)] if unmet else []


def read_key_list(path: str) -> np.ndarray:
    """Reads keys from a file, a whole number of 64 bits on each line: int64 `[n]`, each once."""
    file = local_path(path)
    lines = read_key_lines(file)
    try:
        keys = np.array([int(text) for text in lines.values()], np.int64)
    except (ValueError, OverflowError) as error:
        raise InputDataError(
            "a line of the list of keys that get a row is no key",
            received=f"{path}: {error}",
            allowed="one whole number of 64 bits on each line",
            fix="list the keys as the dataset holds them: of text, its hash_key",
        ) from error
    refuse_twice(file, zip(lines, keys.tolist(), strict=True))
    return keys


def find_smallest(columns: list[np.ndarray], count: int) -> np.ndarray:
    """Returns where the smallest rows of a table are, by its columns in order; ties are decided."""
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

"""Key spaces with rules: keys are admitted, lose their rows again, and rows are given out anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import tensorflow as tf

from conf.key_lists import describe_unmatched
from conf.schema import PAD_ID
from training.embedding.growing_rows import list_copies
from training.embedding.key_index import FIRST_ROW
from training.embedding.key_records import KEY, META, TIME, WAITING, pack_meta, unpack_meta
from training.embedding.key_rules import IndexCounters, KeyRules, MappedBatch, RuledIndex
from training.embedding.key_space import SAVED_KEYS, KeySpace, MapBatch
from training.embedding.placement.row_exchange import RowExchange

COUNTS, WAITING_KEYS, COUNTERS = "counts", "waiting", "moment"  # As checkpoints name them.
TIMES, STEPS = "times", "steps"
"""What the times of keys are called: values of a feature, or steps."""
TRIM_EVERY = 8
"""Batches between two looks at how far the steps are, which a GPU has to be waited for."""


class RuledKeySpace(KeySpace):
    """The keys of a dynamic table with rules of admission and eviction.

    The input maps batches ahead of the steps, as without rules. Each batch carries its number and
    the keys that get a row with it; the step stores the number and sets the rows. So what is
    saved, evaluated and exported is the index as it was after the batch of the last step.

    Args:
        rules: The rules.
        capacity: Rows that memory is reserved for from the start.
        device_rows: Rows that the device holds of those in host memory; None: it holds all.
        exchange: The rows that other workers own; None: this process holds all.
    """

    def __init__(
        self,
        rules: KeyRules,
        *,
        capacity: int = 1,
        device_rows: int | None = None,
        exchange: RowExchange | None = None,
    ) -> None:
        super().__init__(
            rules.table,
            max_rows=rules.max_rows,
            capacity=capacity,
            device_rows=device_rows,
            exchange=exchange,
        )
        self.rules, self.ruled = rules, RuledIndex(rules)
        self.known_batches = tf.Variable(
            0, dtype=tf.int64, trainable=False, name=f"{rules.table}/known_batches"
        )

    @property
    def may_refuse(self) -> bool:
        """Whether a key that training meets may have no row."""
        return True

    @property
    def sets_all_rows(self) -> bool:
        """Whether a new key's row may hold another one's numbers, also in optimizer state."""
        return True

    @property
    def clock(self) -> str:
        """What the times of keys are called in a checkpoint."""
        return STEPS if self.rules.timestamp is None else TIMES

    @property
    def batch_count(self) -> int:
        """Batches that steps have trained on."""
        return int(list_copies(self.known_batches)[0])

    def begin_batches(self, *, is_new_epoch: bool) -> MapBatch:
        """Returns the function that maps the keys of the batches to come to rows.

        What batches that no step has trained on had changed is taken back. Functions of earlier
        calls change nothing any more.

        Args:
            is_new_epoch: Whether what happens is counted from nothing.

        Returns:
            Function of keys, int64 `[n]`, their times, and whether the batch is an epoch's last.
        """
        copy = list_copies(self.known_batches)[0]
        with self._turn:
            self._session += 1
            self.ruled.rewind(self.batch_count)
            if is_new_epoch:
                self.ruled.begin_epoch()
            session = self._session

        def map_batch(keys: np.ndarray, times: np.ndarray | None, is_last: bool) -> MappedBatch:
            with self._turn:
                if session != self._session:
                    return self._find_batch(keys)
                if self.ruled.counters.batches % TRIM_EVERY == 0:
                    self.ruled.trim(int(copy.numpy()))
                return self.ruled.map(keys, times, is_last=is_last)

        return map_batch

    def find_ahead(self, keys: np.ndarray) -> MappedBatch:
        """Returns the rows of keys as the last batch that was mapped has left them."""
        with self._turn:
            return self._find_batch(keys)

    def _find_batch(self, keys: np.ndarray) -> MappedBatch:
        counters, none = self.ruled.counters, np.empty(0, np.int64)
        rows = self.ruled.find(keys, counters.batches)
        return MappedBatch(rows, counters.rows, none, none, counters.batches)

    def find_on_host(self, keys: np.ndarray) -> np.ndarray:
        """Returns the rows of keys, int64 `[n]`, as the steps so far have left them."""
        with self._turn:
            return self.ruled.find(keys, self.batch_count)

    def read_keys(self) -> np.ndarray:
        """Returns the keys of the rows that training has come to, from row 2 on; 0: no key's."""
        return self._read_state()[SAVED_KEYS]

    def read_key(self, key: int) -> tuple[int, int, int] | None:
        """Returns row, occurrences and time of a key as the input has left it, or None."""
        with self._turn:
            record = self.ruled.records.read(key)
        if record is None:
            return None
        rows, counts = unpack_meta(record[META : META + 1])
        return int(rows[0]), int(counts[0]), int(record[TIME])

    def state_tensors(self) -> dict[str, tf.Tensor]:
        """Returns keys, counts, times and the counters, as the steps so far have left them."""
        return {name: tf.constant(values) for name, values in self._read_state().items()}

    def _read_state(self) -> dict[str, np.ndarray]:
        with self._turn:
            records, counters = self.ruled.read(self.batch_count)
        rows, counts = unpack_meta(records[:, META])
        own = rows >= FIRST_ROW
        columns = {SAVED_KEYS: records[:, KEY], COUNTS: counts, self.clock: records[:, TIME]}
        state = {name: np.zeros(counters.rows - FIRST_ROW, np.int64) for name in columns}
        for name, values in columns.items():
            state[name][rows[own] - FIRST_ROW] = values[own]
        waiting = np.stack([records[~own, KEY], records[~own, TIME], counts[~own]], axis=1)
        state[WAITING_KEYS] = waiting[np.argsort(waiting[:, 0])]
        return state | {COUNTERS: counters.to_array()}

    def restore_tensors(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Sets the keys to saved ones; the matrices are restored by themselves.

        Raises:
            ValueError: A key occurs twice, or there are more than `max_rows`.
        """
        records = build_records(tensors[SAVED_KEYS], tensors[COUNTS], tensors[self.clock])
        waiting = build_waiting(tensors[WAITING_KEYS])
        counters = IndexCounters.from_array(tensors[COUNTERS])
        self.set_records(np.concatenate([records, waiting]), counters)

    def set_keys(self, keys: np.ndarray) -> None:
        """Gives rows from 2 on to keys that have qualified and whose times are not known.

        Eviction by count spares them as it does keys that have just reached it.

        Raises:
            ValueError: A key occurs twice, or there are more than `max_rows`.
        """
        counts = np.full(len(keys), self.rules.kept_count)
        times = np.zeros(len(keys), np.int64)
        counters = IndexCounters(rows=len(keys) + FIRST_ROW)
        self.set_records(build_records(keys, counts, times), counters)

    def continue_keys(self, keys: np.ndarray, earlier: Mapping[str, np.ndarray]) -> None:
        """Gives rows from 2 on to the keys of an earlier run, which keep their counts and ages.

        Args:
            keys: int64 `[n]`.
            earlier: By the names of `state_tensors`: counts and times of these keys, the keys that
                were waiting, and the counters. Times of another clock are left out.

        Raises:
            ValueError: A key occurs twice, or there are more than `max_rows`.
        """
        before, counters = (
            IndexCounters.from_array(earlier[COUNTERS]),
            IndexCounters(rows=len(keys) + FIRST_ROW),
        )
        times, waiting = earlier.get(self.clock), earlier[WAITING_KEYS].copy()
        if times is None:
            times, waiting[:, 1] = np.zeros(len(keys), np.int64), 0
        elif self.rules.timestamp is None:  # Steps are counted from the start of a run.
            times, waiting[:, 1] = times - before.batches, waiting[:, 1] - before.batches
        else:
            counters = replace(counters, now=before.now)
        if self.rules.least_count == 1:
            waiting = waiting[:0]
        records = build_records(keys, earlier[COUNTS], times)
        self.set_records(np.concatenate([records, build_waiting(waiting)]), counters)

    def set_records(self, records: np.ndarray, counters: IndexCounters) -> None:
        """Sets the records of keys, int64 `[n, 3]`, and what else the index holds.

        Raises:
            ValueError: As for `RuledIndex.set_to`.
        """
        with self._turn:
            self._session += 1
            self.leave_device()
            self.ruled.set_to(records, counters)
            self.known_rows.assign(counters.rows)
            self.known_batches.assign(counters.batches)

    def find_problems(self, found: Mapping[str, tuple[str, list[int]]]) -> list[str]:
        """Returns why saved tensors cannot be restored; none: they can.

        Args:
            found: Type and shape of each tensor, by the names of `state_tensors`.
        """
        rows = found.get(SAVED_KEYS, ("int64", [0]))[1]
        shapes: dict[str, Sequence[int | None]] = {
            SAVED_KEYS: [None],
            COUNTS: rows,
            self.clock: rows,
            WAITING_KEYS: [None, 3],
            COUNTERS: list(IndexCounters().to_array().shape),
        }
        problems = []
        for name, shape in shapes.items():
            dtype, given = found.get(name, ("missing", []))
            if name not in found:
                problems.append(f"{name} is not in it: it is of a table without these rules")
            elif dtype != "int64" or not tf.TensorShape(shape).is_compatible_with(given):
                problems.append(f"{name} is {dtype} {given}, not int64 {list(shape)}")
        if self.max_rows is not None and rows[0] > self.max_rows:
            problems.append(f"{rows[0]:,} rows, and max_rows is {self.max_rows:,}")
        return problems

    def describe(self) -> dict[str, int]:
        """Returns what has happened to the table's keys in this epoch, and what they take."""
        with self._turn:
            counters, own_bytes = self.ruled.counters, self.ruled.bytes
            keys, known = self.ruled.row_keys, len(self.ruled.records)
            if counters.batches != self.batch_count:  # An epoch that ends before its batches do.
                records, counters = self.ruled.read(self.batch_count)
                known, rows = len(records), unpack_meta(records[:, META])[0]
                keys = int((rows >= FIRST_ROW).sum())
        counts = ("admitted", "rejected", "evicted", "refused")
        return {
            "keys": keys,
            "waiting": known - keys,
            **{name: getattr(counters, name) for name in counts},
            "bytes": own_bytes + self.matrix_bytes,
            **self.describe_parts(),
        }

    def render(self) -> list[str]:
        """Returns what has happened in an epoch in words."""
        described = self.describe()
        waiting = f", {described['waiting']:,} waiting" if self.rules.least_count > 1 else ""
        line = (
            f"table {self.label}: {described['keys']:,} keys{waiting}; in this epoch "
            f"{described['admitted']:,} admitted, {described['evicted']:,} evicted, "
            f"{described['rejected']:,} lookups rejected; {described['bytes'] / 1e6:,.1f} MB"
        )
        if described["refused"]:
            refused = described["refused"]
            line += f"; full (max_rows = {self.max_rows:,}): {refused:,} lookups read zeros"
        return [line, *self._render_unmet(), *self.render_parts()]

    def _render_unmet(self) -> list[str]:
        """Says which keys of a list of those that get a row have none; of shards nobody knows."""
        if self.exchange is not None:
            return []
        with self._turn:
            listed, unmet = self.ruled.list_unmet(self.batch_count)
        place = f"table {self.label}, admission.allow_list"
        return [describe_unmatched(place, listed, unmet.tolist())] if len(unmet) else []


def build_waiting(waiting: np.ndarray) -> np.ndarray:
    """Returns the records of keys without a row, int64 `[n, 3]`.

    Args:
        waiting: Key, time and count of each, int64 `[n, 3]`.
    """
    meta = pack_meta(np.full(len(waiting), WAITING), waiting[:, 2])
    return np.stack([waiting[:, 0], waiting[:, 1], meta], axis=1)


def build_records(keys: np.ndarray, counts: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Returns the records of keys by row, from row 2 on, int64 `[n, 3]`; key 0 has none."""
    taken = np.flatnonzero(keys != PAD_ID)
    meta = pack_meta(taken + FIRST_ROW, counts[taken])
    return np.stack([keys[taken], times[taken], meta], axis=1)

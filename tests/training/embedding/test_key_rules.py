from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from conf.training.tables import DynamicTableConfig
from training.embedding import key_rules
from training.embedding.distinct_rows import BatchRows
from training.embedding.dynamic_table import DynamicTable, fill_like
from training.embedding.key_index import HASHES, KeyRecords, pack_meta
from training.embedding.key_mapping import admit_arrivals, map_keys, plan_keyed_features
from training.embedding.key_rules import RuledIndex
from training.embedding.key_space import KeySpace
from training.input.batches import ARRIVALS

ENDS = [-(2**63), 2**63 - 1]
INT64 = st.integers(*ENDS)
KEYS = st.one_of(st.integers(-3, 9), st.sampled_from(ENDS), INT64)
TIMES = st.one_of(st.integers(0, 30), st.sampled_from(ENDS))
BATCHES = st.lists(
    st.tuples(st.lists(st.tuples(KEYS, TIMES), min_size=1, max_size=12), st.booleans()), max_size=14
)
SEED, TABLE, MASK = 7, "items", 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


@pytest.fixture(scope="module", autouse=True)
def freed_share() -> Iterator[None]:
    """More than the one key of so small tables that would have to go."""
    with mock.patch.object(key_rules, "FREED_SHARE", 0.4):
        yield


def mix(value: int) -> int:
    """MurmurHash3's finalizer on Python's integers."""
    value &= MASK
    value = (value ^ value >> 33) * 0xFF51AFD7ED558CCD & MASK
    value = (value ^ value >> 33) * 0xC4CEB9FE1A85EC53 & MASK
    return value ^ value >> 33


@dataclass
class ByDict:
    """What the index should do, by dictionaries and loops.

    Attributes:
        config: The table's config.
        allowed: Keys that may have a row, or None.
        known: Count and time of each key.
        rows: Row of the keys that have one.
    """

    config: DynamicTableConfig
    allowed: set[int] | None = None
    known: dict[int, tuple[int, int]] = field(default_factory=dict)
    rows: dict[int, int] = field(default_factory=dict)
    batches: int = 0
    now: int | None = None
    happened: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("admitted", "rejected", "refused", "evicted"), 0)
    )

    def map(self, keys: list[int], times: list[int], is_last: bool) -> list[int]:
        self.batches += 1
        timed = self.config.eviction is not None and self.config.eviction.timestamp is not None
        self.evict(is_last)
        times = times if timed else [self.batches] * len(keys)
        self.now = max(times) if self.now is None else max(self.now, *times)
        distinct = list(dict.fromkeys(key for key in keys if key))
        wanted = []
        for key in distinct:
            seen = keys.count(key)
            count, time = self.known.get(key, (0, ENDS[0]))
            latest = max(t for k, t in zip(keys, times, strict=True) if k == key)
            if key in self.known or self.qualifies(key, count + seen, seen) or self.least > 1:
                self.known[key] = min(count + seen, 2**31 - 1), max(time, latest)
            if key in self.rows:
                continue
            if self.qualifies(key, count + seen, seen):
                wanted.append(key)
            else:
                self.happened["rejected"] += seen
        self.give_rows(wanted, distinct, keys)
        return [0 if key == 0 else self.rows.get(key, 1) for key in keys]

    @property
    def least(self) -> int:
        admission = self.config.admission
        counts = range(1, 2**31)
        if admission is None or admission.count is None:
            return 1
        return next(n for n in counts if n * admission.coefficient >= admission.count)

    def qualifies(self, key: int, count: int, seen: int) -> bool:
        admission = self.config.admission
        if admission is None or admission.count:
            return count >= self.least
        if admission.allow_list:
            return self.allowed is not None and key in self.allowed
        stream = (SEED << 32 ^ zlib.crc32(TABLE.encode()) ^ self.batches * GOLDEN) & MASK
        state = mix(mix(stream + GOLDEN) ^ key)
        draws = [mix(state + n * GOLDEN) >> 11 for n in range(1, seen + 1)]
        return min(draws) * 2.0**-53 < admission.probability

    def give_rows(self, wanted: list[int], busy: list[int], keys: list[int]) -> None:
        most = self.config.max_rows or math.inf
        missing = len(wanted) - (most - len(self.rows))
        rules = self.config.eviction
        if missing > 0 and rules is not None and rules.when_full:
            recent = rules.when_full == "least_recent"
            order = sorted(
                (key for key in self.rows if key not in busy),
                key=lambda k: (*self.known[k][:: -1 if recent else 1], k),
            )
            for key in order[: max(missing, int(key_rules.FREED_SHARE * most))]:
                self.forget(key)
        for key in wanted:
            if len(self.rows) < most:
                self.rows[key] = min(set(range(2, len(self.rows) + 3)) - set(self.rows.values()))
                self.happened["admitted"] += 1
            else:
                self.happened["refused"] += keys.count(key)
                if self.least == 1:
                    self.known.pop(key)

    def evict(self, is_last: bool) -> None:
        rules, now = self.config.eviction, self.now
        if rules is None or (rules.every == "epoch" and not is_last):
            return
        turns = 1 if rules.every == "epoch" else rules.every
        for key, (count, time) in list(self.known.items()):
            if (mix(key) >> 32) * turns // HASHES != (self.batches - 1) % turns:
                continue
            unused = rules.unused_time
            is_old = unused is not None and now is not None and now - time >= unused
            if is_old or count < (rules.min_count or 0):
                self.forget(key)

    def forget(self, key: int) -> None:
        self.known.pop(key)
        self.happened["evicted"] += self.rows.pop(key, None) is not None

    def describe(self) -> tuple[dict[int, tuple[int, int, int]], dict[str, int]]:
        known = {k: (self.rows.get(k, 1), *self.known[k]) for k in self.known}
        return known, dict(self.happened)


def describe(index: RuledIndex, batches: int) -> tuple[Any, dict[str, int]]:
    records, counters = index.read(batches)
    known = {
        int(key): (int(meta & 0xFFFFFFFF), int(meta >> 32), int(time))
        for key, time, meta in records
    }
    names = ("admitted", "rejected", "refused", "evicted")
    return known, {name: getattr(counters, name) for name in names}


COUNT, DRAWN = {"count": 3}, {"probability": 0.3}
BY_TIME = {"timestamp": "time", "unused_time": 5, "every": 3}
TABLES = {
    "count": {"admission": COUNT},
    "probability": {"admission": DRAWN},
    "allow list": {"admission": {"allow_list": "-"}, "max_rows": 2},
    "unused time": {"eviction": BY_TIME},
    "min count": {"eviction": {"min_count": 3, "every": 2}},
    "epoch": {"eviction": {**BY_TIME, "unused_time": 2, "every": "epoch"}},
    "recent": {"max_rows": 5, "eviction": {"when_full": "least_recent"}},
    "frequent": {"max_rows": 5, "eviction": {"when_full": "least_frequent"}},
    "any count": {"admission": {"count": 1}, "eviction": {**BY_TIME, "every": 1}},
    "coefficient": {"admission": {"count": 7, "coefficient": 3}},
    "full": {"max_rows": 3, "eviction": {**BY_TIME, "unused_time": 4, "every": 5}},
    "all, counted": {
        "max_rows": 4,
        "admission": {"count": 2},
        "eviction": {**BY_TIME, "min_count": 2, "when_full": "least_recent"},
    },
    "all, drawn": {
        "max_rows": 4,
        "admission": DRAWN,
        "eviction": {**BY_TIME, "min_count": 3, "when_full": "least_frequent", "every": 2},
    },
}


def build(table: dict[str, Any]) -> tuple[RuledIndex, ByDict]:
    config = DynamicTableConfig.model_validate(table)
    index = RuledIndex(TABLE, config, SEED)
    if not index.admission.allow_list:
        return index, ByDict(config)
    index._allowed = np.array([-2, 1, 2, 3, ENDS[1]])
    return index, ByDict(config, set(index._allowed.tolist()))


@pytest.mark.parametrize("name", TABLES)
@settings(deadline=None, max_examples=30)
@given(BATCHES, st.data())
def test_does_what_dictionaries_do_at_every_batch(name: str, batches, data) -> None:
    index, expected = build(TABLES[name])
    past = [expected.describe()]
    seen: set[int] = {0, 5}
    timed = index.timestamp is not None
    for number, (pairs, is_last) in enumerate(batches, start=1):
        keys, times = (list(values) for values in zip(*pairs, strict=True))
        seen |= set(keys)
        wanted = expected.map(keys, times, is_last)
        found = index.map(np.array(keys), np.array(times) if timed else None, is_last=is_last)
        assert found.rows.tolist() == wanted
        assert found.batches == number
        assert found.row_count > max(wanted)
        new = dict(zip(found.new_keys.tolist(), found.new_rows.tolist(), strict=True))
        assert new == {k: expected.rows[k] for k in new}
        past.append(expected.describe())
        fresh = past[-1][1]["admitted"] - past[-2][1]["admitted"]
        assert len(new) == fresh
        assert index.describe(number)["keys"] == len(expected.rows)
        assert describe(index, number) == past[-1]
    # The input is ahead: every earlier state can be read, found in, and gone back to.
    back = data.draw(st.integers(0, len(batches)))
    assert describe(index, back) == past[back]
    asked = np.array(sorted(seen))
    rows = [0 if k == 0 else past[back][0].get(k, (1,))[0] for k in asked.tolist()]
    assert index.find(asked, back).tolist() == rows
    if data.draw(st.booleans()):  # Steps have come so far: what was before is not gone back to.
        index.trim(back)
    index.rewind(back)
    assert describe(index, back) == past[back]
    again, _ = build(TABLES[name])
    again._allowed = index._allowed
    again.set_state(index.read_state(back))
    for pairs, is_last in batches[back:]:  # As it went the first time, also from what is saved.
        keys, times = (np.array(values) for values in zip(*pairs, strict=True))
        one = index.map(keys, times if timed else None, is_last=is_last)
        other = again.map(keys, times if timed else None, is_last=is_last)
        for mine, its in zip(one, other, strict=True):
            np.testing.assert_array_equal(mine, its)
    assert describe(index, len(batches)) == past[-1]


def test_records_survive_growth_and_removal() -> None:
    rng = np.random.default_rng(3)
    keys = np.unique(rng.integers(*ENDS, 30_000))
    records, meta = KeyRecords(), pack_meta(np.arange(len(keys)) + 2, np.ones(len(keys)))
    for part in np.array_split(np.arange(len(keys)), 9):
        records.put(np.stack([keys[part], part, meta[part]], axis=1))
    assert 24 < records.bytes / len(records) <= 48
    gone = rng.random(len(keys)) < 0.7
    records.remove(keys[gone])
    np.testing.assert_array_equal(records.find(keys), np.where(gone, 0, meta))
    assert len(records) == (~gone).sum()
    ranges = [(k * HASHES // 7, (k + 1) * HASHES // 7) for k in range(7)]
    parts = [records.select(hashes, len(keys), 0) for hashes in ranges]
    assert sorted(np.concatenate(parts)[:, 0].tolist()) == keys[~gone].tolist()
    for hashes, part in zip(ranges, parts, strict=True):
        alone = KeyRecords()
        alone.put(part)
        assert len(alone.select(hashes, len(keys), 0)) == len(part) > 0


def build_ruled_table(table: dict[str, Any]) -> DynamicTable:
    space = KeySpace(TABLE, DynamicTableConfig.model_validate(table), seed=SEED)
    return DynamicTable(TABLE, space, 2, seed=SEED)


def read_rows(table: DynamicTable, keys: list[int]) -> np.ndarray:
    return table.lookup(tf.constant(keys, tf.int64)).numpy()


def test_a_row_is_its_first_keys_until_the_step_that_gives_it_away() -> None:
    table = build_ruled_table({"max_rows": 2, "eviction": {"when_full": "least_recent"}})
    bias = DynamicTable("bias", table.keys, 1, seed=SEED, initializer=None)
    slot, space = fill_like(table.rows, 0.5, "slot"), table.keys
    keyed = plan_keyed_features({"item": table}, {TABLE: table, "bias": bias})
    keys = [[1, 2], [2, 0], [3, 2], [4, 3], [4, 4], [9, 9]]
    batches = map_keys(
        tf.data.Dataset.from_tensor_slices({"item": tf.constant(keys, tf.int64)}), keyed, 5
    )
    ahead = list(batches)  # all is mapped before the first step
    rows = [batch["item"].numpy().tolist() for batch in ahead]
    assert rows == [[2, 3], [3, 0], [2, 3], [3, 2], [3, 3], [1, 1]]
    step = tf.function(lambda arrivals: admit_arrivals(arrivals, keyed))
    first = {key: table.draw_rows(np.array([key]))[0] for key in (1, 2, 3, 4)}
    trained: dict[int, np.ndarray] = {}
    for number, batch in enumerate(ahead[:5]):
        step(batch[ARRIVALS])
        new = {1, 2} if number == 0 else {3} if number == 2 else {4} if number == 3 else set()
        for key in new:
            trained[key] = first[key]
        known = set(space.read_keys().tolist())
        assert known == {1, 2} if number < 2 else {2, 3} if number == 2 else {3, 4}
        for key in (1, 2, 3, 4):  # as of this step, though the input is at the end
            wanted = trained[key] if key in known else np.zeros(2)
            np.testing.assert_array_equal(read_rows(table, [key])[0], wanted)
            row = int(space.find_on_host(np.array([key]))[0])
            if key in new:
                np.testing.assert_array_equal(slot.numpy()[row], [0.5, 0.5])
                assert bias.rows.numpy()[row] == 0.0
            if row > 1:  # The step trains the row and its state.
                trained[key] = wanted + key
                for matrix in (table.rows, bias.rows, slot):
                    change = tf.IndexedSlices(tf.fill([1, matrix.dim], float(key)), [row])
                    matrix.variable.scatter_add(change)
        told, saved = space.describe(), space.state_tensors()
        assert (told["keys"], told["evicted"]) == (2, [0, 0, 1, 2, 2][number])
        assert int(saved["moment"][0]) == number + 1
        assert set(saved["by_row"].numpy().tolist()) == known
    assert not table.rows.numpy()[:2].any()


def test_a_key_reads_zeros_until_it_is_admitted_and_looking_up_counts_nothing() -> None:
    table = build_ruled_table({"admission": {"count": 3}})
    keyed = plan_keyed_features({"item": table, "list": table}, {TABLE: table})
    lists = tf.ragged.constant([[[5], [6, 5]], [[], [6]]], ragged_rank=2, dtype=tf.int64)
    data = {"item": tf.constant([[6, 7], [7, 6]], tf.int64), "list": lists}
    step = tf.function(lambda arrivals: admit_arrivals(arrivals, keyed))
    seen = []
    for batch in map_keys(tf.data.Dataset.from_tensor_slices(data), keyed):
        step(batch[ARRIVALS])
        seen.append((batch["item"].numpy().tolist(), batch["list"].to_list()))
        for _ in range(3):
            read_rows(table, [5, 7, 7, 99])
    assert seen == [([1, 1], [[1], [1, 1]]), ([1, 2], [[], [2]])]
    assert table.keys.index.read_key(7) == (1, 2, 2)
    assert table.keys.index.read_key(99) is None
    with tf.GradientTape() as tape:
        tape.watch(table.variable)
        values = table.gather(tf.constant([1, 2, 0], tf.int64), BatchRows({}))
    gradient = tf.convert_to_tensor(tape.gradient(values, table.variable)).numpy()
    assert not values.numpy()[0].any()
    assert not gradient[:2].any()
    assert gradient[2].all()


@pytest.mark.parametrize(
    ("table", "error"),
    [
        ({"eviction": {}}, "no key is evicted"),
        ({"eviction": {"unused_time": 5}}, "`unused_time` needs `timestamp`"),
        ({"eviction": {"min_count": 5, "timestamp": "t"}}, "no rule uses `timestamp`"),
        ({"eviction": {"when_full": "least_recent"}}, "needs `max_rows`"),
        ({"eviction": {"min_count": 2, "every": 0}}, "1 or more, or epoch"),
        ({"admission": {}}, "set one of"),
        ({"admission": {"count": 2, "probability": 0.5}}, "set one of"),
        ({"admission": {"probability": 0.5, "coefficient": 2}}, "`coefficient` is of `count`"),
        ({"device_rows": 9, "max_rows": 9}, "must be below `max_rows`"),
    ],
)
def test_rules_that_do_not_fit_are_refused(table, error: str) -> None:
    with pytest.raises(ValidationError, match=error):
        DynamicTableConfig.model_validate(table)


def test_saved_keys_of_other_rules_are_refused() -> None:
    ruled = build_ruled_table(TABLES["frequent"]).keys
    ruled.set_keys(np.array([4, 7, 9]))
    found = {n: t.shape.as_list() for n, t in ruled.state_tensors().items()}
    assert ruled.find_problems(found) == []
    timed = build_ruled_table(TABLES["unused time"]).keys
    assert "times is not in it" in timed.find_problems(found)[0]
    assert "counts is not in it" in ruled.find_problems({"by_row": [3]})[0]
    small = build_ruled_table({**TABLES["frequent"], "max_rows": 2}).keys
    assert small.find_problems(found) == ["3 rows, and max_rows is 2"]


def test_keys_that_were_taken_over_are_not_evicted_before_they_are_met() -> None:
    ruled = build_ruled_table({"eviction": {"min_count": 3, "every": 4}}).keys
    ruled.set_keys(np.arange(10, 60))
    for _ in range(8):  # Each key's turn comes twice.
        ruled.index.map(np.array([7]))
    assert set(range(10, 60)) <= set(ruled.index.read_keys(8).tolist())

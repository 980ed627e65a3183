"""Tables in two tiers: places against an ordered dictionary, steps against tables in one tier."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.training.tables import DynamicTableConfig
from tests.machine import IS_EXHAUSTIVE, some_of
from training.embedding.device_tier import DevicePlaces, DeviceTier, HostRows, PlacedBatch
from training.embedding.distinct_rows import BatchRows
from training.embedding.dynamic_table import DynamicTable
from training.embedding.key_index import MappedBatch
from training.embedding.key_mapping import admit_arrivals, map_keys, plan_keyed_features
from training.embedding.key_space import KeySpace
from training.embedding.lazy_optimizer import LazyAdam, LazyOptimizer, TableRule
from training.input.batches import ARRIVALS

PLACES = 4


@settings(deadline=None)  # the first call compiles
@given(st.lists(st.lists(st.integers(0, 9), max_size=9), max_size=12), st.data())
def test_the_least_recent_rows_make_room(batches: list[list[int]], data) -> None:
    places, expected = DevicePlaces(PLACES), OrderedDict[int, None]()
    for batch in batches:
        distinct = list(dict.fromkeys(row for row in batch if row > 1))
        new = [row for row in distinct if row not in expected and data.draw(st.booleans())]
        before = places.rows.copy()
        found = places.place(np.array(batch, np.int64), np.array(new, np.int64))
        missing = [row for row in distinct if row not in expected]
        for row in distinct:  # Those that were there have been used, also where not all fit.
            if row in expected:
                expected.move_to_end(row)
        if len(distinct) > PLACES:
            assert found == len(distinct)
            np.testing.assert_array_equal(places.rows, before)
            continue
        assert isinstance(found, PlacedBatch)
        gone = []
        for row in missing:
            gone.append(expected.popitem(last=False)[0] if len(expected) == PLACES else -1)
            expected[row] = None
        assert found.swaps[:, 1].tolist() == missing
        assert found.swaps[:, 2].tolist() == gone
        assert found.swaps[:, 3].tolist() == [row not in new for row in missing]
        np.testing.assert_array_equal(before[found.swaps[:, 0]], gone)
        np.testing.assert_array_equal(places.rows[found.places], batch)
        np.testing.assert_array_equal(places.rows[found.new_places], new)
        assert found.distinct == len(distinct)
        assert sorted(places.rows[2:][places.rows[2:] > 0]) == sorted(expected)
        if data.draw(st.integers(0, 4)) == 0:  # As after steps that are not run.
            places.set_to(before)
            expected = OrderedDict.fromkeys(before[2:][before[2:] > 0][::-1].tolist())


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(2, 20), max_size=PLACES), max_size=20), st.data())
def test_rows_of_the_next_step_are_read_while_one_runs(batches: list[list[int]], data) -> None:
    """Each step adds 1 to its rows; host memory grows, and is read between steps."""
    tier, host = DeviceTier("items", PLACES), HostRows(2, 2, 0.0)
    tier.add(host)
    place = tier.begin_batches(is_new_epoch=True)
    device, expected = np.zeros((2 + PLACES, 2)), dict[int, float]()
    planned: list[tuple[list[int], PlacedBatch]] = []
    left, known = list(batches), set[int]()
    while left or planned:
        for _ in range(data.draw(st.integers(0, 3))):  # The input is ahead, or is not.
            if left:
                rows = np.array(left[0], np.int64)
                new = np.array(sorted({*left[0]} - known), np.int64)
                known.update(left[0])
                planned.append((left.pop(0), place(MappedBatch(rows, 21, new, new), True)))
        if not planned:
            continue
        rows, placed = planned.pop(0)
        at = placed.swaps[:, 0]
        (coming,) = tier.exchange(0, 21, placed.distinct, placed.swaps, device[at])
        assert (tier._ahead is not None) == bool(planned)
        device[at] = coming
        device[placed.new_places] = 0.0
        for row in set(rows):
            assert (device[placed.places[rows.index(row)]] == expected.get(row, 0.0)).all()
            device[placed.places[rows.index(row)]] += 1.0
            expected[row] = expected.get(row, 0.0) + 1.0
        if data.draw(st.integers(0, 5)) == 0:
            tier.wait()
            host.reserve(22 + len(host.values))


KEYS, BATCH, DIM, DEVICE_ROWS = 12, 4, 3, 5
RULES: dict[str, dict[str, Any]] = {
    "no rules": {},
    "full": {"max_rows": 8},
    "counted": {"admission": {"count": 2}, "eviction": {"min_count": 3, "every": 2}},
    "full, least recent": {
        "max_rows": 7,
        "eviction": {"when_full": "least_recent", "min_count": 2, "every": 5},
    },
}
BATCHES = st.lists(
    st.lists(st.integers(0, KEYS), min_size=BATCH, max_size=BATCH),
    min_size=6,
    max_size=12 + 6 * IS_EXHAUSTIVE,
)


class Training:
    """A table, a table of biases and their optimizer, that batches of keys are trained on."""

    def __init__(self, rules: Mapping[str, Any], device_rows: int | None) -> None:
        options = {"capacity": 1, "device_rows": device_rows, **rules}
        self.space = KeySpace("items", DynamicTableConfig.model_validate(options), seed=3)
        self.table = DynamicTable("items", self.space, DIM, seed=3)
        self.bias = DynamicTable("bias", self.space, 1, seed=3, initializer=None)
        matrices = [self.table.rows, self.bias.rows]
        self.optimizer = LazyOptimizer(matrices, TableRule(LazyAdam(), 0.1))
        tables = {"items": self.table, "bias": self.bias}
        self.keyed = plan_keyed_features({"key": self.table}, tables)
        self.step = tf.function(self._step)

    def _step(self, batch: Mapping[str, Any]) -> tf.Tensor:
        admit_arrivals(batch[ARRIVALS], self.keyed)
        variables = [self.table.variable, self.bias.variable]
        rows = BatchRows({})
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(variables)
            found = self.table.lookup(batch["key"], rows) + self.bias.lookup(batch["key"], rows)
            loss = tf.reduce_sum((found - batch["asked"]) ** 2)
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    def clear(self) -> None:
        """Forgets all keys, and all that the rows have learned."""
        self.space.set_keys(np.empty(0, np.int64))
        self.load({}, [np.full((2, m.dim), m.fill, np.float32) for m in self.space.matrices])
        self.optimizer.iterations.assign(0)

    def load(self, keys: Mapping[str, np.ndarray], matrices: list[np.ndarray]) -> None:
        """Restores what `read` has returned, as a checkpoint does: matrices first."""
        for matrix, values in zip(self.space.matrices, matrices, strict=True):
            matrix.assign(values)
        if keys:
            self.space.restore_tensors(keys)

    def read(self) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
        """Returns what a checkpoint would hold."""
        keys = {name: tensor.numpy() for name, tensor in self.space.state_tensors().items()}
        return keys, [matrix.numpy() for matrix in self.space.matrices]

    def train(self, keys: np.ndarray, asked: np.ndarray, steps: int, is_new: bool) -> list[float]:
        """Opens an epoch of these batches and trains on the first ones; more are mapped ahead."""
        dataset = tf.data.Dataset.from_tensor_slices({"key": keys, "asked": asked})
        batches = iter(map_keys(dataset, self.keyed, len(keys), is_new_epoch=is_new))
        return [float(self.step(next(batches))) for _ in range(steps)]


@functools.cache
def build_pair(name: str) -> list[Training]:
    """A table in one tier and one in two; their steps are traced once."""
    return [Training(RULES[name], device_rows) for device_rows in (None, DEVICE_ROWS)]


@pytest.mark.parametrize("name", some_of([(name,) for name in RULES], [("no rules",)]))
@settings(deadline=None, max_examples=2 + 8 * IS_EXHAUSTIVE)  # each epoch traces its input
@given(batches=BATCHES, data=st.data())
def test_trains_bit_for_bit_as_in_one_tier(name: str, batches, data) -> None:
    one, two = build_pair(name)
    for training in (one, two):
        training.clear()
    keys = np.array(batches, np.int64) * (1 << 40)
    asked = np.random.default_rng(len(batches)).normal(size=(*keys.shape, DIM)).astype(np.float32)
    at = 0
    while at < len(keys):
        # Epochs that end before their batches do, validations and restored states in between.
        steps = min(data.draw(st.integers(3 if IS_EXHAUSTIVE else 6, 12)), len(keys) - at)
        is_new = data.draw(st.booleans())
        losses = [t.train(keys[at:], asked[at:], steps, is_new) for t in (one, two)]
        assert losses[0] == losses[1]
        at += steps
        looked_up = tf.constant(data.draw(st.lists(st.integers(0, KEYS), max_size=5)), tf.int64)
        for table in ("table", "bias"):
            found = [getattr(t, table).lookup(looked_up * (1 << 40)).numpy() for t in (one, two)]
            np.testing.assert_array_equal(found[1], found[0])
        state = one.read()
        for expected, found in zip(
            tf.nest.flatten(state), tf.nest.flatten(two.read()), strict=True
        ):
            np.testing.assert_array_equal(found, expected)
        if data.draw(st.booleans()):  # What one has saved, the other goes on from.
            two.load(*state)
    known = {name: value for name, value in one.space.describe().items() if name != "bytes"}
    assert known.items() <= two.space.describe().items()


def test_what_does_not_fit_is_refused_with_the_number_it_takes() -> None:
    training = Training({}, 3)
    keys = np.array([[5, 6, 5, 0], [5, 6, 7, 8]], np.int64)
    asked = np.zeros((2, BATCH, DIM), np.float32)
    assert len(training.train(keys, asked, 1, True)) == 1
    with pytest.raises(tf.errors.OpError) as refused:
        training.train(keys, asked, 2, True)
    assert "items.device_rows is too small for one batch" in str(refused.value)
    assert "3, and a batch of 4 keys has 4 rows" in str(refused.value)

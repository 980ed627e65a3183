"""Rows of a dynamic table against dictionaries of float64, over batches of any keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.training.optimizer import OptimizerConfig
from conf.training.tables import (
    DynamicTableConfig,
    Initializer,
    NormalConfig,
    TruncatedNormalConfig,
    UniformConfig,
)
from tests.machine import IS_EXHAUSTIVE, some_of
from tests.training.toy_models import DIM, VOCABULARY, ToyModel, build_toy_batches, squared_error
from training.distribution.run_steps import build_run_steps
from training.embedding.distinct_rows import add_distinct_ids, plan_lookups
from training.embedding.dynamic_table import DynamicTable, draw_first_rows
from training.embedding.key_mapping import (
    KeyedFeatures,
    admit_arrivals,
    map_keys,
    plan_keyed_features,
)
from training.embedding.key_space import KeySpace, reading_rows
from training.embedding.lazy_optimizer import (
    LazyAdagrad,
    LazyAdam,
    LazyFTRL,
    LazyOptimizer,
    LazyRule,
    LazySGD,
    TableRule,
)
from training.embedding.static_table import EmbeddingTable
from training.input.batches import ARRIVALS
from training.loop.optimizers import Optimizers
from training.loop.step import StepOptions, TrainStep

INT64 = st.integers(-(2**63), 2**63 - 1)


def draw(
    keys,
    dim: int = 5,
    seed: int = 3,
    table: str = "a",
    initializer: Initializer = NormalConfig(stddev=0.5),  # noqa: B008
) -> np.ndarray:
    return draw_first_rows(
        np.array(keys, np.int64), dim, seed=seed, table=table, initializer=initializer
    )


@settings(deadline=None)  # the first call compiles
@given(st.lists(INT64, min_size=1, max_size=20), st.randoms())
def test_the_order_of_keys_is_of_no_account(keys, random) -> None:
    rows = draw(keys)
    order = random.sample(range(len(keys)), len(keys))
    np.testing.assert_array_equal(draw([keys[i] for i in order]), rows[order])


def test_are_normal_and_independent() -> None:
    keys = np.arange(2, 100_002)
    rows = draw(keys, dim=4).astype(np.float64) / 0.5
    assert np.isfinite(rows).all()
    np.testing.assert_allclose(rows.mean(axis=0), 0.0, atol=0.015)
    np.testing.assert_allclose(rows.std(axis=0), 1.0, atol=0.015)
    # Shares below quantiles of the normal distribution.
    for quantile, share in [(-1.959964, 0.025), (-0.674490, 0.25), (0.0, 0.5), (1.281552, 0.9)]:
        np.testing.assert_allclose((rows < quantile).mean(axis=0), share, atol=0.006)
    np.testing.assert_allclose(np.corrcoef(rows.T), np.eye(4), atol=0.015)
    assert abs(np.corrcoef(rows[1:, 0], rows[:-1, 0])[0, 1]) < 0.015  # of neighbouring keys


@pytest.mark.parametrize(
    ("initializer", "low", "high"),
    [(UniformConfig(low=-1, high=3), -1, 3), (TruncatedNormalConfig(stddev=0.5), -1, 1)],
    ids=["uniform", "truncated normal"],
)
def test_other_distributions_are_functions_of_the_key_too(initializer, low, high) -> None:
    keys = np.arange(2, 20_002)
    rows = draw(keys, dim=4, initializer=initializer)
    normal, beyond = NormalDist(0, 0.5), NormalDist().cdf(-2)
    for share in (0.05, 0.3, 0.5, 0.9):
        quantile = low + share * (high - low)
        if isinstance(initializer, TruncatedNormalConfig):
            quantile = normal.inv_cdf(beyond + share * (1 - 2 * beyond))
        np.testing.assert_allclose((rows < quantile).mean(axis=0), share, atol=0.015)
    np.testing.assert_allclose(np.corrcoef(rows.T), np.eye(4), atol=0.03)
    order = np.random.default_rng(0).permutation(len(keys))
    np.testing.assert_array_equal(draw(keys[order], dim=4, initializer=initializer), rows[order])
    shorter = draw(keys[:9], dim=3, initializer=initializer)
    np.testing.assert_array_equal(shorter, rows[:9, :3])
    assert not draw([1], initializer=initializer).any()
    assert rows.min() >= low
    assert rows.max() < high


def test_depend_on_seed_and_table() -> None:
    rows = draw([7, 8])
    assert not np.isclose(rows, draw([7, 8], seed=4)).any()
    assert not np.isclose(rows, draw([7, 8], table="b")).any()


def test_a_longer_row_begins_as_a_shorter_one_does() -> None:
    np.testing.assert_array_equal(draw([9], dim=7)[:, :4], draw([9], dim=4))


def test_null_starts_at_zeros() -> None:
    rows = draw([1, 2])
    assert not rows[0].any()
    assert rows[1].all()


STEPS, BATCH = 8, 12
KEYS = np.arange(VOCABULARY)


def build_table(name: str = "items", **keys: Any) -> DynamicTable:
    space = KeySpace(name, DynamicTableConfig(**{"capacity": 1, **keys}))
    return DynamicTable(name, space, DIM, seed=3, initializer=NormalConfig(stddev=0.5))


class Training:
    """A toy model in training, with the steps of the product."""

    def __init__(
        self,
        tables: dict[str, EmbeddingTable] | None,
        config: dict[str, Any],
        *,
        shares_rows: bool = True,
    ) -> None:
        self.model = ToyModel(tables=tables, l2=1e-3)
        self.optimizers = Optimizers(OptimizerConfig.model_validate(config), self.model, STEPS)
        self.keyed = plan_keyed_features(self.model.embedded_features, self.model.tables)
        self.lookups = plan_lookups(self.model.lookups) if shares_rows else None
        self.traces = 0
        options = StepOptions(seed=1)
        step = TrainStep(
            self.model, squared_error, self.optimizers, options, self.lookups, self.keyed
        )

        def counted(batch: Any) -> tf.Tensor:
            self.traces += 1
            return step(batch)

        self._run = build_run_steps(tf.distribute.get_strategy(), counted)

    def open(self, batches: tf.data.Dataset) -> Iterator[Any]:
        if self.keyed:
            batches = map_keys(batches, self.keyed)
        return iter(batches if self.lookups is None else add_distinct_ids(batches, self.lookups))

    def run(self, batches: tf.data.Dataset, steps: int = STEPS) -> np.ndarray:
        return self._run(self.open(batches), tf.constant(steps)).losses.numpy()


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"sparse": {"kind": "sgd"}, "learning_rate": 0.1},
    "adagrad": {"sparse": {"kind": "adagrad"}, "learning_rate": 0.1},
    "adam": {"learning_rate": 0.05},
    "ftrl": {"sparse": {"kind": "ftrl", "l1": 1e-3}, "learning_rate": 0.1},
    "clipped": {"learning_rate": 0.05, "clip_norm": 0.1},
    "parts": {"learning_rate": 0.05, "accumulate_steps": 2},
}


@pytest.mark.parametrize(
    ("name", "shares_rows"),
    some_of(
        [
            *((name, True) for name in OPTIMIZERS if name != "parts"),
            ("adam", False),
            ("parts", False),
        ],
        [("adagrad", True), ("parts", False)],
    ),
)
def test_trains_as_a_static_table_does(name: str, shares_rows: bool) -> None:
    config = OPTIMIZERS[name]
    dynamic = Training(
        {"items": build_table("items"), "users": build_table("users", capacity=30)},
        config,
        shares_rows=shares_rows,
    )
    static = Training(None, config, shares_rows=shares_rows)
    for table_name, table in static.model.tables.items():
        first = dynamic.model.tables[table_name].draw_rows(KEYS)
        table.rows.assign(first * (KEYS > 0)[:, np.newaxis])
    batches = build_toy_batches(BATCH, STEPS)
    losses = dynamic.run(batches)
    np.testing.assert_array_equal(losses, static.run(batches))
    for table_name, table in static.model.tables.items():
        grown = dynamic.model.tables[table_name]
        met = grown.keys.read_keys()
        assert len(set(met)) > VOCABULARY // 2
        found = grown.lookup(tf.constant(met)).numpy()
        np.testing.assert_array_equal(found, table.rows.numpy()[met])
        np.testing.assert_array_equal(grown.rows.numpy()[2:], found)
        number = sorted(static.model.tables).index(table_name)
        for slot, matrices in dynamic.optimizers.sparse.slots.items():
            expected = static.optimizers.sparse.slots[slot][number].numpy()[met]
            np.testing.assert_array_equal(matrices[number].numpy()[2:], expected)


def test_unknown_keys_and_padding_read_zeros_and_are_not_added() -> None:
    tables = {"items": build_table("items"), "users": build_table("users")}
    training = Training(tables, OPTIMIZERS["adam"])
    training.run(build_toy_batches(BATCH, STEPS))
    count = tables["items"].vocabulary_size
    keys = tf.constant([[0, 5], [-(2**63), 2**63 - 1]])
    rows = tables["items"].lookup(keys).numpy()
    assert rows.shape == (2, 2, DIM)
    assert rows[0, 1].all()
    assert not rows[0, 0].any()
    assert not rows[1].any()
    assert tables["items"].vocabulary_size == count == VOCABULARY + 1


def test_keys_may_be_any_whole_number() -> None:
    tables = {"items": build_table("items"), "users": build_table("users")}
    static = Training(None, OPTIMIZERS["adam"])
    dynamic = Training(tables, OPTIMIZERS["adam"])
    # Odd factors and shifts: other keys, one for one, ends of the range among them.
    stretch = np.int64(0x9E3779B97F4A7C15 - 2**64)

    def rename(batch: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        ids = {n: tf.where(batch[n] > 1, batch[n] * stretch, batch[n]) for n in ("item", "list")}
        return {**batch, **ids}

    for name, table in static.model.tables.items():
        keys = np.where((KEYS > 1) & (name == "items"), KEYS * stretch, KEYS)
        table.rows.assign(tables[name].draw_rows(keys) * (KEYS > 0)[:, np.newaxis])
    batches = build_toy_batches(BATCH, STEPS)
    np.testing.assert_array_equal(dynamic.run(batches.map(rename)), static.run(batches))


def test_growing_does_not_trace_steps_anew() -> None:
    small, large = (
        Training({name: build_table(name, capacity=size) for name in ("items", "users")}, config)
        for size, config in ((1, OPTIMIZERS["adagrad"]), (100, OPTIMIZERS["adagrad"]))
    )
    batches = build_toy_batches(2, STEPS)
    iterator = small.open(batches)
    losses = [small._run(iterator, tf.constant(1)).losses.numpy()[0] for _ in range(STEPS)]
    assert small.traces == 1
    np.testing.assert_array_equal(losses, large.run(batches))
    table = small.model.tables["items"]
    assert 3 < table.vocabulary_size <= len(table.variable.read_value())
    # Memory that is ahead of the keys holds first values: rows to come start there.
    slot = small.optimizers.sparse.slots["accumulator"][0]
    ahead = slot.variable.read_value()[table.vocabulary_size :]
    np.testing.assert_array_equal(ahead, np.full(ahead.shape, 0.1, np.float32))


def test_a_full_table_reads_zeros_for_further_keys_and_never_trains_them() -> None:
    def build(**keys: Any) -> dict[str, EmbeddingTable]:
        return {"items": build_table("items", **keys), "users": build_table("users")}

    tables = build(max_rows=4, capacity=100)
    training = Training(tables, OPTIMIZERS["adam"])
    training.run(build_toy_batches(BATCH, STEPS))
    space = tables["items"].keys
    assert space.row_count == 6
    assert len(tables["items"].variable.read_value()) == 6
    rows = tables["items"].rows.numpy()
    assert not rows[:2].any()
    assert rows[2:].all()
    known = set(space.read_keys())
    refused = 0
    for batch in build_toy_batches(BATCH, STEPS):
        keys = np.append(batch["item"].numpy(), batch["list"].numpy())
        refused += np.count_nonzero(~np.isin(keys, [0, *known]))
    assert space.index.refused == refused > 0
    # Both ways of gathering rows do the same.
    other = Training(build(max_rows=4), OPTIMIZERS["adam"], shares_rows=False)
    other.run(build_toy_batches(BATCH, STEPS))
    np.testing.assert_allclose(other.model.tables["items"].rows.numpy(), rows, atol=1e-6)


def test_two_tables_of_the_same_keys_grow_together() -> None:
    keys = KeySpace("items", DynamicTableConfig(capacity=1))
    tables = {
        "items": DynamicTable("items", keys, DIM, seed=3, initializer=NormalConfig(stddev=0.5)),
        "users": DynamicTable("users", keys, DIM, seed=3, initializer=None),
    }
    training = Training(tables, OPTIMIZERS["sgd"])
    assert len(training.keyed) == 1
    training.run(build_toy_batches(BATCH, 2), 2)
    assert tables["items"].vocabulary_size == tables["users"].vocabulary_size
    assert len(tables["users"].rows.numpy()) == len(tables["items"].rows.numpy()) > 2


Vector = np.ndarray
DYNAMIC_REFERENCE_BATCH, DYNAMIC_REFERENCE_DIM, RATE = 4, 3, 0.1
# Few values, so that keys come again, padding, null, and the ends of the range.
DYNAMIC_REFERENCE_KEYS = st.one_of(
    st.integers(-2, 4), st.sampled_from([-(2**63), 2**63 - 1, 2**62])
)
BATCHES = st.lists(
    st.lists(
        DYNAMIC_REFERENCE_KEYS, min_size=DYNAMIC_REFERENCE_BATCH, max_size=DYNAMIC_REFERENCE_BATCH
    ),
    min_size=4,
    max_size=10,
)


def move_by_sgd(row: Vector, gradient: Vector, state: dict[str, Any], step: int) -> Vector:
    return row - RATE * gradient


def move_by_adagrad(row: Vector, gradient: Vector, state: dict[str, Any], step: int) -> Vector:
    state["sum"] = state.get("sum", 0.1) + gradient**2
    return row - RATE * gradient / np.sqrt(state["sum"] + 1e-7)


def move_by_adam(row: Vector, gradient: Vector, state: dict[str, Any], step: int) -> Vector:
    state["first"] = 0.9 * state.get("first", 0.0) + 0.1 * gradient
    state["second"] = 0.999 * state.get("second", 0.0) + 0.001 * gradient**2
    size = RATE * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
    return row - size * state["first"] / (np.sqrt(state["second"]) + 1e-7)


def move_by_ftrl(row: Vector, gradient: Vector, state: dict[str, Any], step: int) -> Vector:
    before = state.get("sum", np.full(DYNAMIC_REFERENCE_DIM, 0.1))
    state["sum"] = before + gradient**2
    sigma = (np.sqrt(state["sum"]) - np.sqrt(before)) / RATE
    state["linear"] = state.get("linear", 0.0) + gradient - sigma * row
    shrunk = np.clip(state["linear"], -1e-3, 1e-3) - state["linear"]
    return shrunk / ((np.sqrt(state["sum"]) + 0.1) / RATE + 2 * 1e-2)


RULES: dict[str, tuple[LazyRule, Callable[..., Vector]]] = {
    "sgd": (LazySGD(), move_by_sgd),
    "adagrad": (LazyAdagrad(), move_by_adagrad),
    "adam": (LazyAdam(), move_by_adam),
    "ftrl": (LazyFTRL(l1=1e-3, l2=1e-2, beta=0.1), move_by_ftrl),
}


def build_step(
    table: DynamicTable, keyed: tuple[KeyedFeatures, ...], rule: LazyRule
) -> Callable[[Mapping[str, Any]], None]:
    """A step whose gradient of a row is the sum of what each lookup asks for, and the row."""
    optimizer = LazyOptimizer([table.rows], TableRule(rule, RATE))

    def step(batch: Mapping[str, Any]) -> None:
        admit_arrivals(batch[ARRIVALS], keyed)
        with reading_rows(), tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(table.variable)
            found = table.lookup(batch["key"])
            loss = tf.reduce_sum(found * batch["asked"] + 0.5 * found * found)
        optimizer.apply([tape.gradient(loss, table.variable)], [table.variable])

    return tf.function(step, reduce_retracing=True)


class ByDict:
    """What a table and its rule should do."""

    def __init__(self, table: DynamicTable, move: Callable[..., Vector]) -> None:
        self._table, self._move = table, move
        self.rows: dict[int, Vector] = {}
        self._state: dict[int, dict[str, Any]] = {}

    def train(self, keys: list[int], asked: Vector, step: int) -> None:
        for key in keys:
            is_full = len(self.rows) == self._table.keys.max_rows
            if key and key not in self.rows and not is_full:
                self.rows[key] = self._table.draw_rows(np.array([key]))[0].astype(np.float64)
                self._state[key] = {}
        sums: dict[int, Vector] = {}
        for key, vector in zip(keys, asked, strict=True):
            if key in self.rows:
                sums[key] = sums.get(key, 0.0) + vector + self.rows[key]
        for key, gradient in sums.items():
            self.rows[key] = self._move(self.rows[key], gradient, self._state[key], step)


@pytest.mark.parametrize("name", RULES)
@settings(deadline=None, max_examples=2 + IS_EXHAUSTIVE)  # each example traces a step
@given(
    batches=BATCHES,
    max_rows=st.one_of(st.none(), st.integers(1, 5)),
    capacity=st.integers(1, 8),
    seed=st.integers(0, 2**31),
)
def test_rows_are_those_of_a_dictionary(name, batches, max_rows, capacity, seed) -> None:
    rule, move = RULES[name]
    space = KeySpace("key", DynamicTableConfig(max_rows=max_rows, capacity=capacity))
    table = DynamicTable(
        "key", space, DYNAMIC_REFERENCE_DIM, seed=5, initializer=NormalConfig(stddev=0.5)
    )
    keyed, expected = plan_keyed_features({"key": table}, {"key": table}), ByDict(table, move)
    asked = (
        np.random.default_rng(seed)
        .normal(size=(len(batches), DYNAMIC_REFERENCE_BATCH, DYNAMIC_REFERENCE_DIM))
        .astype(np.float32)
    )
    dataset = tf.data.Dataset.from_tensor_slices(
        {"key": np.array(batches, np.int64), "asked": asked}
    )
    step = build_step(table, keyed, rule)
    for number, batch in enumerate(map_keys(dataset, keyed)):
        step(batch)
        expected.train(batches[number], asked[number], number + 1)
        assert space.read_keys().tolist() == list(expected.rows)
        rows = np.array(list(expected.rows.values())).reshape(-1, DYNAMIC_REFERENCE_DIM)
        np.testing.assert_allclose(table.rows.numpy()[2:], rows, rtol=2e-4, atol=2e-5)
        assert not table.rows.numpy()[:2].any()

"""First values of keys, and dynamic tables in training beside static ones."""

from __future__ import annotations

from collections.abc import Iterator
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
from tests.machine import some_of
from tests.training.toy_models import DIM, VOCABULARY, ToyModel, build_toy_batches, squared_error
from training.distribution.strategy import build_run_steps
from training.embedding.distinct_rows import add_distinct_ids, plan_lookups
from training.embedding.dynamic_table import DynamicTable, draw_first_rows
from training.embedding.key_mapping import map_keys, plan_keyed_features
from training.embedding.key_space import KeySpace
from training.embedding.static_table import EmbeddingTable
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


def test_draws_depend_on_seed_and_table_alone_and_null_starts_at_zeros() -> None:
    rows = draw([7, 8, 1], dim=7)
    for other in (draw([7, 8], dim=7, seed=4), draw([7, 8], dim=7, table="b")):
        assert not np.isclose(rows[:2], other).any()
    np.testing.assert_array_equal(draw([7, 8, 1], dim=4), rows[:, :4])
    assert not rows[2].any()
    assert rows[:2].all()


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

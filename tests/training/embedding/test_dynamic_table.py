"""First values of keys, and dynamic tables in training beside static ones."""

from __future__ import annotations

import functools
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from conf.training.optimizer import OptimizerConfig
from conf.training.tables import (
    DynamicTableConfig,
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


@pytest.mark.parametrize(
    ("initializer", "low", "high"),
    [
        (NormalConfig(stddev=0.5), -np.inf, np.inf),
        (UniformConfig(low=-1, high=3), -1, 3),
        (TruncatedNormalConfig(stddev=0.5), -1, 1),
    ],
    ids=["normal", "uniform", "truncated normal"],
)
def test_first_values_are_independent_draws_of_seed_table_and_key(initializer, low, high) -> None:
    draw = functools.partial(draw_first_rows, seed=3, table="a", initializer=initializer)
    keys = np.arange(2, 100_002)
    rows, normal = draw(keys, 4), NormalDist(0, 0.5)
    beyond = normal.cdf(low)
    for share in (0.025, 0.25, 0.5, 0.9):
        quantile = normal.inv_cdf(beyond + share * (1 - 2 * beyond))
        if isinstance(initializer, UniformConfig):
            quantile = low + share * (high - low)
        np.testing.assert_allclose((rows < quantile).mean(axis=0), share, atol=0.008)
    assert low <= rows.min() < rows.max() < high
    np.testing.assert_allclose(np.corrcoef(rows.T), np.eye(4), atol=0.015)
    assert abs(np.corrcoef(rows[1:, 0], rows[:-1, 0])[0, 1]) < 0.015  # of neighbouring keys
    order = np.random.default_rng(0).permutation(len(keys))
    np.testing.assert_array_equal(draw(keys[order], 4), rows[order])
    np.testing.assert_array_equal(draw(keys[:9], 3), rows[:9, :3])
    for other in ({"seed": 4}, {"table": "b"}):
        assert not np.isclose(draw(keys[:9], 4, **other), rows[:9]).any()
    assert not draw(np.array([1]), 4).any()  # Null starts at zeros.


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
        parts = (StepOptions(seed=1), self.lookups, self.keyed)
        step = TrainStep(self.model, squared_error, self.optimizers, *parts)
        self.traces = 0

        def counted(batch: Any) -> tf.Tensor:
            self.traces += 1
            return step(batch)

        self._run = build_run_steps(tf.distribute.get_strategy(), counted)

    def run(self, calls: int = 1) -> np.ndarray:
        batches = build_toy_batches(BATCH, STEPS)
        if self.keyed:
            batches = map_keys(batches, self.keyed)
        if self.lookups is not None:
            batches = add_distinct_ids(batches, self.lookups)
        iterator, steps = iter(batches), tf.constant(STEPS // calls)
        return np.concatenate([self._run(iterator, steps).losses.numpy() for _ in range(calls)])


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
    np.testing.assert_array_equal(dynamic.run(calls=STEPS), static.run())
    assert dynamic.traces == 1  # Growing does not trace steps anew.
    for table_name, table in static.model.tables.items():
        grown = dynamic.model.tables[table_name]
        met = grown.keys.read_keys()
        assert len(set(met)) > VOCABULARY // 2
        # Padding and keys that training has not met read zeros, and are not added.
        asked = tf.constant([*met, 0, -(2**63), 2**63 - 1], tf.int64)
        found = grown.lookup(asked).numpy()
        np.testing.assert_array_equal(found[:-3], table.rows.numpy()[met])
        assert not found[-3:].any()
        np.testing.assert_array_equal(grown.rows.numpy()[2:], found[:-3])
        number = sorted(static.model.tables).index(table_name)
        for slot, matrices in dynamic.optimizers.sparse.slots.items():
            expected = static.optimizers.sparse.slots[slot][number].numpy()[met]
            np.testing.assert_array_equal(matrices[number].numpy()[2:], expected)


def test_a_full_table_reads_zeros_for_further_keys_and_never_trains_them() -> None:
    def build(**keys: Any) -> dict[str, EmbeddingTable]:
        return {"items": build_table("items", **keys), "users": build_table("users")}

    tables = build(max_rows=4, capacity=100)
    training = Training(tables, OPTIMIZERS["adam"])
    training.run()
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
    other.run()
    np.testing.assert_allclose(other.model.tables["items"].rows.numpy(), rows, atol=1e-6)

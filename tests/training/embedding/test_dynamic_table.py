from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from conf.training import OptimizerConfig
from tests.training.toy_training import DIM, VOCABULARY, ToyModel, build_toy_batches, squared_error
from training.embedding.distinct_rows import add_distinct_ids, plan_lookups
from training.embedding.dynamic_table import DynamicTable
from training.embedding.key_mapping import map_keys, plan_keyed_features
from training.embedding.key_space import KeySpace
from training.embedding.table import EmbeddingTable
from training.optimizers import Optimizers
from training.step import StepOptions, TrainStep, build_run_steps

STEPS, BATCH = 8, 12
KEYS = np.arange(VOCABULARY)


def build_table(name: str = "items", **keys: Any) -> DynamicTable:
    return DynamicTable(name, KeySpace(name, **keys), DIM, seed=3, stddev=0.5)


class Training:
    """A toy model in training, with the steps of the product."""

    def __init__(
        self,
        tables: dict[str, EmbeddingTable] | None,
        config: dict[str, Any],
        *,
        shares_rows: bool = True,
    ) -> None:
        self.model = ToyModel(tables=tables)
        self.optimizers = Optimizers(OptimizerConfig.model_validate(config), self.model, STEPS)
        self.keyed = plan_keyed_features(self.model.embedded_features, self.model.tables)
        self.lookups = plan_lookups(self.model.lookups) if shares_rows else None
        self.traces = 0
        options = StepOptions(seed=1, embedding_l2=1e-3)
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
    [*((name, True) for name in OPTIMIZERS if name != "parts"), ("adam", False), ("parts", False)],
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
    assert space.index.is_full
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
    assert space.refused == refused > 0
    # Both ways of gathering rows do the same.
    other = Training(build(max_rows=4), OPTIMIZERS["adam"], shares_rows=False)
    other.run(build_toy_batches(BATCH, STEPS))
    np.testing.assert_allclose(other.model.tables["items"].rows.numpy(), rows, atol=1e-6)


def test_two_tables_of_the_same_keys_grow_together() -> None:
    keys = KeySpace("items", capacity=1)
    tables = {
        "items": DynamicTable("items", keys, DIM, seed=3, stddev=0.5),
        "users": DynamicTable("users", keys, DIM, seed=3, stddev=None),
    }
    training = Training(tables, OPTIMIZERS["sgd"])
    assert len(training.keyed) == 1
    training.run(build_toy_batches(BATCH, 2), 2)
    assert tables["items"].vocabulary_size == tables["users"].vocabulary_size
    assert len(tables["users"].rows.numpy()) == len(tables["items"].rows.numpy()) > 2

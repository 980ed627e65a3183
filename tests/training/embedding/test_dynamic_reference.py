"""Rows of a dynamic table against dictionaries of float64, over batches of any keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from training.embedding.dynamic_table import DynamicTable
from training.embedding.key_mapping import (
    ARRIVALS,
    KeyedFeatures,
    admit_arrivals,
    map_keys,
    plan_keyed_features,
)
from training.embedding.key_space import KeySpace, reading_rows
from training.embedding.lazy_optimizer import LazyOptimizer
from training.embedding.rules import FTRL, SGD, Adagrad, Adam, SparseRule

Vector = np.ndarray
BATCH, DIM, RATE = 4, 3, 0.1
# Few values, so that keys come again, padding, null, and the ends of the range.
KEYS = st.one_of(st.integers(-2, 4), st.sampled_from([-(2**63), 2**63 - 1, 2**62]))
BATCHES = st.lists(st.lists(KEYS, min_size=BATCH, max_size=BATCH), min_size=4, max_size=10)


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
    before = state.get("sum", np.full(DIM, 0.1))
    state["sum"] = before + gradient**2
    sigma = (np.sqrt(state["sum"]) - np.sqrt(before)) / RATE
    state["linear"] = state.get("linear", 0.0) + gradient - sigma * row
    shrunk = np.clip(state["linear"], -1e-3, 1e-3) - state["linear"]
    return shrunk / ((np.sqrt(state["sum"]) + 0.1) / RATE + 2 * 1e-2)


RULES: dict[str, tuple[SparseRule, Callable[..., Vector]]] = {
    "sgd": (SGD(), move_by_sgd),
    "adagrad": (Adagrad(), move_by_adagrad),
    "adam": (Adam(), move_by_adam),
    "ftrl": (FTRL(l1=1e-3, l2=1e-2, beta=0.1), move_by_ftrl),
}


def build_step(
    table: DynamicTable, keyed: tuple[KeyedFeatures, ...], rule: SparseRule
) -> Callable[[Mapping[str, Any]], None]:
    """A step whose gradient of a row is the sum of what each lookup asks for, and the row."""
    optimizer = LazyOptimizer([table.rows], rule, RATE)

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
@settings(deadline=None, max_examples=3)  # each example traces a step
@given(
    batches=BATCHES,
    max_rows=st.one_of(st.none(), st.integers(1, 5)),
    capacity=st.integers(1, 8),
    seed=st.integers(0, 2**31),
)
def test_rows_are_those_of_a_dictionary(name, batches, max_rows, capacity, seed) -> None:
    rule, move = RULES[name]
    space = KeySpace("key", max_rows=max_rows, capacity=capacity)
    table = DynamicTable("key", space, DIM, seed=5, stddev=0.5)
    keyed, expected = plan_keyed_features({"key": table}, {"key": table}), ByDict(table, move)
    asked = np.random.default_rng(seed).normal(size=(len(batches), BATCH, DIM)).astype(np.float32)
    dataset = tf.data.Dataset.from_tensor_slices(
        {"key": np.array(batches, np.int64), "asked": asked}
    )
    step = build_step(table, keyed, rule)
    for number, batch in enumerate(map_keys(dataset, keyed)):
        step(batch)
        expected.train(batches[number], asked[number], number + 1)
        assert space.read_keys().tolist() == list(expected.rows)
        rows = np.array(list(expected.rows.values())).reshape(-1, DIM)
        np.testing.assert_allclose(table.rows.numpy()[2:], rows, rtol=2e-4, atol=2e-5)
        assert not table.rows.numpy()[:2].any()

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.training import OptimizerConfig
from training.embedding.lazy_optimizer import LazyOptimizer
from training.embedding.rules import FTRL, SGD, Adagrad, Adam, SparseRule, build_rule

ROWS, DIM, RATE = 9, 3, 0.07
Row = np.ndarray
State = dict[str, np.ndarray]


def paper_sgd(row: Row, gradient: Row, state: State, t: int) -> Row:
    return row - RATE * gradient


def paper_adagrad(row: Row, gradient: Row, state: State, t: int) -> Row:
    state["sum"] = state.get("sum", np.full(DIM, 0.3)) + gradient**2
    return row - RATE * gradient / np.sqrt(state["sum"] + 1e-6)


def paper_adam(row: Row, gradient: Row, state: State, t: int) -> Row:
    state["m"] = 0.8 * state.get("m", np.zeros(DIM)) + 0.2 * gradient
    state["v"] = 0.95 * state.get("v", np.zeros(DIM)) + 0.05 * gradient**2
    size = RATE * np.sqrt(1 - 0.95**t) / (1 - 0.8**t)
    return row - size * state["m"] / (np.sqrt(state["v"]) + 1e-6)


def paper_ftrl(row: Row, gradient: Row, state: State, t: int) -> Row:
    """Algorithm 1 of McMahan et al. 2013, coordinate by coordinate; beta 0.2, l1 0.05, l2 0.1."""
    n = state.get("n", np.full(DIM, 0.3))
    z = state.get("z", np.zeros(DIM))
    sigma = (np.sqrt(n + gradient**2) - np.sqrt(n)) / RATE
    state["z"] = z + gradient - sigma * row
    state["n"] = n + gradient**2
    new = np.zeros(DIM)
    for i in range(DIM):
        if abs(state["z"][i]) > 0.05:
            shrunk = state["z"][i] - np.sign(state["z"][i]) * 0.05
            new[i] = -shrunk / ((0.2 + np.sqrt(state["n"][i])) / RATE + 0.1)
    return new


@dataclass(frozen=True)
class Case:
    rule: SparseRule
    paper: Callable[[Row, Row, State, int], Row]
    peer: Callable[[], keras.optimizers.Optimizer]


CASES = {
    "sgd": Case(SGD(), paper_sgd, lambda: keras.optimizers.SGD(RATE)),
    "adagrad": Case(
        Adagrad(0.3, 1e-6),
        paper_adagrad,
        lambda: keras.optimizers.Adagrad(RATE, initial_accumulator_value=0.3, epsilon=1e-6),
    ),
    "adam": Case(
        Adam(0.8, 0.95, 1e-6),
        paper_adam,
        lambda: keras.optimizers.Adam(RATE, beta_1=0.8, beta_2=0.95, epsilon=1e-6),
    ),
    # The paper's lambda_2 stands before half the squared norm, Keras' before all of it.
    "ftrl": Case(
        FTRL(-0.5, 0.3, 0.05, 0.05, 0.2),
        paper_ftrl,
        lambda: keras.optimizers.Ftrl(
            RATE,
            initial_accumulator_value=0.3,
            l1_regularization_strength=0.05,
            l2_regularization_strength=0.05,
            beta=0.2,
        ),
    ),
}
KINDS = sorted(CASES)


def first_rows(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(ROWS, DIM)).astype(np.float32)


def build(kind: str, start: np.ndarray) -> tuple[tf.Variable, LazyOptimizer]:
    table = tf.Variable(start)
    return table, LazyOptimizer([table], CASES[kind].rule, RATE)


def slices(ids: np.ndarray, values: np.ndarray) -> tf.IndexedSlices:
    return tf.IndexedSlices(tf.constant(values), tf.constant(ids), [ROWS, DIM])


def draw_step(rng: np.random.Generator, batch: int) -> tuple[np.ndarray, np.ndarray]:
    return rng.integers(ROWS, size=batch), rng.normal(size=(batch, DIM)).astype(np.float32)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**16), count=st.integers(1, 5), batch=st.integers(1, 25))
def test_equals_the_paper(kind: str, seed: int, count: int, batch: int) -> None:
    rng, start = np.random.default_rng(seed), first_rows(seed)
    table, optimizer = build(kind, start)
    expected = start.astype(np.float64)
    states: dict[int, State] = {row: {} for row in range(ROWS)}
    for t in range(1, count + 1):
        ids, values = draw_step(rng, batch)
        optimizer.apply([slices(ids, values)], [table])
        for row in set(ids.tolist()):
            gradient = values[ids == row].astype(np.float64).sum(axis=0)
            expected[row] = CASES[kind].paper(expected[row], gradient, states[row], t)
    np.testing.assert_allclose(table.numpy(), expected, rtol=1e-4, atol=3e-5)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 2**16), count=st.integers(1, 5))
def test_touching_every_row_equals_keras(kind: str, seed: int, count: int) -> None:
    rng, start = np.random.default_rng(seed), first_rows(seed)
    table, optimizer = build(kind, start)
    dense, peer = tf.Variable(start), CASES[kind].peer()
    for _ in range(count):
        gradient = rng.normal(size=(ROWS, DIM)).astype(np.float32)
        order = rng.permutation(ROWS)
        halves = np.concatenate([order, order]), np.concatenate([gradient[order] / 2] * 2)
        optimizer.apply([slices(*halves)], [table])
        peer.apply([tf.constant(gradient)], [dense])
    np.testing.assert_allclose(table.numpy(), dense.numpy(), rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_no_id_names_keep_every_bit(kind: str) -> None:
    start = first_rows(0)
    table, optimizer = build(kind, start)
    before = {name: variables[0].numpy() for name, variables in optimizer.slots.items()}
    optimizer.apply([slices(np.array([2, 5, 2]), np.ones((3, DIM), np.float32))], [table])
    rest = [row for row in range(ROWS) if row not in (2, 5)]
    np.testing.assert_array_equal(table.numpy()[rest], start[rest])
    assert (table.numpy()[[2, 5]] != start[[2, 5]]).all()
    for name, variables in optimizer.slots.items():
        np.testing.assert_array_equal(variables[0].numpy()[rest], before[name][rest])


@pytest.mark.parametrize("kind", KINDS)
def test_goes_on_from_a_checkpoint_bit_for_bit(kind: str, tmp_path) -> None:
    steps = [draw_step(np.random.default_rng(seed), 8) for seed in range(6)]
    table, optimizer = build(kind, first_rows(0))
    for step, (ids, values) in enumerate(steps):
        if step == 3:
            checkpoint = tf.train.Checkpoint(table=table, optimizer=optimizer)
            path = checkpoint.save(str(tmp_path / "c"))
        optimizer.apply([slices(ids, values)], [table])
    other, restored = build(kind, first_rows(1))
    checkpoint = tf.train.Checkpoint(table=other, optimizer=restored)
    checkpoint.restore(path).assert_consumed()
    for ids, values in steps[3:]:
        restored.apply([slices(ids, values)], [other])
    np.testing.assert_array_equal(other.numpy(), table.numpy())
    assert int(restored.iterations) == 6
    for name, variables in optimizer.slots.items():
        np.testing.assert_array_equal(restored.slots[name][0].numpy(), variables[0].numpy())


def test_l1_makes_exact_zeros() -> None:
    table = tf.Variable(first_rows(0) * 0.01)
    optimizer = LazyOptimizer([table], FTRL(l1=10.0), RATE)
    gradient = np.full((2, DIM), 0.5, np.float32)
    optimizer.apply([slices(np.array([1, 4]), gradient)], [table])
    assert not table.numpy()[[1, 4]].any()


def test_a_config_names_the_rule() -> None:
    def rule(**sparse: object) -> SparseRule:
        return build_rule(OptimizerConfig.model_validate({"beta_1": 0.5, "sparse": sparse}))

    assert rule() == Adam(0.5, 0.999, 1e-7)
    assert rule(kind="adam", beta_1=0.7, epsilon=1e-3) == Adam(0.7, 0.999, 1e-3)
    assert rule(kind="sgd") == SGD()
    assert rule(kind="adagrad", initial_accumulator=0.4) == Adagrad(0.4, 1e-7)
    assert rule(kind="ftrl", l1=0.2, beta=1.0) == FTRL(-0.5, 0.1, 0.2, 0.0, 1.0)


@pytest.mark.parametrize("power", [-0.5, -0.7, 0.0])
def test_ftrl_with_another_power_equals_keras(power: float) -> None:
    start = first_rows(3)
    table, dense = tf.Variable(start), tf.Variable(start)
    optimizer = LazyOptimizer([table], FTRL(learning_rate_power=power, l1=0.01), RATE)
    peer = keras.optimizers.Ftrl(RATE, learning_rate_power=power, l1_regularization_strength=0.01)
    for seed in range(3):
        gradient = first_rows(seed + 10)
        optimizer.apply([slices(np.arange(ROWS), gradient)], [table])
        peer.apply([tf.constant(gradient)], [dense])
    np.testing.assert_allclose(table.numpy(), dense.numpy(), rtol=1e-4, atol=2e-6)

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.training.train import DevicesConfig
from training.distribution.strategy import build_strategy
from training.embedding.lazy_optimizer import (
    LazyAdagrad,
    LazyAdam,
    LazyFTRL,
    LazyOptimizer,
    LazyRule,
    LazySGD,
    TableRule,
)
from training.embedding.static_table import read_rows

ROWS, DIM, RATE = 9, 3, 0.07
Row = np.ndarray
State = dict[str, np.ndarray]


# The rate falls: in step t it is a t-th of what it was.
def paper_sgd(row: Row, gradient: Row, state: State, t: int) -> Row:
    return row - RATE / t * gradient


def paper_adagrad(row: Row, gradient: Row, state: State, t: int) -> Row:
    state["sum"] = state.get("sum", np.full(DIM, 0.3)) + gradient**2
    return row - RATE / t * gradient / np.sqrt(state["sum"] + 1e-6)


def paper_adam(row: Row, gradient: Row, state: State, t: int) -> Row:
    state["m"] = 0.8 * state.get("m", np.zeros(DIM)) + 0.2 * gradient
    state["v"] = 0.95 * state.get("v", np.zeros(DIM)) + 0.05 * gradient**2
    size = RATE / t * np.sqrt(1 - 0.95**t) / (1 - 0.8**t)
    return row - size * state["m"] / (np.sqrt(state["v"]) + 1e-6)


def paper_ftrl(row: Row, gradient: Row, state: State, t: int) -> Row:
    """Algorithm 1 of McMahan et al. 2013; beta 0.2, l1 0.05, l2 0.1.

    The sum of all sigma is one over the rate of a number, as of its last update (section 3).
    """
    n, z = state.get("n", np.full(DIM, 0.3)), state.get("z", np.zeros(DIM))
    before = state.get("sigmas", (0.2 + np.sqrt(n)) / (RATE / t))
    n = n + gradient**2
    sigmas = (0.2 + np.sqrt(n)) / (RATE / t)
    z = z + gradient - (sigmas - before) * row
    state |= {"n": n, "z": z, "sigmas": sigmas}
    shrunk = np.sign(z) * np.maximum(np.abs(z) - 0.05, 0.0)
    return -shrunk / (sigmas + 0.1)


Paper = Callable[[Row, Row, State, int], Row]
CASES: dict[str, tuple[LazyRule, Paper]] = {
    "sgd": (LazySGD(), paper_sgd),
    "adagrad": (LazyAdagrad(0.3, 1e-6), paper_adagrad),
    "adam": (LazyAdam(0.8, 0.95, 1e-6), paper_adam),
    # The paper's lambda_2 stands before half the squared norm, ours (and Keras') before all of it.
    "ftrl": (LazyFTRL(-0.5, 0.3, 0.05, 0.05, 0.2, rate_changes=True), paper_ftrl),
}


def first_rows(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(ROWS, DIM)).astype(np.float32)


def slices(ids: np.ndarray, values: np.ndarray) -> tf.IndexedSlices:
    return tf.IndexedSlices(tf.constant(values), tf.constant(ids), [ROWS, DIM])


@pytest.mark.parametrize("kind", CASES)
@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**16), count=st.integers(1, 5), batch=st.integers(1, 25))
def test_equals_the_paper_and_leaves_every_bit_of_other_rows(
    kind: str, seed: int, count: int, batch: int
) -> None:
    rng, start = np.random.default_rng(seed), first_rows(seed)
    rule, paper = CASES[kind]
    table = tf.Variable(start)
    rate = TableRule(rule, lambda step: RATE / tf.cast(step + 1, tf.float32))
    optimizer = LazyOptimizer([table], rate)
    expected = start.astype(np.float64)
    states: dict[int, State] = {}
    for t in range(1, count + 1):
        ids = rng.integers(ROWS, size=batch)
        values = rng.normal(size=(batch, DIM)).astype(np.float32)
        optimizer.apply([slices(ids, values)], [table])
        for row in set(ids.tolist()):
            gradient = values[ids == row].astype(np.float64).sum(axis=0)
            expected[row] = paper(expected[row], gradient, states.setdefault(row, {}), t)
    np.testing.assert_allclose(table.numpy(), expected, rtol=1e-4, atol=3e-5)
    rest = sorted(set(range(ROWS)) - set(states))
    np.testing.assert_array_equal(table.numpy()[rest], start[rest])
    for name, (slot,) in optimizer.slots.items():
        np.testing.assert_array_equal(slot.numpy()[rest], np.float32(rule.slots[name]))


def test_l1_makes_exact_zeros() -> None:
    table = tf.Variable(first_rows(0) * 0.01)
    optimizer = LazyOptimizer([table], TableRule(LazyFTRL(l1=10.0), RATE))
    gradient = np.full((2, DIM), 0.5, np.float32)
    optimizer.apply([slices(np.array([1, 4]), gradient)], [table])
    assert not table.numpy()[[1, 4]].any()


@pytest.mark.parametrize(
    "rule", [LazySGD(), LazyAdagrad(), LazyAdam(), LazyFTRL()], ids=lambda r: type(r).__name__
)
@pytest.mark.parametrize("replicas", [1, 2])
def test_the_cost_of_a_step_does_not_grow_with_the_vocabulary(rule, replicas: int) -> None:
    """No operation of a step has an output as long as the table, nor reads the table as a whole."""
    vocabulary = 1_000_003
    strategy = build_strategy(DevicesConfig(cpu_replicas=replicas))
    with strategy.scope():
        table = tf.Variable(tf.zeros([vocabulary, 2]))
        optimizer = LazyOptimizer([table], TableRule(rule, RATE))

    @tf.function
    def run(ids: tf.Tensor) -> None:
        def step(ids: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                tape.watch(table)
                loss = tf.reduce_sum(tf.square(read_rows(table, ids)))
            optimizer.apply([tape.gradient(loss, table)], [table])

        for _ in tf.range(2):
            strategy.run(tf.autograph.experimental.do_not_convert(step), args=(ids,))

    graph = run.get_concrete_function(tf.TensorSpec([64], tf.int64)).graph
    functions = [graph, *(f.graph for f in graph._functions.values())]
    operations = [op for g in functions for op in g.get_operations()]
    assert "ResourceScatterUpdate" in {op.type for op in operations}
    assert not [
        op.name
        for op in operations
        for output in op.outputs
        if output.dtype != tf.resource and output.shape.rank and output.shape[0] == vocabulary
    ]


@pytest.mark.parametrize("power", [-0.5, -0.7])
def test_ftrl_holds_rows_that_came_from_elsewhere(power: float) -> None:
    start = first_rows(3)
    start[4] = 0.0
    table = tf.Variable(start)
    rule = LazyFTRL(power, 0.3, 0.05, 0.05, 0.2)
    optimizer = LazyOptimizer([table], TableRule(rule, RATE))
    came = np.array([1, 4, 7])
    optimizer.hold_rows(0, table, came, RATE)
    ids = np.array([1, 2, 4, 7])
    optimizer.apply([slices(ids, np.zeros([4, DIM], np.float32))], [table])
    np.testing.assert_allclose(table.numpy()[came], start[came], rtol=1e-5, atol=1e-6)
    assert not table.numpy()[2].any()  # A row that began here is computed of its gradients alone.
    optimizer.apply([slices(came, np.full([3, DIM], 1e-3, np.float32))], [table])
    quadratic = (0.3**-power + 0.2) / RATE + 0.1
    moved = start[[1, 7]] - 1e-3 / quadratic
    np.testing.assert_allclose(table.numpy()[[1, 7]], moved, rtol=1e-3)

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.training.optimizer import OptimizerConfig
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
    build_lazy_rule,
    sum_repeated_rows,
)
from training.embedding.static_table import read_rows

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


Paper = Callable[[Row, Row, State, int], Row]
CASES: dict[str, tuple[LazyRule, Paper]] = {
    "sgd": (LazySGD(), paper_sgd),
    "adagrad": (LazyAdagrad(0.3, 1e-6), paper_adagrad),
    "adam": (LazyAdam(0.8, 0.95, 1e-6), paper_adam),
    # The paper's lambda_2 stands before half the squared norm, ours (and Keras') before all of it.
    "ftrl": (LazyFTRL(-0.5, 0.3, 0.05, 0.05, 0.2), paper_ftrl),
}
KINDS = sorted(CASES)


def first_rows(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(ROWS, DIM)).astype(np.float32)


def build(kind: str, start: np.ndarray) -> tuple[tf.Variable, LazyOptimizer]:
    table = tf.Variable(start)
    return table, LazyOptimizer([table], TableRule(CASES[kind][0], RATE))


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
            expected[row] = CASES[kind][1](expected[row], gradient, states[row], t)
    np.testing.assert_allclose(table.numpy(), expected, rtol=1e-4, atol=3e-5)


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


def test_l1_makes_exact_zeros() -> None:
    table = tf.Variable(first_rows(0) * 0.01)
    optimizer = LazyOptimizer([table], TableRule(LazyFTRL(l1=10.0), RATE))
    gradient = np.full((2, DIM), 0.5, np.float32)
    optimizer.apply([slices(np.array([1, 4]), gradient)], [table])
    assert not table.numpy()[[1, 4]].any()


@pytest.mark.parametrize(
    ("sparse", "rule"),
    [
        ({}, LazyAdam(0.9, 0.999, 1e-3)),
        ({"kind": "sgd"}, LazySGD()),
        ({"kind": "adagrad", "initial_accumulator": 0.4}, LazyAdagrad(0.4)),
        ({"kind": "ftrl", "l1": 0.2, "l2": 0.3}, LazyFTRL(-0.5, 0.1, 0.2, 0.3)),
    ],
)
def test_a_config_names_the_rule(sparse, rule) -> None:
    config = OptimizerConfig.model_validate({"epsilon": 1e-3, "sparse": sparse})
    assert build_lazy_rule(config, config.sparse) == rule


def test_a_zero_gradient_moves_no_fresh_row_and_none_leaves_all() -> None:
    start = np.zeros((ROWS, DIM), np.float32)
    table, optimizer = build("adam", start)
    optimizer.apply([slices(np.array([0, 0, 3]), np.zeros((3, DIM), np.float32))], [table])
    optimizer.apply([None], [table])
    assert not table.numpy().any()
    assert int(optimizer.iterations) == 2


def test_the_schedule_sees_the_zero_based_step() -> None:
    start = np.ones((ROWS, DIM), np.float32)
    table = tf.Variable(start)
    rate = TableRule(LazySGD(), lambda step: tf.where(step == 0, 0.0, 1.0))
    optimizer = LazyOptimizer([table], rate)
    gradient = slices(np.arange(ROWS), start)
    optimizer.apply([gradient], [table])
    np.testing.assert_array_equal(table.numpy(), start)
    optimizer.apply([gradient], [table])
    assert not table.numpy().any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("overlap", [True, False])
def test_two_replicas_do_what_one_does(kind: str, overlap: bool) -> None:
    start, rng = first_rows(0), np.random.default_rng(3)
    steps = [draw_step(rng, 8) for _ in range(3)]
    if overlap:
        steps = [(ids % 4, values) for ids, values in steps]
    alone, optimizer = build(kind, start)
    for ids, values in steps:
        optimizer.apply([slices(ids, values)], [alone])
    strategy = build_strategy(DevicesConfig(cpu_replicas=2))
    with strategy.scope():
        table, optimizer = build(kind, start)
    all_ids, all_values = (tf.constant(np.stack(part)) for part in zip(*steps, strict=True))

    def step(index: tf.Tensor) -> None:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        rows = tf.range(4) + 4 * replica
        share = [tf.gather(part[index], rows) for part in (all_values, all_ids)]
        optimizer.apply([tf.IndexedSlices(*share, tf.constant([ROWS, DIM]))], [table])

    @tf.function
    def run() -> None:
        for index in tf.range(3):
            strategy.run(tf.autograph.experimental.do_not_convert(step), args=(index,))

    run()
    copies = [copy.numpy() for copy in strategy.experimental_local_results(table)]
    np.testing.assert_array_equal(copies[0], copies[1])
    np.testing.assert_allclose(copies[0], alone.numpy(), rtol=1e-4, atol=2e-5)


def test_sum_repeated_rows() -> None:
    ids = np.array([5, 2, 5, 5])
    values = np.arange(12, dtype=np.float32).reshape(4, DIM)
    merged = sum_repeated_rows(slices(ids, values))
    assert merged.indices.numpy().tolist() == [5, 2]
    np.testing.assert_array_equal(merged.values.numpy()[0], values[[0, 2, 3]].sum(axis=0))
    np.testing.assert_array_equal(merged.values.numpy()[1], values[1])


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

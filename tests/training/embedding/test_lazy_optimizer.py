from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from conf.training import DevicesConfig
from training.embedding.lazy_optimizer import LazyOptimizer, sum_repeated_rows
from training.embedding.rules import FTRL, SGD, Adagrad, Adam
from training.embedding.table import read_rows
from training.strategy import build_strategy

ROWS, DIM = 12, 4
RATE, BETA_1, BETA_2, EPSILON = 0.05, 0.8, 0.95, 1e-7


def reference_adam(table: np.ndarray, steps: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Lazy Adam in float64, row by row, straight from the paper."""
    table = table.astype(np.float64)
    first, second = np.zeros_like(table), np.zeros_like(table)
    for t, (ids, values) in enumerate(steps, start=1):
        for row in set(ids.tolist()):
            gradient = values[ids == row].astype(np.float64).sum(axis=0)
            first[row] = BETA_1 * first[row] + (1 - BETA_1) * gradient
            second[row] = BETA_2 * second[row] + (1 - BETA_2) * gradient**2
            step = RATE * np.sqrt(1 - BETA_2**t) / (1 - BETA_1**t)
            table[row] -= step * first[row] / (np.sqrt(second[row]) + EPSILON)
    return table


def build(start: np.ndarray, rate=RATE) -> tuple[tf.Variable, LazyOptimizer]:
    table = tf.Variable(start)
    optimizer = LazyOptimizer([table], Adam(BETA_1, BETA_2, EPSILON), rate)
    return table, optimizer


def slices(ids: np.ndarray, values: np.ndarray) -> tf.IndexedSlices:
    return tf.IndexedSlices(tf.constant(values), tf.constant(ids), [ROWS, DIM])


def draw_steps(
    seed: int, count: int, batch: int, rows: int = ROWS
) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [
        (rng.integers(rows, size=batch), rng.normal(size=(batch, DIM)).astype(np.float32))
        for _ in range(count)
    ]


def test_a_zero_gradient_moves_no_fresh_row() -> None:
    start = np.zeros((ROWS, DIM), np.float32)
    table, optimizer = build(start)
    optimizer.apply([slices(np.array([0, 0, 3]), np.zeros((3, DIM), np.float32))], [table])
    assert not table.numpy().any()


def test_a_table_without_gradient_is_left_out() -> None:
    start = np.ones((ROWS, DIM), np.float32)
    table, optimizer = build(start)
    optimizer.apply([None], [table])
    np.testing.assert_array_equal(table.numpy(), start)
    assert int(optimizer.iterations) == 1


def test_the_schedule_sees_the_zero_based_step() -> None:
    start = np.ones((ROWS, DIM), np.float32)
    table, optimizer = build(start, rate=lambda step: tf.where(step == 0, 0.0, 1.0))
    gradient = slices(np.arange(ROWS), np.ones((ROWS, DIM), np.float32))
    optimizer.apply([gradient], [table])
    np.testing.assert_array_equal(table.numpy(), start)
    optimizer.apply([gradient], [table])
    assert (table.numpy() != start).all()


@pytest.mark.parametrize("overlap", [True, False])
def test_two_replicas_do_what_one_does(overlap: bool) -> None:
    start = np.random.default_rng(0).normal(size=(ROWS, DIM)).astype(np.float32)
    steps = draw_steps(3, 3, 8, rows=4 if overlap else ROWS)
    strategy = build_strategy(DevicesConfig(cpu_replicas=2))
    with strategy.scope():
        table, optimizer = build(start)
    all_ids = tf.constant(np.stack([ids for ids, _ in steps]))
    all_values = tf.constant(np.stack([values for _, values in steps]))

    def step(index: tf.Tensor) -> None:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        rows = tf.range(4) + 4 * replica
        gradient = tf.IndexedSlices(
            tf.gather(all_values[index], rows),
            tf.gather(all_ids[index], rows),
            tf.constant([ROWS, DIM]),
        )
        optimizer.apply([gradient], [table])

    @tf.function
    def run() -> None:
        for index in tf.range(3):
            strategy.run(tf.autograph.experimental.do_not_convert(step), args=(index,))

    run()
    copies = [copy.numpy() for copy in strategy.experimental_local_results(table)]
    np.testing.assert_array_equal(copies[0], copies[1])
    np.testing.assert_allclose(copies[0], reference_adam(start, steps), rtol=1e-4, atol=2e-5)


def test_sum_repeated_rows() -> None:
    ids = np.array([5, 2, 5, 5])
    values = np.arange(16, dtype=np.float32).reshape(4, 4)
    merged = sum_repeated_rows(slices(ids, values))
    assert merged.indices.numpy().tolist() == [5, 2]
    np.testing.assert_array_equal(merged.values.numpy()[0], values[[0, 2, 3]].sum(axis=0))
    np.testing.assert_array_equal(merged.values.numpy()[1], values[1])


@pytest.mark.parametrize("rule", [SGD(), Adagrad(), Adam(), FTRL()], ids=lambda r: type(r).__name__)
@pytest.mark.parametrize("replicas", [1, 2])
def test_the_cost_of_a_step_does_not_grow_with_the_vocabulary(rule, replicas: int) -> None:
    """No operation of a step has an output as long as the table, nor reads the table as a whole."""
    vocabulary = 1_000_003
    strategy = build_strategy(DevicesConfig(cpu_replicas=replicas))
    with strategy.scope():
        table = tf.Variable(tf.zeros([vocabulary, 2]))
        optimizer = LazyOptimizer([table], rule, RATE, clip_value=0.5)

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


def test_the_summed_gradient_is_clipped_not_its_parts() -> None:
    start = np.zeros((ROWS, DIM), np.float32)
    table = tf.Variable(start)
    optimizer = LazyOptimizer([table], SGD(), 1.0, clip_value=1.5)
    values = np.array([[1, 1, -1, 0.5]] * 3, np.float32) * np.array([[1], [1], [0.25]], np.float32)
    optimizer.apply([slices(np.array([4, 4, 7]), values)], [table])
    np.testing.assert_array_equal(table.numpy()[4], [-1.5, -1.5, 1.5, -1.0])
    np.testing.assert_array_equal(table.numpy()[7], [-0.25, -0.25, 0.25, -0.125])

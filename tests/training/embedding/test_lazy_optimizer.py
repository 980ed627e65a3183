from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.training import DevicesConfig
from training.embedding.lazy_optimizer import LazyOptimizer, sum_repeated_rows
from training.embedding.rules import Adam
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


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**16), count=st.integers(1, 5), batch=st.integers(1, 30))
def test_equals_the_reference(seed: int, count: int, batch: int) -> None:
    start = np.random.default_rng(seed).normal(size=(ROWS, DIM)).astype(np.float32)
    table, optimizer = build(start)
    steps = draw_steps(seed, count, batch)
    for ids, values in steps:
        optimizer.apply([slices(ids, values)], [table])
    np.testing.assert_allclose(table.numpy(), reference_adam(start, steps), rtol=1e-4, atol=2e-5)


def test_touching_every_row_equals_keras_adam() -> None:
    start = np.random.default_rng(0).normal(size=(ROWS, DIM)).astype(np.float32)
    table, optimizer = build(start)
    dense = tf.Variable(start)
    keras_adam = keras.optimizers.Adam(RATE, beta_1=BETA_1, beta_2=BETA_2, epsilon=EPSILON)
    for step in range(4):
        gradient = np.random.default_rng(step).normal(size=(ROWS, DIM)).astype(np.float32)
        optimizer.apply([slices(np.arange(ROWS), gradient)], [table])
        keras_adam.apply([tf.constant(gradient)], [dense])
    np.testing.assert_allclose(table.numpy(), dense.numpy(), rtol=1e-5, atol=1e-6)


def test_rows_that_no_id_names_keep_every_bit() -> None:
    start = np.random.default_rng(0).normal(size=(ROWS, DIM)).astype(np.float32)
    table, optimizer = build(start)
    for ids, values in draw_steps(1, 5, 20, rows=7):
        optimizer.apply([slices(ids, values)], [table])
    np.testing.assert_array_equal(table.numpy()[7:], start[7:])
    assert (table.numpy()[:7] != start[:7]).any(axis=1).all()
    for moments in (optimizer.slots["first_moment"][0], optimizer.slots["second_moment"][0]):
        assert not moments.numpy()[7:].any()


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


def test_the_cost_of_a_step_does_not_grow_with_the_vocabulary() -> None:
    """No operation of a step has an output as long as the table."""
    vocabulary = 1_000_003
    table = tf.Variable(tf.zeros([vocabulary, 2]))
    optimizer = LazyOptimizer([table], Adam(), RATE)

    @tf.function
    def step(ids: tf.Tensor, values: tf.Tensor) -> None:
        optimizer.apply([tf.IndexedSlices(values, ids, [vocabulary, 2])], [table])

    graph = step.get_concrete_function(
        tf.TensorSpec([64], tf.int64), tf.TensorSpec([64, 2], tf.float32)
    ).graph
    sizes = [
        output.shape[0]
        for op in graph.get_operations()
        for output in op.outputs
        if output.shape.rank and output.dtype != tf.resource
    ]
    assert vocabulary not in sizes

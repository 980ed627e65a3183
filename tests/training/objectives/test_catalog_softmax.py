"""Softmax over the catalogue in blocks: beside a plain one, and the memory it takes."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import example, given, settings
from hypothesis import strategies as st

from training.networks.layers import matmul_rows
from training.objectives.item_losses import MASKED_LOGIT, compute_catalog_softmax

DIM, BLOCK, TEMPERATURE = 3, 4, 0.3


def compute_plain(
    queries: tf.Tensor, items: tf.Tensor, positions: tf.Tensor, masked: Any, rows: Any, dtype: Any
) -> tf.Tensor:
    """The whole matrix of scores, and TensorFlow's own gradient."""
    scores = matmul_rows(queries, items, dtype) / TEMPERATURE
    if masked is not None:
        is_own = tf.range(items.shape[0], dtype=tf.int64)[None, :] == positions[:, None]
        scores = tf.where(tf.gather(masked, rows) & ~is_own, MASKED_LOGIT, scores)
    labels = tf.maximum(positions, 0)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=scores)
    return tf.where(positions < 0, 0.0, losses)


compute_blocks = partial(compute_catalog_softmax, temperature=TEMPERATURE, block=BLOCK)


def draw(seed: int, count: int, size: int, is_masked: bool = True) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    rows = np.sort(rng.integers(0, 3, count))
    return (
        tf.constant(rng.normal(size=(count, DIM)), tf.float32),
        tf.constant(rng.normal(size=(size, DIM)), tf.float32),
        tf.constant(rng.integers(-1, size, count), tf.int64),
        tf.constant(rng.random((3, size)) < 0.5) if is_masked else None,
        tf.constant(rows, tf.int64),
    )


def differentiate(compute: Any, drawn: tuple[Any, ...], dtype: tf.DType = tf.float32) -> list[Any]:
    """Losses and the gradients of queries and items, of losses that weigh differently."""
    weights = tf.cast(tf.range(drawn[0].shape[0]), tf.float32) - 1.5
    with tf.GradientTape() as tape:
        tape.watch(drawn[:2])
        losses = compute(*drawn, dtype=dtype)
        total = tf.reduce_sum(weights * losses)
    return [losses, *tape.gradient(total, drawn[:2])]


@settings(deadline=None, max_examples=30)
@example(seed=30798, count=6, size=7, is_masked=False)  # Targets that are nearly sure.
@given(
    seed=st.integers(0, 2**16),
    count=st.integers(1, 6),
    size=st.integers(1, 3 * BLOCK + 1),
    is_masked=st.booleans(),
)
def test_blocks_give_the_loss_and_the_gradients_of_a_plain_softmax(
    seed: int, count: int, size: int, is_masked: bool
) -> None:
    drawn = draw(seed, count, size, is_masked)
    found, expected = differentiate(compute_blocks, drawn), differentiate(compute_plain, drawn)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dtype", "close"), [(tf.bfloat16, 0.06), (tf.float16, 0.01)])
def test_half_precision_is_that_of_a_plain_softmax(dtype: tf.DType, close: float) -> None:
    drawn = draw(3, 6, 2 * BLOCK + 3)
    found, expected = (
        differentiate(compute, drawn, dtype) for compute in (compute_blocks, compute_plain)
    )
    exact = differentiate(compute_plain, drawn)
    for one, other, best in zip(found, expected, exact, strict=True):
        scale = np.abs(best).max()
        assert one.dtype == tf.float32
        assert np.abs(one - best).max() < close * scale
        assert np.abs(other - best).max() < close * scale
    assert any(not np.array_equal(one, best) for one, best in zip(found, exact, strict=True))


def test_large_scores_stay_finite() -> None:
    """The highest score stands in another block than the target, and all but one are masked."""
    items = tf.constant(np.linspace(-400, 400, 11)[:, None], tf.float32)
    masked = tf.constant(np.arange(11)[None, :] != 10)
    for hidden in (None, masked):
        drawn = (tf.ones([1, 1]), items, tf.constant([2], tf.int64), hidden, tf.constant([0]))
        losses, *gradients = differentiate(compute_blocks, drawn)
        np.testing.assert_allclose(losses, [640 / TEMPERATURE], rtol=1e-5)
        assert all(np.isfinite(gradient).all() for gradient in gradients)


def test_no_tensor_is_as_large_as_the_matrix_of_scores() -> None:
    count, size = 50, 40 * BLOCK + 1
    drawn = draw(1, count, size, is_masked=False)
    run = tf.function(lambda *each: differentiate(compute_blocks, (*each, None, drawn[4])))
    graph = run.get_concrete_function(*drawn[:3]).graph
    shapes = [o.shape for g in _list_graphs(graph) for op in g.get_operations() for o in op.outputs]
    elements = [shape.num_elements() for shape in shapes if shape.is_fully_defined()]
    assert count * BLOCK in elements  # A block's scores are found, so the loops are looked into.
    assert max(elements) < count * size / 4


def _list_graphs(graph: Any) -> list[Any]:
    """A graph and those of the functions that it calls."""
    inner = [g for name in graph._functions.values() for g in [getattr(name, "graph", None)] if g]
    return [graph, *(found for each in inner for found in _list_graphs(each))]

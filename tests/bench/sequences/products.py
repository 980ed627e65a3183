"""The share of matrix products in a step, and the fastest product that this machine computes."""

from __future__ import annotations

import time
from collections.abc import Sequence

import tensorflow as tf

from tests.bench.train_step.sections import OpTime

PEAK_SIZE, PEAK_ROUNDS = 2048, 8
_PRODUCTS = ("MatMul", "MatMulV2", "Einsum")
"""Ends of the names of kernels, those of oneDNN among them."""


def sum_products(ops: Sequence[OpTime]) -> float:
    """Returns the share of matrix products in the time of all kernels, fused ones among them."""
    products = [op for op in ops if op.kind.endswith(_PRODUCTS)]
    return sum(op.ms_per_step for op in products) / sum(op.ms_per_step for op in ops)


def measure_peak() -> float:
    """Returns the fastest product of two square float32 matrices, FLOP for each CPU-second."""
    matrix = tf.random.stateless_normal([PEAK_SIZE, PEAK_SIZE], [1, 2])
    best = float("inf")
    for _ in range(PEAK_ROUNDS):
        start = time.process_time()
        tf.matmul(matrix, matrix).numpy()
        best = min(best, time.process_time() - start)
    return 2.0 * PEAK_SIZE**3 / best

"""The type that products of matrices are computed in: float32, or half of it in mixed precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import tensorflow as tf

_compute_dtype: ContextVar[tf.DType] = ContextVar("compute_dtype", default=tf.float32)


def compute_dtype() -> tf.DType:
    """Returns the type that layers compute in; float32 outside a training step."""
    return _compute_dtype.get()


@contextmanager
def computing_in(dtype: tf.DType) -> Iterator[None]:
    """Lets the layers that are traced in the block compute in a type.

    Args:
        dtype: float32, float16 or bfloat16.
    """
    token = _compute_dtype.set(dtype)
    try:
        yield
    finally:
        _compute_dtype.reset(token)


def matmul_rows(left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
    """Dot product of each row of one matrix with each of the other, as float32.

    Args:
        left: float32 `[rows, dim]`.
        right: float32 `[columns, dim]`.

    Returns:
        float32 `[rows, columns]`.
    """
    dtype = compute_dtype()
    product = tf.matmul(tf.cast(left, dtype), tf.cast(right, dtype), transpose_b=True)
    return tf.cast(product, tf.float32)

"""Vectors of length one, with a gradient that stays small at the zero vector."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

GRADIENT_FLOOR = 1e-2


@tf.custom_gradient
def normalize_rows(
    vectors: tf.Tensor,
) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    """Divides each row by its L2 norm; a row of zeros stays zeros.

    The gradient of `v / |v|` is the part of the upstream gradient at right angles to `v`, divided
    by `|v|`. Near zero, where a user has no history or an id has no trained row, that division
    would blow one row up a millionfold and drown the rest of the batch, so the norm is not taken
    below `GRADIENT_FLOOR` there. It is not cut to zero: such rows could then never be trained.

    Args:
        vectors: float32 `[batch, dim]`.

    Returns:
        float32 `[batch, dim]`.
    """
    unit = tf.math.l2_normalize(vectors, axis=1)
    norms = tf.norm(vectors, axis=1, keepdims=True)

    def gradient(upstream: tf.Tensor) -> tf.Tensor:
        along = tf.reduce_sum(unit * upstream, axis=1, keepdims=True)
        return (upstream - unit * along) / tf.maximum(norms, GRADIENT_FLOOR)

    return unit, gradient

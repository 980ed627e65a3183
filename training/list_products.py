"""All combinations of the values of several padded lists: `etl.encoders.products` on tensors."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf


def multiply_lists(
    pads: Sequence[tf.Tensor], max_len: int | None
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Combines the values of lists, the last list's varying fastest (as `itertools.product`).

    Args:
        pads: By list, which positions lie behind its end, bool `[batch, length]`.
        max_len: Combinations kept of each row, the first ones; None keeps all.

    Returns:
        By list, the place of each combination's value, int32 `[batch, combinations]`; and which
        combinations are none, bool of the same shape.
    """
    lengths = [
        tf.math.count_nonzero(tf.logical_not(is_pad), axis=1, keepdims=True, dtype=tf.int64)
        for is_pad in pads
    ]
    limit = tf.constant(tf.int32.max if max_len is None else max_len, tf.int64)
    strides = [tf.ones_like(lengths[0])]
    for length in reversed(lengths):
        strides.append(tf.minimum(strides[-1] * length, limit))
    counts, strides = strides[-1], strides[-2::-1]
    width = tf.reduce_max(tf.concat([[0], counts[:, 0]], axis=0))
    place = tf.range(width)[tf.newaxis, :]
    places = [
        tf.cast(place // tf.maximum(stride, 1) % tf.maximum(length, 1), tf.int32)
        for stride, length in zip(strides, lengths, strict=True)
    ]
    return places, place >= counts


def pick_values(
    parts: tuple[tf.Tensor, tf.Tensor], places: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Picks values of lists by their places.

    Args:
        parts: Two tensors of the lists' values, `[batch, length]`; of no length, too.
        places: Places of combinations' values, int32 `[batch, combinations]`.

    Returns:
        Both parts at these places, `[batch, combinations]`.
    """
    # A list of no width gets one value, which is never shown.
    one, other = (tf.pad(part, [[0, 0], [0, 1]]) for part in parts)
    return tf.gather(one, places, batch_dims=1), tf.gather(other, places, batch_dims=1)

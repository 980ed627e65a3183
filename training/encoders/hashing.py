"""Hashed ids on tensors: buckets, 64-bit keys, crosses of fields."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import tensorflow as tf

from conf.encoders.declaration import Operation
from conf.encoders.hashing import CROSS_SEPARATOR, Cross, Hash
from conf.schema import FIRST_TOKEN_ID, OOV_ID
from training.encoders.execution import RawValues, Resources, apply_operation, executions


def hash_text(text: tf.Tensor, buckets: int) -> tf.Tensor:
    """Returns `FIRST_TOKEN_ID` + the bucket of each string, int64 of the same shape."""
    return tf.strings.to_hash_bucket_fast(text, buckets) + FIRST_TOKEN_ID


@executions.declare(Hash)
def _hash(operation: Hash, inputs: Sequence[RawValues], _: Resources) -> tf.Tensor:
    (raw,) = inputs
    if operation.buckets is not None:
        return raw.finish(hash_text(raw.text, operation.buckets), OOV_ID)
    flat = tf.reshape(raw.text, [-1])
    keys = tf.reshape(tf.bitcast(tf.fingerprint(flat), tf.int64), tf.shape(raw.values))
    taken = (keys >= 0) & (keys < FIRST_TOKEN_ID)
    return raw.finish(tf.where(taken, keys + FIRST_TOKEN_ID, keys), OOV_ID)


@executions.declare(Cross)
def _cross(operation: Cross, inputs: Sequence[RawValues], _: Resources) -> tf.Tensor:
    fields = [_cross_field(operation.preparation(number), raw) for number, raw in enumerate(inputs)]
    lists = [raw for raw in inputs if raw.is_pad is not None]
    is_pad = lists[0].is_pad if lists else None
    if len(lists) > 1:
        combined, is_pad = multiply_lists([raw.is_pad for raw in lists], lists[0].max_len)
        positions = iter(combined)
        fields = [
            field if raw.is_pad is None else pick_values(field, next(positions))
            for field, raw in zip(fields, inputs, strict=True)
        ]
    if is_pad is not None:  # scalars stand beside each value
        fields = [
            tuple(part[:, tf.newaxis] for part in field) if raw.is_pad is None else field
            for field, raw in zip(fields, inputs, strict=True)
        ]
    shape = tf.shape(fields[0][0] if is_pad is None else is_pad)
    texts = [tf.broadcast_to(text, shape) for text, _ in fields]
    missing = functools.reduce(tf.logical_or, [is_missing for _, is_missing in fields])
    ids = hash_text(tf.strings.join(texts, separator=CROSS_SEPARATOR), operation.buckets)
    return RawValues(ids, tf.broadcast_to(missing, shape), is_pad).finish(ids, OOV_ID)


def _cross_field(preparation: Operation | None, raw: RawValues) -> tuple[tf.Tensor, tf.Tensor]:
    """Text of a field, and where it is missing."""
    if preparation is None:
        return raw.text, raw.is_null
    ids = apply_operation(preparation, [raw], Resources({}, {}))
    return tf.strings.as_string(ids), tf.equal(ids, OOV_ID)


def multiply_lists(
    pads: Sequence[tf.Tensor], max_len: int | None
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Combines the values of lists, the last list's varying fastest (as `itertools.product`).

    Args:
        pads: By list, which positions lie behind its end, bool `[batch, length]`.
        max_len: Combinations kept of each row, the first ones; None keeps all.

    Returns:
        By list, the position of each combination's value, int32 `[batch, combinations]`; and which
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
    number = tf.range(width)[tf.newaxis, :]
    positions = [
        tf.cast(number // tf.maximum(stride, 1) % tf.maximum(length, 1), tf.int32)
        for stride, length in zip(strides, lengths, strict=True)
    ]
    return positions, number >= counts


def pick_values(
    parts: tuple[tf.Tensor, tf.Tensor], positions: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Picks values of lists by their positions.

    Args:
        parts: Two tensors of the lists' values, `[batch, length]`; of no length, too.
        positions: Positions of combinations' values, int32 `[batch, combinations]`.

    Returns:
        Both parts at these positions, `[batch, combinations]`.
    """
    # A list of no width gets one value, which is never shown.
    one, other = (tf.pad(part, [[0, 0], [0, 1]]) for part in parts)
    return tf.gather(one, positions, batch_dims=1), tf.gather(other, positions, batch_dims=1)

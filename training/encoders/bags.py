"""Encoders of lists on tensors: multi-hot vectors, index spaces, weights, lengths, bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

from conf.encoders.bags import Length, MultiHot, SparseIndices, VectorBytes, Weights
from conf.schema import FIRST_TOKEN_ID, OOV_ID, PAD_ID
from training.encoders.execution import RawValues, Resources, executions


@executions.declare(MultiHot)
def _multi_hot(operation: MultiHot, inputs: Sequence[RawValues], resources: Resources) -> tf.Tensor:
    raw = inputs[0]
    ids = resources.ids[operation.vocabulary](raw)
    if raw.is_pad is None:
        ids = ids[:, tf.newaxis]
    # Padding is no class, and neither is -1.
    classes = tf.where(tf.equal(ids, PAD_ID), tf.cast(-1, tf.int64), ids)
    if not operation.is_weighted:
        hot = tf.one_hot(classes, operation.size, dtype=tf.float32)
        return tf.maximum(tf.reduce_max(hot, axis=1), 0.0)  # Of lists without a value it is -inf.
    numbers = tf.reshape(inputs[1].numbers, tf.shape(classes))
    weights = tf.where(tf.math.is_nan(numbers), tf.zeros_like(numbers), numbers)
    # Not a product: infinity times 0 is no number.
    is_there = tf.one_hot(classes, operation.size, on_value=True, off_value=False, dtype=tf.bool)
    own = tf.where(is_there, weights[:, :, tf.newaxis], tf.cast(0.0, tf.float64))
    return tf.reduce_sum(own, axis=1)


@executions.declare(SparseIndices)
def _sparse_indices(
    operation: SparseIndices, inputs: Sequence[RawValues], _: Resources
) -> tf.Tensor:
    merged, first = [], FIRST_TOKEN_ID
    for raw, size in zip(inputs, operation.sizes, strict=True):
        known = (raw.values >= 0) & (raw.values < size) & ~raw.is_null
        merged.append(tf.where(known, raw.values + first, tf.cast(OOV_ID, tf.int64)))
        first += size
    return _merge(inputs, merged)


@executions.declare(Weights)
def _weights(operation: Weights, inputs: Sequence[RawValues], _: Resources) -> tf.Tensor:
    half = len(inputs) // 2
    numbers = [raw.numbers for raw in inputs[:half]]
    present = [tf.where(tf.math.is_nan(own), tf.zeros_like(own), own) for own in numbers]
    return _merge(inputs[half:], present)


def _merge(inputs: Sequence[RawValues], values: Sequence[tf.Tensor]) -> tf.Tensor:
    """Joins the lists of each row without what pads them; `[batch, length]`, padded with 0."""
    kept = [
        tf.ragged.boolean_mask(own, tf.logical_not(raw.is_pad))
        for raw, own in zip(inputs, values, strict=True)
    ]
    return tf.concat(kept, axis=1).to_tensor(0)


def scale_weights(weights: tf.Tensor) -> tf.Tensor:
    """Divides rows by their sums where those are not 0: float64 `[batch, length]`.

    A weight of 0 stays 0, as padding does, where infinite weights have no sum.
    """
    sums = tf.reduce_sum(weights, axis=1, keepdims=True)
    scaled = weights / tf.where(tf.equal(sums, 0.0), tf.ones_like(sums), sums)
    return tf.where(tf.equal(weights, 0.0), weights, scaled)


@executions.declare(Length)
def _length(operation: Length, inputs: Sequence[RawValues], _: Resources) -> tf.Tensor:
    (raw,) = inputs
    count = tf.math.count_nonzero(tf.logical_not(raw.is_pad), axis=1, dtype=tf.int64)
    return count if operation.max_len is None else tf.minimum(count, operation.max_len)


@executions.declare(VectorBytes)
def _vector_bytes(operation: VectorBytes, inputs: Sequence[RawValues], _: Resources) -> tf.Tensor:
    (raw,) = inputs
    is_pad = tf.zeros_like(raw.is_null) if raw.is_pad is None else raw.is_pad
    # A position without a number makes one that is none: what reads it is refused.
    numbers = tf.where(is_pad, tf.constant(math.nan, tf.float64), raw.numbers)
    parts = tf.bitcast(tf.cast(numbers, tf.as_dtype(operation.dtype)), tf.uint8)
    single_bytes = tf.constant([bytes([value]) for value in range(256)])
    letters = tf.gather(single_bytes, tf.cast(parts, tf.int32))
    joined = tf.strings.reduce_join(tf.strings.reduce_join(letters, axis=2), axis=1)
    return tf.where(tf.reduce_all(is_pad, axis=1), tf.constant(b""), joined)

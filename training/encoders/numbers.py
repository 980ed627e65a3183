"""Encoders of numbers on tensors: buckets, scaling, marks of missing values."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from conf.encoders.numbers import Bucketize, IsMissing, Normalize
from conf.schema import FIRST_TOKEN_ID, OOV_ID
from training.encoders.execution import RawValues, Resources, executions


@executions.declare(Bucketize)
def _bucketize(operation: Bucketize, inputs: Sequence[RawValues], _: Resources) -> tf.Tensor:
    (raw,) = inputs
    numbers = raw.numbers
    missing = tf.math.is_nan(numbers)
    flat = tf.reshape(tf.where(missing, tf.zeros_like(numbers), numbers), [-1])
    rounded = operation.round_boundaries(raw.values.dtype == tf.float32)
    boundaries = tf.constant(rounded, tf.float64)
    found = tf.searchsorted(boundaries, flat, side="right", out_type=tf.int64)
    ids = tf.reshape(found, tf.shape(numbers)) + FIRST_TOKEN_ID
    return raw.finish(tf.where(missing, tf.cast(OOV_ID, tf.int64), ids), OOV_ID)


@executions.declare(Normalize)
def _normalize(operation: Normalize, inputs: Sequence[RawValues], _: Resources) -> tf.Tensor:
    (raw,) = inputs
    numbers = raw.numbers
    missing = tf.math.is_nan(numbers)
    numbers = tf.where(missing, tf.cast(operation.fill or 0.0, tf.float64), numbers)
    if operation.minimum is not None:
        numbers = tf.maximum(numbers, tf.cast(operation.minimum, tf.float64))
    if operation.maximum is not None:
        numbers = tf.minimum(numbers, tf.cast(operation.maximum, tf.float64))
    if operation.log1p:
        numbers = tf.sign(numbers) * tf.math.log1p(tf.abs(numbers))
    scaled = numbers - tf.cast(operation.center, tf.float64)
    scaled = tf.cast(scaled * tf.cast(operation.factor, tf.float64), tf.float32)
    if operation.fill is None:
        scaled = tf.where(missing, tf.zeros_like(scaled), scaled)
    return scaled if raw.is_pad is None else tf.where(raw.is_pad, tf.zeros_like(scaled), scaled)


@executions.declare(IsMissing)
def _is_missing(operation: IsMissing, inputs: Sequence[RawValues], _: Resources) -> tf.Tensor:
    (raw,) = inputs
    is_missing = raw.is_null
    if raw.values.dtype.is_floating:
        is_missing |= tf.math.is_nan(raw.values)
    return tf.cast(is_missing, tf.float32)

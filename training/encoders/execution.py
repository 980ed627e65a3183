"""Encoder operations in TensorFlow: what `etl.encoders` does on Arrow, on tensors.

An operation is executed in the file named like the file of `conf/encoders/` that declares it.

Ids, hashes and parts of dates are bit-equal. Scaled numbers, sines and weights are
float64 until the last step; they are equal to one unit in the last place of float32 (of 1,
for sines and cosines), more only where a logarithm lies within 1e-15 of what is subtracted
from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from conf.encoders.declaration import Executions, Operation
from conf.encoders.numbers import LEAST_NUMBER
from conf.schema import PAD_ID


@dataclass(frozen=True)
class RawValues:
    """One raw input.

    Attributes:
        values: `[batch]`, or `[batch, length]` of a list.
        is_null: Which values are missing, same shape.
        is_pad: Which positions lie behind the end of a list, same shape; None of a scalar.
        max_len: Values that the feature keeps of a list; None keeps all.
    """

    values: tf.Tensor
    is_null: tf.Tensor
    is_pad: tf.Tensor | None
    max_len: int | None = None

    @property
    def text(self) -> tf.Tensor:
        """The values as text: integers by their decimal digits."""
        values = self.values
        return values if values.dtype == tf.string else tf.strings.as_string(values)

    @property
    def numbers(self) -> tf.Tensor:
        """The values as float64, NaN where one is missing."""
        numbers = tf.cast(self.values, tf.float64)
        numbers = tf.where(tf.abs(numbers) < LEAST_NUMBER, tf.zeros_like(numbers), numbers)
        return tf.where(self.is_null, tf.constant(math.nan, tf.float64), numbers)

    def finish(self, encoded: tf.Tensor, null: int | float) -> tf.Tensor:
        """Replaces the values of null and padding; padding is 0."""
        encoded = tf.where(self.is_null, tf.cast(null, encoded.dtype), encoded)
        if self.is_pad is None:
            return encoded
        return tf.where(self.is_pad, tf.cast(PAD_ID, encoded.dtype), encoded)


@dataclass(frozen=True)
class Resources:
    """Results of a fit that operations look up.

    Attributes:
        ids: Encoder of raw tokens by vocabulary.
        statistics: float32 `[vocabulary_size]` by table.
    """

    ids: Mapping[str, Callable[[RawValues], tf.Tensor]]
    statistics: Mapping[str, tf.Tensor]


executions: Executions[Callable[[Any, Sequence[RawValues], Resources], tf.Tensor]] = Executions(
    "training.encoders"
)
"""By operation: what executes it on its raw inputs."""


def apply_operation(
    operation: Operation, inputs: Sequence[RawValues], resources: Resources
) -> tf.Tensor:
    """Executes an operation.

    Args:
        operation: The operation.
        inputs: The raw inputs in the plan's order.
        resources: The results of the fit.

    Returns:
        `[batch]` or `[batch, length]`, 0 where there is nothing; lists are not yet cut.
    """
    return executions[operation](operation, inputs, resources)

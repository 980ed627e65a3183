"""Encoders of numbers: buckets between boundaries, and normalisation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conf.operations import LEAST_NUMBER, Bucketize, Normalize
from conf.schema import FIRST_TOKEN_ID, OOV_ID
from etl.encoders.buffers import to_arrow
from etl.encoders.casting import cast_values


def read_numbers(values: pa.Array, raw_type: pa.DataType) -> np.ndarray:
    """Returns values as float64 `[rows]`, NaN where one is missing."""
    values = cast_values(values, raw_type)
    # Integers beyond 2**53 are rounded to the nearest, as TensorFlow's cast does.
    column = pc.cast(values, pa.float64(), safe=False)
    numbers = np.array(column.to_numpy(zero_copy_only=False), np.float64)
    numbers[np.abs(numbers) < LEAST_NUMBER] = 0.0
    return numbers


@dataclass(frozen=True)
class BucketizeEncoder:
    """Ids of the intervals between boundaries; a missing value is OOV."""

    raw_type: pa.DataType
    operation: Bucketize
    output_type = pa.int64()

    def encode(self, values: pa.Array) -> pa.Array:
        """Encodes numbers `[values]` to int64 ids `[values]`."""
        numbers = read_numbers(values, self.raw_type)
        boundaries = np.asarray(self.operation.boundaries, np.float64)
        ids = np.searchsorted(boundaries, numbers, side="right") + FIRST_TOKEN_ID
        ids[np.isnan(numbers)] = OOV_ID
        return to_arrow(ids.astype(np.int64))


@dataclass(frozen=True)
class NormalizeEncoder:
    """Numbers brought to a scale; never null or NaN."""

    raw_type: pa.DataType
    operation: Normalize
    output_type = pa.float32()

    def encode(self, values: pa.Array) -> pa.Array:
        """Normalises numbers `[values]` to float32 `[values]`."""
        operation = self.operation
        numbers = read_numbers(values, self.raw_type)
        missing = np.isnan(numbers)
        if operation.fill is not None:
            numbers[missing] = operation.fill
        with np.errstate(over="ignore"):  # beyond the range is infinite, as anywhere in training
            scaled = (prepare_numbers(numbers, operation) - operation.center) * operation.factor
            if operation.fill is None:
                scaled[missing] = 0.0
            return to_arrow(scaled.astype(np.float32))


def prepare_numbers(numbers: np.ndarray, operation: Normalize) -> np.ndarray:
    """Clips numbers and takes their logarithm, as far as the operation asks for it.

    Args:
        numbers: float64 `[rows]`.
        operation: The normalisation.
    """
    if operation.minimum is not None:
        numbers = np.maximum(numbers, operation.minimum)
    if operation.maximum is not None:
        numbers = np.minimum(numbers, operation.maximum)
    if operation.log1p:
        numbers = np.sign(numbers) * np.log1p(np.abs(numbers))
    return numbers

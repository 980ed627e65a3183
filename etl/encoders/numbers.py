"""Encoders of numbers: normalisation, buckets between boundaries, marks of missing values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conf.encoders.numbers import (
    LEAST_NUMBER,
    Bucketize,
    IsMissing,
    Normalize,
    NormalizeConfig,
    QuantileConfig,
)
from conf.schema import FIRST_TOKEN_ID, OOV_ID
from etl.encoders.arrow_columns import cast_values, to_arrow
from etl.encoders.base import fits, number_requests, value_encoders
from etl.encoders.number_fit import FittedNumbers, NumberRequest

if TYPE_CHECKING:
    from pyspark.sql import Column

    from conf.etl.encodings import FeatureConfig
    from etl.encoders.fit import OperationFit
    from etl.features.plan import FeaturePlan


def read_numbers(values: pa.Array, raw_type: pa.DataType) -> np.ndarray:
    """Returns values as float64 `[rows]`, NaN where one is missing."""
    values = cast_values(values, raw_type)
    # Integers beyond 2**53 are rounded to the nearest, as TensorFlow's cast does.
    column = pc.cast(values, pa.float64(), safe=False)
    numbers = np.array(column.to_numpy(zero_copy_only=False), np.float64)
    numbers[np.abs(numbers) < LEAST_NUMBER] = 0.0
    return numbers


@value_encoders.declare(Bucketize)
@dataclass(frozen=True)
class BucketizeEncoder:
    """Ids of the intervals between boundaries; a missing value is OOV."""

    raw_type: pa.DataType
    operation: Bucketize
    output_type = pa.int64()

    def encode(self, values: pa.Array) -> pa.Array:
        """Encodes numbers `[values]` to int64 ids `[values]`."""
        numbers = read_numbers(values, self.raw_type)
        ids = np.searchsorted(self._boundaries, numbers, side="right") + FIRST_TOKEN_ID
        ids[np.isnan(numbers)] = OOV_ID
        return to_arrow(ids.astype(np.int64))

    @cached_property
    def _boundaries(self) -> np.ndarray:
        rounded = self.operation.round_boundaries(self.raw_type == pa.float32())
        return np.asarray(rounded, np.float64)


@value_encoders.declare(IsMissing)
@dataclass(frozen=True)
class MissingEncoder:
    """Marks of missing values; NaN is one."""

    raw_type: pa.DataType
    operation: IsMissing
    output_type = pa.float32()

    def encode(self, values: pa.Array) -> pa.Array:
        """Encodes values of any type `[values]` to float32 `[values]`: 1.0 for a missing one."""
        values = cast_values(values, self.raw_type)
        is_missing = pc.is_null(values, nan_is_null=True).to_numpy(zero_copy_only=False)
        return to_arrow(is_missing.astype(np.float32))


@value_encoders.declare(Normalize)
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


def prepare_column(numbers: Column, operation: Normalize) -> Column:
    """Does what `prepare_numbers` does, where Spark measures the train split: doubles."""
    from pyspark.sql import functions as F

    if operation.minimum is not None:
        numbers = F.when(numbers < operation.minimum, operation.minimum).otherwise(numbers)
    if operation.maximum is not None:
        numbers = F.when(numbers > operation.maximum, operation.maximum).otherwise(numbers)
    return F.signum(numbers) * F.log1p(F.abs(numbers)) if operation.log1p else numbers


@number_requests.declare(NormalizeConfig)
def _request_scaling(
    feature: FeatureConfig, config: NormalizeConfig, plan: FeaturePlan
) -> Mapping[str, NumberRequest]:
    if config.method is None:
        return {}
    operation = config.preparation
    request = NumberRequest(
        feature.column,
        plan.is_list(feature.column),
        lambda numbers: prepare_column(numbers, operation),
        (0.25, 0.5, 0.75) if config.method == "robust" else (),
    )
    return {feature.name: request}


@fits.declare(NormalizeConfig)
def _fit_scaling(feature: FeatureConfig, config: NormalizeConfig, fit: OperationFit) -> Normalize:
    prepared: Normalize = config.preparation
    if config.constants is not None:
        return replace(prepared, center=config.constants.center, factor=1 / config.constants.scale)
    if config.method is None:
        return prepared
    fitted = fit.numbers[feature.name]
    moments = fitted.moments
    if config.method == "standard":
        center, spread = moments.mean, moments.deviation
    elif config.method == "min_max":
        center, spread = moments.minimum, moments.maximum - moments.minimum
    else:
        low, center, high = fitted.quantiles
        spread = high - low
    with np.errstate(divide="ignore", over="ignore"):
        factor = float(np.float64(1.0) / np.float64(spread))
    # A constant column has no spread to divide by: its values become 0.
    return replace(prepared, center=center, factor=factor if np.isfinite(factor) else 1.0)


def request_quantiles(config: QuantileConfig, column: str, is_list: bool) -> NumberRequest:
    """Returns what is measured of a column that is cut into equally full buckets."""
    inner = tuple(i / config.buckets for i in range(1, config.buckets))
    return NumberRequest(column, is_list, probabilities=inner)


def cut_equally(fitted: FittedNumbers) -> Bucketize:
    """Returns the buckets between fitted quantiles."""
    return Bucketize(tuple(sorted(set(fitted.quantiles))))


@number_requests.declare(QuantileConfig)
def _request_quantiles(
    feature: FeatureConfig, config: QuantileConfig, plan: FeaturePlan
) -> Mapping[str, NumberRequest]:
    return {feature.name: request_quantiles(config, feature.column, plan.is_list(feature.column))}


@fits.declare(QuantileConfig)
def _fit_quantiles(feature: FeatureConfig, config: QuantileConfig, fit: OperationFit) -> Bucketize:
    return cut_equally(fit.numbers[feature.name])

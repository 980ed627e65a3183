"""The weight of each sample: what training multiplies its loss by."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from conf.etl import BuildConfig

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_DAY_MS = 86_400_000


def add_weights(samples: DataFrame, config: BuildConfig, newest_ts_ms: int | None) -> DataFrame:
    """Adds the weight, float32: the product of what the config declares.

    Down-sampling by a rate r adds 1/r, so that weighted sums have the expectation of the whole.

    Args:
        samples: Samples, negatives included.
        config: The build's config.
        newest_ts_ms: Time of the latest event, whose decay is 1; None without times.
    """
    name = config.weight_name
    if name is None:
        return samples
    weight = F.lit(1.0)
    for factor in _factors(config, newest_ts_ms):
        weight = weight * F.coalesce(factor.cast("double"), F.lit(1.0))
    return samples.withColumn(name, weight.cast("float"))


def _factors(config: BuildConfig, newest_ts_ms: int | None) -> list[Column]:
    factors: list[Column] = []
    weights, label = config.weights, F.col(config.label_name or "")
    if config.down_sampling is not None:
        factors.append(F.lit(1.0) / F.col(config.down_sampling.name))
    if weights is None:
        return factors
    if weights.column is not None:
        factors.append(F.col(weights.column))
    if weights.positive is not None:
        factors.append(F.when(label > 0, F.lit(weights.positive)))
    if weights.negative is not None:
        factors.append(F.when(label == 0, F.lit(weights.negative)))
    if weights.half_life_days is not None and newest_ts_ms is not None:
        age_days = (F.lit(newest_ts_ms) - F.col("__event_ts_ms")) / _DAY_MS
        factors.append(F.pow(F.lit(0.5), age_days / weights.half_life_days))
    return factors

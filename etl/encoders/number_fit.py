"""The fit of numbers in Spark: moments and quantiles of columns, statistics of tokens.

It does not depend on how the data is partitioned. Sums run over integers: values, or
of large numbers close by each other distances from the least, as multiples of 2**-40 of the largest
of them, so mean and deviation are good to about 1e-12 of it.
Quantiles are exact up to `SAMPLE_VALUES` values; beyond, they are those of a sample chosen by a
hash of the row's key, whose ranks are off by less than 0.2 % of all values in 99 fits of 100
(Dvoretzky-Kiefer-Wolfowitz).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from conf.encoders import VocabularySpec
from conf.encoders.numbers import Normalize
from conf.encoders.target import FOLD_COLUMN, FOLDS
from conf.errors import InputDataError
from etl.tfrecord.spark.schema import quote_name

SAMPLE_VALUES = 1_000_000
_STEP_BITS = 40
_CLOSE = 2.0**-20
_HASH_STEPS = 2**30
_SAMPLE_SEED = 20
_KEY = "__key"
_AS_IT_IS = Normalize()
_FOLD_SEED = 41
_PRIOR_ROWS = 20.0
"""Rows that the overall mean counts for in the mean of a token."""
# Labels are summed as decimals: sums of floats depend on the order of the rows.
_LABEL_TYPE = "decimal(28,9)"


@dataclass(frozen=True)
class FittedNumbers:
    """Finite values of one column, NaN and null left out; the deviation is the population's."""

    count: int
    minimum: float
    maximum: float
    mean: float
    deviation: float
    quantiles: tuple[float, ...] = ()  # in the order of the request


@dataclass(frozen=True)
class NumberRequest:
    """A column of numbers to fit."""

    column: str
    is_list: bool  # each value of its lists counts
    prepare: Normalize = _AS_IT_IS  # bounds and logarithm, applied before values are measured
    probabilities: tuple[float, ...] = ()  # quantiles to compute, in [0, 1]


def fit_numbers(
    df: DataFrame, requests: Mapping[str, NumberRequest], key: Sequence[str]
) -> dict[str, FittedNumbers]:
    """Fits columns of numbers, by name; scalar columns share three scans, lists have their own.

    The key tells rows apart, and chooses the sample of quantiles.

    Raises:
        InputDataError: A column has no finite value.
    """
    fitted: dict[str, FittedNumbers] = {}
    for frame in _select_values(df, requests, key):
        names = [name for name in frame.columns if name != _KEY]
        moments = _fit_moments(frame, names)
        wanted = {n: requests[n].probabilities for n in names if requests[n].probabilities}
        quantiles = _fit_quantiles(frame, moments, wanted)
        fitted |= {n: replace(moments[n], quantiles=tuple(quantiles.get(n, ()))) for n in names}
    return fitted


def _select_values(
    df: DataFrame, requests: Mapping[str, NumberRequest], key: Sequence[str]
) -> list[DataFrame]:
    """Frames of doubles, null where a value is missing or not finite, with a hash of the key."""
    named = [F.col(quote_name(name)) for name in key]
    row_key = F.xxhash64(F.lit(_SAMPLE_SEED), *named).alias(_KEY)
    scalars = [
        _finite(F.col(quote_name(request.column)), request.prepare).alias(name)
        for name, request in requests.items()
        if not request.is_list
    ]
    frames = [df.select(row_key, *scalars)] if scalars else []
    for name, request in requests.items():
        if request.is_list:
            exploded = df.select(row_key, F.explode(F.col(quote_name(request.column))).alias(name))
            value = _finite(F.col(quote_name(name)), request.prepare)
            frames.append(exploded.withColumn(name, value))
    return frames


def _finite(values: Column, prepare: Normalize) -> Column:
    """Does what `NormalizeEncoder` does where records are encoded."""
    number = values.cast("double")
    number = F.when(F.abs(number) < F.lit(math.inf), number)
    if prepare.minimum is not None:
        number = F.when(number < prepare.minimum, prepare.minimum).otherwise(number)
    if prepare.maximum is not None:
        number = F.when(number > prepare.maximum, prepare.maximum).otherwise(number)
    return F.signum(number) * F.log1p(F.abs(number)) if prepare.log1p else number


def _fit_moments(frame: DataFrame, names: Sequence[str]) -> dict[str, FittedNumbers]:
    """Fits the moments of columns of doubles, in two scans."""
    columns = [F.col(quote_name(name)) for name in names]
    bounds = [measure(column) for column in columns for measure in (F.count, F.min, F.max)]
    row: Any = frame.agg(*bounds).collect()[0]
    ends = [tuple(row[i : i + 3]) for i in range(0, len(row), 3)]
    for name, (count, _, _) in zip(names, ends, strict=True):
        if not count:
            raise InputDataError(
                f"feature {name!r} cannot be fitted: the train split has no finite value of it",
                fix="check the column, or encode it by `identity`",
            )
    scales = [_scale(low, high) for _, low, high in ends]
    sums = []
    for column, (origin, unit) in zip(columns, scales, strict=True):
        steps = F.rint((column - F.lit(origin)) / F.lit(unit)).cast("decimal(13,0)")
        sums += [F.sum(steps), F.sum(steps * steps)]
    totals: Any = frame.agg(*sums).collect()[0]
    return {
        name: _moments(ends[i], totals[2 * i : 2 * i + 2], scales[i])
        for i, name in enumerate(names)
    }


def _scale(low: float, high: float) -> tuple[float, float]:
    """Where distances count from, and the power of two of which they are taken to be multiples.

    They count from the least of large numbers close by each other, else from 0.
    """
    origin = low if high - low < _CLOSE * max(abs(low), abs(high)) else 0.0
    largest = max(abs(low - origin), abs(high - origin))
    if largest == 0:
        return origin, 1.0
    return origin, max(math.ldexp(1.0, math.frexp(largest)[1] - _STEP_BITS), 2.0**-1022)


def _moments(
    ends: tuple[int, float, float], sums: Sequence[Decimal], scale: tuple[float, float]
) -> FittedNumbers:
    (count, low, high), (origin, unit) = ends, scale
    total, squares = int(sums[0]), int(sums[1])
    mean = total / count
    variance = (count * squares - total * total) / (count * count)
    return FittedNumbers(count, low, high, origin + mean * unit, math.sqrt(variance) * unit)


def _fit_quantiles(
    frame: DataFrame,
    moments: Mapping[str, FittedNumbers],
    probabilities: Mapping[str, Sequence[float]],
) -> dict[str, list[float]]:
    """Fits quantiles of columns, interpolated between neighbouring values, in one scan.

    The number of a column's values decides whether those of a sample of rows are read.
    """
    if not probabilities:
        return {}
    position = F.pmod(F.col(_KEY), F.lit(_HASH_STEPS))
    measures = []
    for name, asked in probabilities.items():
        values = F.col(quote_name(name))
        if moments[name].count > SAMPLE_VALUES:
            bound = int(_HASH_STEPS * SAMPLE_VALUES / moments[name].count)
            values = F.when(position < bound, values)
        measures.append(F.percentile(values, F.array(*map(F.lit, asked))).alias(name))
    row: Any = frame.agg(*measures).collect()[0]
    return {name: list(row[name]) for name in probabilities}


def add_folds(rows: DataFrame, key: Sequence[str]) -> DataFrame:
    """Adds a row's fold, bigint in `[0, FOLDS)`, by the columns that tell rows apart."""
    row_key = F.xxhash64(F.lit(_FOLD_SEED), *[F.col(quote_name(name)) for name in key])
    return rows.withColumn(FOLD_COLUMN, F.pmod(row_key, F.lit(FOLDS)).cast("bigint"))


def fit_target(
    df: DataFrame, tokens: DataFrame, spec: VocabularySpec, token: str, label: str
) -> np.ndarray:
    """Fits the smoothed mean of the label per token: `(sum + w * prior) / (count + w)`.

    The prior of a fold is the mean of the other folds, as its counts and sums are: nothing in a
    train row's value comes from the row's own fold (Micci-Barreca 2001, smoothed; folds as in
    Prokhorenkova et al. 2018, section 3.2, "holdout").

    Args:
        df: The samples of the train split with their folds.
        tokens: Columns `token` and `id` of the fitted vocabulary.
        spec: Its entry in the plan.
        token: Column of the tokens.
        label: Numeric column.

    Returns:
        float64 `[vocabulary_size, 1 + folds]`; tokens that no sample has, or that are
        retired, have the prior.
    """
    rows = df.select(
        F.col(quote_name(token)).alias("token"),
        F.col(quote_name(label)).cast(_LABEL_TYPE).alias("label"),
        F.col(FOLD_COLUMN).cast("int").alias("fold"),
    ).where(F.col("label").isNotNull())
    measures = (F.count("*").alias("n"), F.sum("label").cast("double").alias("total"))
    overall = rows.groupBy("fold").agg(*measures).toArrow()
    by_token = (
        rows.join(tokens.hint("merge"), "token").groupBy("id", "fold").agg(*measures).toArrow()
    )
    first = spec.first_token_id
    counts, sums = _total(by_token, by_token["id"].to_numpy() - first, spec.size - first)
    all_counts, all_sums = _total(overall, np.zeros(len(overall), np.int64), 1)
    prior = all_sums / np.maximum(all_counts, 1.0)
    smoothed = (sums + _PRIOR_ROWS * prior) / (counts + _PRIOR_ROWS)
    return np.concatenate([np.repeat(prior, first, axis=0), smoothed])


def _total(grouped: pa.Table, rows: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Counts and sums of all folds, then of all but each one: float64 `[size, 1 + folds]`."""
    by_fold = np.zeros((2, size, FOLDS))
    fold = grouped["fold"].to_numpy()
    by_fold[:, rows, fold] = [grouped["n"].to_numpy(), grouped["total"].to_numpy()]
    total = by_fold.sum(axis=2, keepdims=True)
    counts, sums = np.concatenate([total, total - by_fold], axis=2)
    return counts, sums


def fit_counts(counts: np.ndarray, first_token_id: int, log1p: bool) -> np.ndarray:
    """Returns how often each id's token occurs in the train split, or `log(1 + count)` of it.

    The vocabulary has counted its tokens already; `[vocabulary_size, 1]`.
    """
    counts = np.concatenate([np.zeros(first_token_id), counts])
    return (np.log1p(counts) if log1p else counts)[:, None]

"""The fit of columns of numbers in Spark: moments and quantiles.

It does not depend on how the data is partitioned. Sums run over integers: values, or
of large numbers close by each other distances from the least, as multiples of 2**-40 of the largest
of them, so mean and deviation are good to about 1e-12 of it.
Quantiles are exact up to `SAMPLE_VALUES` values; beyond, they are those of a sample chosen by a
hash of the row's key, whose ranks are off by less than 0.2 % of all values in 99 fits of 100
(Dvoretzky-Kiefer-Wolfowitz).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from conf.errors import InputDataError

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from conf.etl.encodings import FeatureConfig

SAMPLE_VALUES = 1_000_000
_STEP_BITS = 40
_CLOSE = 2.0**-20
_HASH_STEPS = 2**30
_SAMPLE_SEED = 20
_KEY = "__key"


@dataclass(frozen=True)
class FittedMoments:
    """Finite values of one column, NaN and null left out.

    Attributes:
        count: How many there are.
        minimum: The least.
        maximum: The largest.
        mean: Their mean.
        deviation: Their standard deviation, of the population.
    """

    count: int
    minimum: float
    maximum: float
    mean: float
    deviation: float


@dataclass(frozen=True)
class NumberRequest:
    """A column of numbers to fit.

    Attributes:
        column: Its name.
        is_list: Whether it holds lists, of which each value counts.
        prepare: What is done to values before they are measured, doubles; None: nothing.
        probabilities: Quantiles to compute, in [0, 1].
    """

    column: str
    is_list: bool
    prepare: Callable[[Column], Column] | None = None
    probabilities: tuple[float, ...] = ()


def name_request(feature: FeatureConfig, column: str) -> str:
    """Returns the name of what is fitted for one column of a feature that reads several."""
    return f"{feature.name}#{column}"


@dataclass(frozen=True)
class FittedNumbers:
    """Moments and quantiles of a column, in the order of the request."""

    moments: FittedMoments
    quantiles: tuple[float, ...]


def fit_numbers(
    df: DataFrame, requests: Mapping[str, NumberRequest], key: Sequence[str]
) -> dict[str, FittedNumbers]:
    """Fits columns of numbers; scalar columns share three scans, list columns have their own.

    Args:
        df: The train split.
        requests: What to fit, by feature.
        key: Columns that tell rows apart; they choose the sample of quantiles.

    Raises:
        InputDataError: A column has no finite value.
    """
    fitted: dict[str, FittedNumbers] = {}
    for frame in _select_values(df, requests, key):
        names = [name for name in frame.columns if name != _KEY]
        moments = fit_moments(frame, names)
        wanted = {name: requests[name].probabilities for name in names}
        counts = {name: moments[name].count for name in names}
        quantiles = fit_quantiles(frame, counts, {k: v for k, v in wanted.items() if v})
        for name in names:
            fitted[name] = FittedNumbers(moments[name], tuple(quantiles.get(name, ())))
    return fitted


def _select_values(
    df: DataFrame, requests: Mapping[str, NumberRequest], key: Sequence[str]
) -> list[DataFrame]:
    """Frames of doubles, null where a value is missing or not finite, with a hash of the key."""
    from pyspark.sql import functions as F

    from etl.tfrecord.spark.schema import quote_name

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


def _finite(values: Column, prepare: Callable[[Column], Column] | None) -> Column:
    from pyspark.sql import functions as F

    number = values.cast("double")
    number = F.when(F.abs(number) < F.lit(math.inf), number)
    return number if prepare is None else prepare(number)


def fit_moments(frame: DataFrame, names: Sequence[str]) -> dict[str, FittedMoments]:
    """Fits the moments of columns of doubles, in two scans.

    Raises:
        InputDataError: A column has no finite value.
    """
    from pyspark.sql import functions as F

    from etl.tfrecord.spark.schema import quote_name

    bounds = [
        measure
        for i, name in enumerate(names)
        for measure in (
            F.count(F.col(quote_name(name))).alias(f"n{i}"),
            F.min(F.col(quote_name(name))).alias(f"low{i}"),
            F.max(F.col(quote_name(name))).alias(f"high{i}"),
        )
    ]
    ends: Any = frame.agg(*bounds).collect()[0]
    for i, name in enumerate(names):
        if not ends[f"n{i}"]:
            raise InputDataError(
                f"feature {name!r} cannot be fitted: the train split has no finite value of it",
                fix="check the column, or encode it by `identity`",
            )
    origins = [_origin(ends[f"low{i}"], ends[f"high{i}"]) for i in range(len(names))]
    units = [
        _unit(max(abs(ends[f"low{i}"] - origin), abs(ends[f"high{i}"] - origin)))
        for i, origin in enumerate(origins)
    ]
    sums = []
    for i, name in enumerate(names):
        distance = F.col(quote_name(name)) - F.lit(origins[i])
        steps = F.rint(distance / F.lit(units[i])).cast("decimal(13,0)")
        sums += [F.sum(steps).alias(f"sum{i}"), F.sum(steps * steps).alias(f"squares{i}")]
    totals: Any = frame.agg(*sums).collect()[0]
    return {
        name: _moments(
            (ends[f"n{i}"], ends[f"low{i}"], ends[f"high{i}"]),
            (totals[f"sum{i}"], totals[f"squares{i}"]),
            (origins[i], units[i]),
        )
        for i, name in enumerate(names)
    }


def _origin(low: float, high: float) -> float:
    """Where distances count from: the least of large numbers close by each other, else 0."""
    return low if high - low < _CLOSE * max(abs(low), abs(high)) else 0.0


def _unit(largest: float) -> float:
    """The power of two of which distances are taken to be multiples."""
    if largest == 0:
        return 1.0
    return max(math.ldexp(1.0, math.frexp(largest)[1] - _STEP_BITS), 2.0**-1022)


def _moments(
    ends: tuple[int, float, float], sums: tuple[Decimal, Decimal], scale: tuple[float, float]
) -> FittedMoments:
    (count, low, high), (origin, unit) = ends, scale
    total, squares = int(sums[0]), int(sums[1])
    mean = total / count
    variance = (count * squares - total * total) / (count * count)
    return FittedMoments(count, low, high, origin + mean * unit, math.sqrt(variance) * unit)


def fit_quantiles(
    frame: DataFrame, counts: Mapping[str, int], probabilities: Mapping[str, Sequence[float]]
) -> dict[str, list[float]]:
    """Fits quantiles of columns, in one scan.

    Args:
        frame: Columns of doubles, and the hash of each row's key.
        counts: Number of values by column, which decides on the sample.
        probabilities: Probabilities by column, in [0, 1].

    Returns:
        The quantiles by column, interpolated between neighbouring values.
    """
    from pyspark.sql import functions as F

    from etl.tfrecord.spark.schema import quote_name

    if not probabilities:
        return {}
    position = F.pmod(F.col(_KEY), F.lit(_HASH_STEPS))
    measures = []
    for name, asked in probabilities.items():
        values = F.col(quote_name(name))
        if counts[name] > SAMPLE_VALUES:
            bound = int(_HASH_STEPS * SAMPLE_VALUES / counts[name])
            values = F.when(position < bound, values)
        measures.append(F.percentile(values, F.array(*map(F.lit, asked))).alias(name))
    row: Any = frame.agg(*measures).collect()[0]
    return {name: list(row[name]) for name in probabilities}

"""Train/serve skew: features as a server logged them against those of a dataset, by key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from conf.errors import ConfigError, InputDataError, did_you_mean
from conf.schema import OOV_ID

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

_SIDES = ("logged", "recomputed")


@dataclass(frozen=True)
class SkewConfig:
    """What is compared.

    Attributes:
        keys: Features that tell which record a logged row belongs to.
        features: Features that are compared.
        tolerance: Floats this close are equal, relative to the greater of them and to 1.
        id_keys: Keys that are ids of a vocabulary: out of it they tell nothing apart.
    """

    keys: tuple[str, ...]
    features: tuple[str, ...]
    tolerance: float = 1e-6
    id_keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class SkewExample:
    """A row whose values differ: its key, and both values as text."""

    key: tuple[str, ...]
    logged: str | None
    recomputed: str | None


@dataclass(frozen=True)
class FeatureSkew:
    """One feature.

    Attributes:
        name: The feature.
        mismatched: Compared rows whose values differ.
        rate: Their share, in [0, 1].
        examples: One or two of them, the same in each run.
    """

    name: str
    mismatched: int
    rate: float
    examples: tuple[SkewExample, ...]


@dataclass(frozen=True)
class SkewReport:
    """The comparison.

    Attributes:
        logged: Rows that were logged.
        recomputed: Records of the dataset.
        compared: Rows with exactly one record of the same key.
        ambiguous: Keys on both sides that stand in several rows of one; not compared.
        features: The features, the most skewed first.
    """

    logged: int
    recomputed: int
    compared: int
    ambiguous: int
    features: tuple[FeatureSkew, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns the report as a JSON object."""
        return asdict(self)


def compare_features(logged: DataFrame, recomputed: DataFrame, config: SkewConfig) -> SkewReport:
    """Compares both sides in one pass over their join.

    Args:
        logged: One column per key and feature, values as the records hold them.
        recomputed: The same of the dataset.
        config: What is compared.

    Raises:
        ConfigError: Nothing is to be compared, or a column is missing on a side.
    """
    for side, frame in zip(_SIDES, (logged, recomputed), strict=True):
        _check_columns(side, frame, config)
    types = {name: recomputed.schema[name].dataType for name in (*config.keys, *config.features)}
    left = _by_key(logged, config, types, _SIDES[0])
    right = _by_key(recomputed, config, types, _SIDES[1])
    joined = left.join(right, list(config.keys), "full_outer")
    once = (F.col("logged_rows") == 1) & (F.col("recomputed_rows") == 1)
    both = F.col("logged_rows").isNotNull() & F.col("recomputed_rows").isNotNull()
    wanted = [
        F.sum("logged_rows").alias("logged"),
        F.sum("recomputed_rows").alias("recomputed"),
        F.count_if(once).alias("compared"),
        F.count_if(both & ~once).alias("ambiguous"),
    ]
    for place, name in enumerate(config.features):
        differs = once & _differs(name, types[name], config.tolerance)
        example = F.when(differs, _example(config.keys, name))
        wanted += [
            F.count_if(differs).alias(f"bad_{place}"),
            F.min(example).alias(f"first_{place}"),
            F.max(example).alias(f"last_{place}"),
        ]
    return _report(joined.agg(*wanted).collect()[0].asDict(), config.features)


def _check_columns(side: str, frame: DataFrame, config: SkewConfig) -> None:
    if not config.features or not config.keys:
        raise ConfigError(
            "there is no feature to compare",
            received=f"keys: {', '.join(config.keys) or 'none'}; columns: "
            f"{', '.join(frame.columns)}",
            allowed="a key, and a feature of the dataset that is no key",
        )
    for name in (*config.keys, *config.features):
        if name not in frame.columns:
            raise ConfigError(
                f"the {side} rows lack a column",
                received=name,
                allowed=", ".join(frame.columns),
                fix=did_you_mean(name, frame.columns),
            )


def _by_key(
    frame: DataFrame, config: SkewConfig, types: dict[str, DataType], side: str
) -> DataFrame:
    """One row per key: how many rows it has, and the features of one of them."""
    names = (*config.keys, *config.features)
    typed = frame.select(*[F.col(name).try_cast(types[name]).alias(name) for name in names])
    for key in config.id_keys:
        typed = typed.where(F.col(key) != OOV_ID)
    packed = typed.select(*config.keys, F.struct(*config.features).alias(side))
    return packed.groupBy(*config.keys).agg(
        F.count(F.lit(1)).alias(f"{side}_rows"), F.first(side).alias(side)
    )


def _differs(name: str, data_type: DataType, tolerance: float) -> Column:
    left, right = (F.col(side)[name] for side in _SIDES)
    kind = data_type.simpleString()
    if kind in ("float", "double"):
        return ~_close(left, right, tolerance)
    if kind in ("array<float>", "array<double>"):
        pairs = F.zip_with(left, right, lambda x, y: _close(x, y, tolerance))
        equal = (F.size(left) == F.size(right)) & F.forall(pairs, lambda pair: pair)
        return ~F.coalesce(equal, left.isNull() & right.isNull())
    return ~left.eqNullSafe(right)


def _close(left: Column, right: Column, tolerance: float) -> Column:
    scale = F.greatest(F.abs(left), F.abs(right), F.lit(1.0))
    near = F.coalesce(F.abs(left - right) <= scale * tolerance, F.lit(False))
    return left.eqNullSafe(right) | (near & ~F.isnan(left) & ~F.isnan(right))


def _example(keys: Sequence[str], name: str) -> Column:
    shown = [F.col(key).cast("string").alias(f"key_{i}") for i, key in enumerate(keys)]
    values = [F.col(side)[name].cast("string").alias(side) for side in _SIDES]
    return F.struct(*shown, *values)


def _report(found: dict[str, Any], features: Sequence[str]) -> SkewReport:
    compared = found["compared"]
    skews = []
    for place, name in enumerate(features):
        bad = found[f"bad_{place}"]
        rows = dict.fromkeys(
            tuple(row) for row in (found[f"first_{place}"], found[f"last_{place}"]) if row
        )
        examples = tuple(SkewExample(row[:-2], row[-2], row[-1]) for row in rows)
        skews.append(FeatureSkew(name, bad, bad / compared if compared else 0.0, examples))
    return SkewReport(
        found["logged"] or 0,
        found["recomputed"] or 0,
        compared,
        found["ambiguous"],
        tuple(sorted(skews, key=lambda skew: (-skew.rate, skew.name))),
    )


def refuse_skew(report: SkewReport, max_rate: float) -> None:
    """Refuses what differs too often.

    Args:
        report: The comparison.
        max_rate: The greatest share of differing rows per feature, in [0, 1].

    Raises:
        InputDataError: Names each feature above the share, or no row could be compared.
    """
    if not report.compared:
        raise InputDataError(
            "no logged row has exactly one record of the same key: nothing was compared",
            received=f"{report.logged:,} logged rows, {report.recomputed:,} records, "
            f"{report.ambiguous:,} keys that stand in several rows",
            fix="give other keys (--key) or another split (--split)",
        )
    skewed = [skew for skew in report.features if skew.rate > max_rate]
    if skewed:
        raise InputDataError(
            f"{len(skewed)} of {len(report.features)} features are skewed between training and "
            "serving",
            received="\n            ".join(_describe(skew) for skew in skewed),
            allowed=f"at most {max_rate:.4%} of the rows of each feature differ",
            fix="compute the feature in serving as the build does; --json shows examples",
        )


def _describe(skew: FeatureSkew) -> str:
    text = f"{skew.name}: {skew.mismatched:,} rows differ ({skew.rate:.4%})"
    if skew.examples:
        first = skew.examples[0]
        text += f", as {'/'.join(first.key)}: logged {first.logged}, recomputed {first.recomputed}"
    return text

"""Fitting vocabularies: Spark counts the tokens of the train split, the driver numbers them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from conf.encoders import TokenDType
from conf.errors import ConfigError, did_you_mean
from conf.etl import TopPerGroupConfig
from conf.schema import FIRST_TOKEN_ID
from etl.encoders.growth import Growth, grow_vocabulary, number_tokens
from etl.encoders.vocabulary import LAST_SEEN_COLUMN

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_SPARK_TOKEN_TYPES = {
    **dict.fromkeys(("tinyint", "smallint", "int", "bigint"), "bigint"),
    "string": "string",
}


@dataclass(frozen=True)
class TokenLimits:
    """Which tokens a vocabulary holds.

    Attributes:
        min_count: Rarer tokens are left out; at least 1.
        max_size: Number of tokens kept, the most frequent; None keeps all.
        top_per_group: Keeps only tokens among the most frequent of a group; None: no such rule.
    """

    min_count: int = 1
    max_size: int | None = None
    top_per_group: TopPerGroupConfig | None = None

    def __post_init__(self) -> None:
        """Refuses bounds below 1.

        Raises:
            ConfigError: A bound is.
        """
        if self.min_count < 1 or (self.max_size is not None and self.max_size < 1):
            raise ConfigError(
                "a vocabulary's bounds must be at least 1",
                received=f"min_count={self.min_count}, max_size={self.max_size}",
            )


def fit_vocabulary(
    df: DataFrame,
    columns: Sequence[str],
    limits: TokenLimits | None = None,
    *,
    first_id: int = FIRST_TOKEN_ID,
    growth: Growth | None = None,
) -> pa.Table:
    """Counts the tokens of one or more columns and numbers them.

    Tokens are ordered by falling count, ties by token: integers by value, strings by their UTF-8
    bytes, which is the order of Spark's strings, Arrow's and Python's alike. Null is no token;
    the empty string is one. Only the vocabulary comes to the driver, as Arrow.

    Args:
        df: The train split.
        columns: Columns that share the vocabulary: all of integers or all of strings, scalars or
            arrays, of which each element counts.
        limits: Which tokens are kept; None keeps all.
        first_id: Id of the first token: 2, or more where unknown tokens have buckets.
        growth: The vocabulary that this one grows out of, and when tokens were seen; None: it is
            fitted from nothing, and will not grow.

    Returns:
        Columns `token` (int64 or string), `id` and `count` (int64), by rising id from
        `first_id`; of a growing vocabulary also `last_seen` and `is_retired`. A known token that
        the train split lacks has the count 0.

    Raises:
        ConfigError: No such column, columns of different or other types, or growth that does not
            fit the vocabulary it starts from.
    """
    limits = limits or TokenLimits()
    spark_type = _spark_type_of(df, columns)
    token_dtype: TokenDType = "int64" if spark_type == "bigint" else "string"
    counted = _count_tokens(df, columns, spark_type, limits, growth)
    if growth is None:
        kept = _most_frequent(_frequent(counted, limits), limits.max_size)
        return number_tokens(kept.toArrow(), token_dtype, first_id)
    known = growth.known_tokens(token_dtype, first_id)
    found = _found_tokens(counted, known, limits)
    return grow_vocabulary(found, known, growth, limits.max_size, first_id)


def _count_tokens(
    df: DataFrame,
    columns: Sequence[str],
    spark_type: str,
    limits: TokenLimits,
    growth: Growth | None,
) -> DataFrame:
    """One row per token: `token`, `count`, `is_eligible`, and `last_seen` where it is asked for."""
    from pyspark.sql import functions as F

    chosen = [_tokens(df, columns, spark_type).alias("token")]
    measures = [F.count("*").alias("count")]
    time_ms = growth.time_column_ms if growth else None
    if time_ms is not None:
        days = F.floor(_quoted(time_ms) / F.lit(86_400_000)).cast("int")
        chosen.append(days.alias("__day"))
        measures.append(F.max(F.date_from_unix_date("__day")).alias(LAST_SEEN_COLUMN))
    elif growth is not None:
        measures.append(F.lit(None).cast("date").alias(LAST_SEEN_COLUMN))
    top = limits.top_per_group
    if top is None:
        tokens = df.select(*chosen).where(F.col("token").isNotNull())
        return tokens.groupBy("token").agg(*measures, F.lit(True).alias("is_eligible"))
    _check_column(df, top.column)
    tokens = df.select(*chosen, _quoted(top.column).alias("__group"))
    tokens = tokens.where(F.col("token").isNotNull())
    counted = tokens.groupBy("token").agg(*measures)
    return counted.join(_top_tokens(tokens, top.k), "token", "left").fillna(False, ["is_eligible"])


def _top_tokens(tokens: DataFrame, k: int) -> DataFrame:
    """The tokens that are among the `k` most frequent of at least one group."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    by_group = tokens.groupBy("__group", "token").count()
    order = Window.partitionBy("__group").orderBy(F.desc("count"), F.asc("token"))
    top = by_group.withColumn("__rank", F.row_number().over(order)).where(F.col("__rank") <= k)
    return top.select("token").distinct().withColumn("is_eligible", F.lit(True))


def _frequent(counted: DataFrame, limits: TokenLimits) -> DataFrame:
    from pyspark.sql import functions as F

    frequent = F.col("is_eligible") & (F.col("count") >= limits.min_count)
    return counted.where(frequent).drop("is_eligible")


def _most_frequent(counted: DataFrame, size: int | None) -> DataFrame:
    from pyspark.sql import functions as F

    if size is None:
        return counted
    return counted.orderBy(F.desc("count"), F.asc("token")).limit(size)


def _found_tokens(counted: DataFrame, known: pa.Table, limits: TokenLimits) -> pa.Table:
    """Known tokens however rare they are now, and new ones that are frequent enough."""
    from pyspark.sql import functions as F

    if not len(known):
        found = _most_frequent(_frequent(counted, limits), limits.max_size)
        return found.withColumn("is_known", F.lit(False)).toArrow()
    tokens = counted.sparkSession.createDataFrame(known.select(["token"]))
    old = counted.join(tokens, "token", "left_semi").drop("is_eligible")
    new = _frequent(counted.join(tokens, "token", "left_anti"), limits)
    new = _most_frequent(new, limits.max_size)
    both = old.withColumn("is_known", F.lit(True)).unionByName(
        new.withColumn("is_known", F.lit(False))
    )
    return both.toArrow()


def _quoted(column: str) -> Column:
    from pyspark.sql import functions as F

    return F.col("`" + column.replace("`", "``") + "`")


def _check_column(df: DataFrame, column: str) -> None:
    if column not in df.columns:
        raise ConfigError(
            "a vocabulary is to be fitted on a column that is not there",
            received=column,
            fix=did_you_mean(column, df.columns),
        )


def _spark_type_of(df: DataFrame, columns: Sequence[str]) -> str:
    found: dict[str, str] = {}
    for column in columns:
        _check_column(df, column)
        found[column] = _element_type(df, column)
    types = {_SPARK_TOKEN_TYPES.get(name) for name in found.values()}
    spark_type = types.pop() if len(types) == 1 else None
    if spark_type is None:
        raise ConfigError(
            "columns of these types cannot feed one vocabulary",
            received=", ".join(f"{column}: {name}" for column, name in found.items()) or "none",
            allowed="integers only, or strings only, or arrays of them",
            fix="give the columns vocabularies of their own, or declare them with one type",
        )
    return spark_type


def _is_array(df: DataFrame, column: str) -> bool:
    return df.schema[column].dataType.typeName() == "array"


def _element_type(df: DataFrame, column: str) -> str:
    data_type = df.schema[column].dataType
    if _is_array(df, column):
        data_type = data_type.elementType  # type: ignore[attr-defined]
    return data_type.simpleString().partition(" ")[0]  # "string collate ..." is a string


def _tokens(df: DataFrame, columns: Sequence[str], spark_type: str) -> Column:
    """One token per row: all columns' tokens in a single scan."""
    from pyspark.sql import functions as F

    quoted = {column: _quoted(column) for column in columns}
    if len(columns) == 1 and not _is_array(df, columns[0]):
        return quoted[columns[0]].cast(spark_type)
    array_type = f"array<{spark_type}>"
    none = F.array().cast(array_type)
    arrays = [
        F.coalesce(values.cast(array_type), none)
        if _is_array(df, column)
        else F.array(values.cast(spark_type))
        for column, values in quoted.items()
    ]
    return F.explode(F.concat(*arrays))

"""Fitting vocabularies: Spark counts the tokens of the train split, the driver numbers them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from conf.encoders import TokenDType
from etl.encoders.growth import grow_vocabulary, number_tokens
from etl.encoders.token_counts import (
    NUMBER_COLUMN,
    TokenLimits,
    VocabularyRequest,
    count_together,
    count_tokens,
    spark_type_of,
)
from etl.encoders.vocabulary import LAST_SEEN_COLUMN

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


_COUNTED = ("count", LAST_SEEN_COLUMN, "is_known")


def fit_vocabularies(df: DataFrame, requests: Sequence[VocabularyRequest]) -> list[pa.Table]:
    """Counts the tokens of all vocabularies in one job, and numbers them.

    Tokens are ordered by falling count, ties by token: integers by value, strings by their UTF-8
    bytes, which is the order of Spark's strings, Arrow's and Python's alike. Null is no token;
    the empty string is one. Only the vocabularies come to the driver, as Arrow.

    Args:
        df: The train split.
        requests: The vocabularies.

    Returns:
        Per request, columns `token` (int64 or string), `id` and `count` (int64), by rising id
        from `first_id`; of a growing vocabulary also `last_seen` and `is_retired`. A known token
        that the train split lacks has the count 0.

    Raises:
        ConfigError: No such column, columns of different or other types, or growth that does not
            fit the vocabulary it starts from.
    """
    if not requests:
        return []
    types = [spark_type_of(df, request.columns) for request in requests]
    dtypes: list[TokenDType] = ["int64" if kind == "bigint" else "string" for kind in types]
    known = [
        None if r.growth is None else r.growth.known_tokens(dtype, r.first_id)
        for r, dtype in zip(requests, dtypes, strict=True)
    ]
    alone, together = [], defaultdict(list)
    for number, (request, kind, old) in enumerate(zip(requests, types, known, strict=True)):
        if request.is_plain:
            together[kind].append((number, request))
        else:
            alone.append(_label(_find_tokens(df, request, kind, old), kind, number))
    shared = [_label(count_together(df, found, kind), kind) for kind, found in together.items()]
    # One job, not one per vocabulary: its start costs more than the counting of most columns.
    found = reduce(lambda one, other: one.unionByName(other), [*alone, *shared]).toArrow()
    return [
        _number(_of_vocabulary(found, number, dtype), request, dtype, old)
        for number, (request, dtype, old) in enumerate(zip(requests, dtypes, known, strict=True))
    ]


def _find_tokens(
    df: DataFrame, request: VocabularyRequest, spark_type: str, known: pa.Table | None
) -> DataFrame:
    """The tokens that come to the driver."""
    limits = request.limits
    counted = count_tokens(df, request, spark_type)
    if known is None:
        return _most_frequent(_frequent(counted, limits), limits.max_size)
    return _found_tokens(counted, known, limits)


def _label(tokens: DataFrame, spark_type: str, number: int | None = None) -> DataFrame:
    """The same columns for every vocabulary, whatever its tokens; None: it has its number."""
    from pyspark.sql import functions as F

    def column(name: str, kind: str) -> Column:
        return (F.col(name) if name in tokens.columns else F.lit(None)).cast(kind).alias(name)

    token, none = F.col("token"), F.lit(None)
    is_integer = spark_type == "bigint"
    return tokens.select(
        (F.col(NUMBER_COLUMN) if number is None else F.lit(number)).alias(NUMBER_COLUMN),
        (token if is_integer else none).cast("bigint").alias("int64"),
        (none if is_integer else token).cast("string").alias("string"),
        column("count", "bigint"),
        column(LAST_SEEN_COLUMN, "date"),
        column("is_known", "boolean"),
    )


def _of_vocabulary(found: pa.Table, number: int, dtype: TokenDType) -> pa.Table:
    mine = found.filter(pc.equal(found[NUMBER_COLUMN], number))
    columns = {"token": mine[dtype], **{name: mine[name] for name in _COUNTED}}
    return pa.table(columns)


def _number(
    found: pa.Table, request: VocabularyRequest, dtype: TokenDType, known: pa.Table | None
) -> pa.Table:
    if request.growth is None or known is None:
        return number_tokens(found.select(["token", "count"]), dtype, request.first_id)
    return grow_vocabulary(found, known, request.growth, request.limits.max_size, request.first_id)


def _frequent(counted: DataFrame, limits: TokenLimits) -> DataFrame:
    from pyspark.sql import functions as F

    frequent = F.col("is_eligible") & (F.col("count") >= limits.min_count)
    return counted.where(frequent).drop("is_eligible")


def _most_frequent(counted: DataFrame, size: int | None) -> DataFrame:
    from pyspark.sql import functions as F

    if size is None:
        return counted
    return counted.orderBy(F.desc("count"), F.asc("token")).limit(size)


def _found_tokens(counted: DataFrame, known: pa.Table, limits: TokenLimits) -> DataFrame:
    """Known tokens however rare they are now, and new ones that are frequent enough."""
    from pyspark.sql import functions as F

    if not len(known):
        found = _most_frequent(_frequent(counted, limits), limits.max_size)
        return found.withColumn("is_known", F.lit(False))
    tokens = counted.sparkSession.createDataFrame(known.select(["token"]))
    old = counted.join(tokens, "token", "left_semi").drop("is_eligible")
    new = _frequent(counted.join(tokens, "token", "left_anti"), limits)
    new = _most_frequent(new, limits.max_size)
    return old.withColumn("is_known", F.lit(True)).unionByName(
        new.withColumn("is_known", F.lit(False))
    )

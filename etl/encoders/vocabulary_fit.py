"""Fitted vocabularies: Spark counts the tokens of the train split, the driver assigns their ids.

Ids follow falling counts, ties by token: `assign_ids` in `vocabulary.py`, and for vocabularies
that grow from version to version `extend_vocabulary` in `incremental_vocabulary.py`. All
vocabularies share one scan: the start of a job costs more than the counting of most columns.
"""

from __future__ import annotations

import datetime
import json
import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pyarrow as pa
import pyarrow.compute as pc

from conf.artefacts.encoder_files import read_plan_file
from conf.encoders import TokenDType, VocabularySpec
from conf.encoders.tokens import TopPerGroupConfig
from conf.errors import ConfigError, did_you_mean
from conf.schema import FIRST_TOKEN_ID
from conf.storage.atomic_output import write_text_atomic
from etl.encoders.incremental_vocabulary import (
    IncrementalFit,
    VocabularyDiff,
    diff_vocabularies,
    extend_vocabulary,
)
from etl.encoders.vocabulary import (
    LAST_SEEN_COLUMN,
    assign_ids,
    load_vocabulary,
    number_given,
    read_token_file,
    write_vocabulary,
)

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from etl.encoders.fit import TrainSplit
    from etl.features.plan import FeaturePlan, VocabularyPlan

logger = logging.getLogger("sluice.encoders")

CHANGES_FILE = "vocabulary_changes.json"
NUMBER_COLUMN = "__vocabulary"
_EPOCH = datetime.date(1970, 1, 1)
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


@dataclass(frozen=True)
class VocabularyRequest:
    """A vocabulary to fit.

    Attributes:
        columns: Columns that share it: all of integers or all of strings, scalars or arrays, of
            which each element counts.
        limits: Which tokens are kept.
        first_id: Id of the first token: 2, or more where unknown tokens have buckets.
        incremental: The previous vocabulary, and when tokens expire; None: the vocabulary is
            fitted anew, and later versions do not append to it.
        tokens: Its tokens by rising id, int64 or string, each once; None: those of the split.
    """

    columns: Sequence[str]
    limits: TokenLimits = TokenLimits()
    first_id: int = FIRST_TOKEN_ID
    incremental: IncrementalFit | None = None
    tokens: pa.Array | None = None

    @property
    def is_plain(self) -> bool:
        """Whether all that it asks of a token is how often it occurs."""
        limits = self.limits
        others = (self.incremental, self.tokens, limits.max_size, limits.top_per_group)
        return all(other is None for other in others)


def count_together(
    df: DataFrame, requests: Sequence[tuple[int, VocabularyRequest]], spark_type: str
) -> DataFrame:
    """Counts the tokens of plain vocabularies of one type in one scan.

    Args:
        df: The train split.
        requests: The vocabularies with their numbers.
        spark_type: Type of their tokens.

    Returns:
        One row per vocabulary and token: `__vocabulary`, `token`, `count`.
    """
    from pyspark.sql import functions as F

    from etl.tfrecord.spark.schema import quote_name

    scalars: list[Column] = []
    parts = []
    for number, request in requests:
        for column in request.columns:
            if _is_array(df, column):
                values = F.explode(F.col(quote_name(column)).cast(f"array<{spark_type}>"))
                parts.append(df.select(F.lit(number).alias(NUMBER_COLUMN), values.alias("token")))
            else:
                scalars += [F.lit(number), F.col(quote_name(column)).cast(spark_type)]
    if scalars:
        rows = F.lit(len(scalars) // 2)
        parts.append(df.select(F.stack(rows, *scalars).alias(NUMBER_COLUMN, "token")))
    tokens = reduce(lambda one, other: one.unionAll(other), parts).where("token is not null")
    least = F.lit(1)
    for number, request in requests:
        least = F.when(F.col(NUMBER_COLUMN) == number, request.limits.min_count).otherwise(least)
    counted = tokens.groupBy(NUMBER_COLUMN, "token").agg(F.count("*").alias("count"))
    return counted.where(F.col("count") >= least)


def count_tokens(df: DataFrame, request: VocabularyRequest, spark_type: str) -> DataFrame:
    """Counts the tokens of one vocabulary, whatever it asks.

    Returns:
        One row per token: `token`, `count`, `is_eligible`, and `last_seen` where it is asked for.
    """
    from pyspark.sql import functions as F

    from etl.tfrecord.spark.schema import quote_name

    limits, incremental = request.limits, request.incremental
    chosen = [_tokens(df, request.columns, spark_type).alias("token")]
    measures = [F.count("*").alias("count")]
    time_ms = incremental.time_column_ms if incremental else None
    if time_ms is not None:
        days = F.floor(F.col(quote_name(time_ms)) / F.lit(86_400_000)).cast("int")
        chosen.append(days.alias("__day"))
        measures.append(F.max(F.date_from_unix_date("__day")).alias(LAST_SEEN_COLUMN))
    elif incremental is not None:
        measures.append(F.lit(None).cast("date").alias(LAST_SEEN_COLUMN))
    top = limits.top_per_group
    if top is None:
        tokens = df.select(*chosen).where(F.col("token").isNotNull())
        return tokens.groupBy("token").agg(*measures, F.lit(True).alias("is_eligible"))
    _check_column(df, top.column)
    tokens = df.select(*chosen, F.col(quote_name(top.column)).alias("__group"))
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


def _check_column(df: DataFrame, column: str) -> None:
    if column not in df.columns:
        raise ConfigError(
            "a vocabulary is to be fitted on a column that is not there",
            received=column,
            fix=did_you_mean(column, df.columns),
        )


def spark_type_of(df: DataFrame, columns: Sequence[str]) -> str:
    """Returns the type of the tokens of columns that share a vocabulary: bigint or string.

    Raises:
        ConfigError: No such column, or columns of different or other types.
    """
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

    from etl.tfrecord.spark.schema import quote_name

    quoted = {column: F.col(quote_name(column)) for column in columns}
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
        from `first_id`; of an incremental vocabulary also `last_seen` and `is_retired`. A known
        token that the train split lacks has the count 0.

    Raises:
        ConfigError: No such column, columns of different or other types, or a previous vocabulary
            of another type or first id.
    """
    if not requests:
        return []
    requests = _date_requests(df, requests)
    types = [spark_type_of(df, request.columns) for request in requests]
    dtypes: list[TokenDType] = ["int64" if kind == "bigint" else "string" for kind in types]
    known = [
        None if r.incremental is None else r.incremental.known_tokens(dtype, r.first_id)
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
    if request.tokens is not None:
        tokens = df.sparkSession.createDataFrame(pa.table({"token": request.tokens}))
        return counted.join(tokens, "token", "left_semi").drop("is_eligible")
    if known is None:
        return _most_frequent(_frequent(counted, limits), limits.max_size)
    return _found_tokens(counted, known, request)


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
    if request.tokens is not None:
        return number_given(request.tokens, found, request.first_id)
    if request.incremental is None or known is None:
        return assign_ids(found.select(["token", "count"]), dtype, request.first_id)
    return extend_vocabulary(
        found, known, request.incremental, request.limits.max_size, request.first_id
    )


def _frequent(counted: DataFrame, limits: TokenLimits) -> DataFrame:
    from pyspark.sql import functions as F

    frequent = F.col("is_eligible") & (F.col("count") >= limits.min_count)
    return counted.where(frequent).drop("is_eligible")


def _most_frequent(counted: DataFrame, size: int | None) -> DataFrame:
    from pyspark.sql import functions as F

    if size is None:
        return counted
    return counted.orderBy(F.desc("count"), F.asc("token")).limit(size)


def _drop_expired(counted: DataFrame, growth: IncrementalFit | None) -> DataFrame:
    """Leaves out tokens that have expired: they take the places of no others."""
    from pyspark.sql import functions as F

    if growth is None or growth.oldest_day is None:
        return counted
    return counted.where(F.col(LAST_SEEN_COLUMN) >= F.lit(growth.oldest_day))


def _date_requests(
    df: DataFrame, requests: Sequence[VocabularyRequest]
) -> Sequence[VocabularyRequest]:
    """Tells vocabularies that grow the last day of the train split."""
    from pyspark.sql import functions as F

    from etl.tfrecord.spark.schema import quote_name

    growths = [request.incremental for request in requests if request.incremental is not None]
    column = next((g.time_column_ms for g in growths if g.time_column_ms is not None), None)
    if column is None:
        return requests
    last_ms = df.agg(F.max(quote_name(column))).collect()[0][0]
    last_day = None if last_ms is None else _EPOCH + datetime.timedelta(milliseconds=last_ms)
    return [
        request
        if request.incremental is None
        else replace(request, incremental=replace(request.incremental, last_day=last_day))
        for request in requests
    ]


def _found_tokens(counted: DataFrame, known: pa.Table, request: VocabularyRequest) -> DataFrame:
    """Known tokens however rare they are now, and new ones that are frequent enough."""
    from pyspark.sql import functions as F

    limits, growth = request.limits, request.incremental
    if not len(known):
        found = _most_frequent(_frequent(_drop_expired(counted, growth), limits), limits.max_size)
        return found.withColumn("is_known", F.lit(False))
    tokens = counted.sparkSession.createDataFrame(known.select(["token"]))
    old = counted.join(tokens, "token", "left_semi").drop("is_eligible")
    new = _frequent(_drop_expired(counted, growth).join(tokens, "token", "left_anti"), limits)
    new = _most_frequent(new, limits.max_size)
    return old.withColumn("is_known", F.lit(True)).unionByName(
        new.withColumn("is_known", F.lit(False))
    )


@dataclass(frozen=True)
class Vocabulary:
    """A vocabulary's entry in the plan, and its table."""

    spec: VocabularySpec
    table: pa.Table


def read_previous(directory: Path | None) -> dict[str, Vocabulary]:
    """Reads the vocabularies of an earlier version, by name.

    Args:
        directory: The version's `encoders`; None where there is no earlier version.

    Raises:
        InputDataError: The encoders are damaged.
    """
    if directory is None:
        return {}
    return {
        spec.name: Vocabulary(spec, load_vocabulary(directory, spec))
        for spec in read_plan_file(directory).vocabularies
    }


def fit_vocabulary_files(
    train: TrainSplit, plan: FeaturePlan, directory: Path, previous: Path | None = None
) -> dict[str, Vocabulary]:
    """Fits all vocabularies, and writes them.

    Args:
        train: The train split.
        plan: The features.
        directory: Where the files go; it exists and is empty.
        previous: `encoders` of the version that incremental vocabularies append to, or None.

    Raises:
        InputDataError: The previous encoders are damaged.
        ConfigError: A vocabulary cannot append to the previous one.
    """
    known = read_previous(previous)
    olds = [known.get(v.name) if v.incremental else None for v in plan.vocabularies]
    requests = [_request(train, v, old) for v, old in zip(plan.vocabularies, olds, strict=True)]
    tables = fit_vocabularies(train.rows, requests)
    fitted, changes = {}, []
    for vocabulary, old, table in zip(plan.vocabularies, olds, tables, strict=True):
        path = directory / f"{vocabulary.name}.parquet"
        spec = write_vocabulary(
            table, path, vocabulary.oov_buckets, None if old is None else old.spec
        )
        logger.info("vocabulary %s: %s tokens", vocabulary.name, f"{table.num_rows:,}")
        fitted[vocabulary.name] = Vocabulary(spec, table)
        if vocabulary.incremental:
            changes.append(_diff(fitted[vocabulary.name], old))
    if changes:
        text = json.dumps([change.to_json() for change in changes], indent=1, ensure_ascii=False)
        write_text_atomic(directory / CHANGES_FILE, text + "\n")
    return fitted


def _request(train: TrainSplit, plan: VocabularyPlan, old: Vocabulary | None) -> VocabularyRequest:
    incremental = None
    if plan.incremental:
        incremental = IncrementalFit(
            previous=None if old is None else old.table,
            time_column_ms=train.time_column_ms,
            expire_after_days=plan.expire_after_days,
        )
    return VocabularyRequest(
        plan.columns,
        TokenLimits(plan.min_count, plan.max_size, plan.top_per_group),
        first_id=FIRST_TOKEN_ID + (plan.oov_buckets or 0),
        incremental=incremental,
        tokens=None if plan.path is None else _read_tokens(train, plan),
    )


def _read_tokens(train: TrainSplit, plan: VocabularyPlan) -> pa.Array:
    return read_token_file(train.find_file(plan.path or ""), cast(TokenDType, plan.token_dtype))


def _diff(new: Vocabulary, old: Vocabulary | None) -> VocabularyDiff:
    spec, previous = new.spec, None if old is None else old.table
    diff = diff_vocabularies(spec.name, previous, new.table, spec.version, spec.parent_crc32c)
    logger.info(
        "vocabulary %s, version %s: %s kept, %s added, %s retired, %s revived",
        *(spec.name, spec.version, diff.kept, diff.added, diff.retired, diff.revived),
    )
    return diff

"""Fitted vocabularies: Spark counts the tokens of the train split, the driver assigns their ids.

All vocabularies share one job: its start costs more than the counting of most columns. Those of
one type that ask for no more than how often tokens occur share one scan.
"""

from __future__ import annotations

import datetime
import json
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from conf.artefacts.encoder_files import read_plan_file
from conf.encoders import TokenDType, VocabularySpec
from conf.schema import FIRST_TOKEN_ID
from conf.storage.atomic_output import write_text_atomic
from etl.encoders.vocabulary import (
    LAST_SEEN_COLUMN,
    Growth,
    assign_ids,
    describe_changes,
    extend_vocabulary,
    known_tokens,
    load_vocabulary,
    number_given,
    read_token_file,
    write_vocabulary,
)
from etl.features.plan import VocabularyPlan
from etl.tfrecord.spark.schema import quote_name

if TYPE_CHECKING:
    from etl.encoders.fit import TrainSplit
    from etl.features.plan import FeaturePlan

logger = logging.getLogger("sluice.encoders")

CHANGES_FILE = "vocabulary_changes.json"
_NUMBER = "__vocabulary"
_EPOCH = datetime.date(1970, 1, 1)
_DAY_MS = 86_400_000
_SPARK_TYPES = {"int64": "bigint", "string": "string"}


@dataclass(frozen=True)
class VocabularyFit:
    """A vocabulary to fit."""

    plan: VocabularyPlan
    growth: Growth | None = None  # of one that grows
    tokens: pa.Array | None = None  # by rising id, each once; None: those of the train split

    @property
    def dtype(self) -> TokenDType:
        """Type of the tokens."""
        return cast(TokenDType, self.plan.token_dtype)

    @property
    def first_id(self) -> int:
        """Id of the first token: 2, or more where unknown tokens have buckets."""
        return FIRST_TOKEN_ID + (self.plan.oov_buckets or 0)

    @property
    def is_plain(self) -> bool:
        """Whether all that it asks of a token is how often it occurs."""
        others = (self.growth, self.tokens, self.plan.max_size, self.plan.top_per_group)
        return all(other is None for other in others)


def fit_vocabularies(
    df: DataFrame, fits: Sequence[VocabularyFit], time_ms: str | None = None
) -> list[pa.Table]:
    """Counts the tokens of all vocabularies in one job, and numbers them.

    Tokens are ordered by falling count, ties by token: integers by value, strings by their UTF-8
    bytes, which is the order of Spark's strings, Arrow's and Python's alike. Null is no token;
    the empty string is one. Only the vocabularies come to the driver, as Arrow.

    Args:
        df: The train split.
        fits: The vocabularies.
        time_ms: Column of event times, milliseconds since the epoch; None: there is none.

    Returns:
        Per vocabulary, columns `token` (int64 or string), `id` and `count` (int64), by rising id
        from `first_id`; of one that grows also `last_seen` and `is_retired`. A known
        token that the train split lacks has the count 0.
    """
    if not fits:
        return []
    alone: list[DataFrame] = []
    together: dict[TokenDType, dict[int, VocabularyFit]] = defaultdict(dict)
    for number, fit in enumerate(fits):
        if fit.is_plain:
            together[fit.dtype][number] = fit
        else:
            alone.append(_label(_find_tokens(df, number, fit, time_ms), fit.dtype))
    shared = [_label(_count_together(df, some), dtype) for dtype, some in together.items()]
    found = reduce(lambda one, other: one.unionByName(other), [*alone, *shared]).toArrow()
    return [
        _number(found.filter(pc.equal(found[_NUMBER], number)), fit)
        for number, fit in enumerate(fits)
    ]


def _label(tokens: DataFrame, dtype: TokenDType) -> DataFrame:
    """The same columns for every vocabulary, whatever its tokens."""

    def column(name: str, kind: str, source: str | None) -> Column:
        value = F.col(source) if source in tokens.columns else F.lit(None)
        return value.cast(kind).alias(name)

    return tokens.select(
        _NUMBER,
        column("int64", "bigint", "token" if dtype == "int64" else None),
        column("string", "string", "token" if dtype == "string" else None),
        column("count", "bigint", "count"),
        column(LAST_SEEN_COLUMN, "date", LAST_SEEN_COLUMN),
        column("is_known", "boolean", "is_known"),
    )


def _number(found: pa.Table, fit: VocabularyFit) -> pa.Table:
    columns = [found[name] for name in (fit.dtype, "count", LAST_SEEN_COLUMN, "is_known")]
    found = pa.Table.from_arrays(columns, ["token", "count", LAST_SEEN_COLUMN, "is_known"])
    if fit.tokens is not None:
        return number_given(fit.tokens, found, fit.dtype, fit.first_id)
    if fit.growth is not None:
        return extend_vocabulary(found, fit.growth, fit.plan.max_size, fit.first_id)
    return assign_ids(found, fit.dtype, fit.first_id)


def _select_tokens(df: DataFrame, fits: Mapping[int, VocabularyFit], *more: Column) -> DataFrame:
    """A row per token of vocabularies of one type: their number, `token` and more columns."""
    scalars: list[Column] = []
    parts = []
    for number, fit in fits.items():
        kind = _SPARK_TYPES[fit.dtype]
        for column in fit.plan.columns:
            values = F.col(quote_name(column))
            if df.schema[column].dataType.typeName() == "array":
                tokens = F.explode(values.cast(f"array<{kind}>")).alias("token")
                parts.append(df.select(F.lit(number).alias(_NUMBER), tokens, *more))
            else:
                scalars += [F.lit(number), values.cast(kind)]
    if scalars:
        tokens = F.stack(F.lit(len(scalars) // 2), *scalars).alias(_NUMBER, "token")
        parts.append(df.select(tokens, *more))
    return reduce(lambda one, other: one.unionAll(other), parts).where("token is not null")


def _count_together(df: DataFrame, fits: Mapping[int, VocabularyFit]) -> DataFrame:
    """Counts plain vocabularies of one type in one scan."""
    least = F.lit(1)
    for number, fit in fits.items():
        least = F.when(F.col(_NUMBER) == number, fit.plan.min_count).otherwise(least)
    counted = _select_tokens(df, fits).groupBy(_NUMBER, "token").agg(F.count("*").alias("count"))
    return counted.where(F.col("count") >= least)


def _find_tokens(df: DataFrame, number: int, fit: VocabularyFit, time_ms: str | None) -> DataFrame:
    """The tokens of one vocabulary that come to the driver, with what it asks of them."""
    more, measures = [], [F.count("*").alias("count")]
    if fit.growth is not None and time_ms is not None:
        days = F.floor(F.col(quote_name(time_ms)) / F.lit(_DAY_MS)).cast("int")
        more.append(days.alias("__day"))
        measures.append(F.max(F.date_from_unix_date("__day")).alias(LAST_SEEN_COLUMN))
    for column in fit.plan.top_per_group or ():
        more.append(F.col(quote_name(column)).alias("__group"))
    tokens = _select_tokens(df, {number: fit}, *more)
    counted = tokens.groupBy(_NUMBER, "token").agg(*measures)
    if fit.tokens is not None:
        return counted.join(_to_frame(df, fit.tokens), "token", "left_semi")
    growth = fit.growth
    if growth is None:
        return _most_frequent(counted, tokens, fit)
    # Known tokens however rare they are now, and new ones that are frequent enough.
    known = _to_frame(df, growth.known["token"].combine_chunks())
    new = counted.join(known, "token", "left_anti")
    if growth.oldest_day is not None:  # They take the places of no others.
        new = new.where(F.col(LAST_SEEN_COLUMN) >= F.lit(growth.oldest_day))
    new = _most_frequent(new, tokens, fit).withColumn("is_known", F.lit(False))
    if not len(growth.known):
        return new
    old = counted.join(known, "token", "left_semi").withColumn("is_known", F.lit(True))
    return old.unionByName(new)


def _to_frame(df: DataFrame, tokens: pa.Array) -> DataFrame:
    return df.sparkSession.createDataFrame(pa.table({"token": tokens}))


def _most_frequent(counted: DataFrame, tokens: DataFrame, fit: VocabularyFit) -> DataFrame:
    """The counted tokens that are within the vocabulary's limits."""
    plan = fit.plan
    for kept in (plan.top_per_group or {}).values():
        order = Window.partitionBy("__group").orderBy(F.desc("count"), F.asc("token"))
        by_group = tokens.groupBy("__group", "token").count()
        ranked = by_group.withColumn("__rank", F.row_number().over(order))
        top = ranked.where(F.col("__rank") <= kept).select("token")
        counted = counted.join(top, "token", "left_semi")
    counted = counted.where(F.col("count") >= plan.min_count)
    if plan.max_size is None:
        return counted
    return counted.orderBy(F.desc("count"), F.asc("token")).limit(plan.max_size)


def fit_vocabulary_files(
    train: TrainSplit, plan: FeaturePlan, directory: Path, previous: Path | None = None
) -> dict[str, tuple[VocabularySpec, pa.Table]]:
    """Fits all vocabularies, and writes them; returns their entries in the plan, and tables.

    `previous` is the folder of encoders that vocabularies append to, or None.
    """
    specs = [] if previous is None else read_plan_file(previous).vocabularies
    grown = {vocabulary.name for vocabulary in plan.vocabularies if vocabulary.incremental}
    parents = {spec.name: spec for spec in specs if spec.name in grown}
    known = {name: load_vocabulary(cast(Path, previous), s) for name, s in parents.items()}
    last_day = _find_last_day(train) if grown else None
    fits = [_plan_fit(train, v, known.get(v.name), last_day) for v in plan.vocabularies]
    tables = fit_vocabularies(train.rows, fits, train.time_column_ms)
    fitted, changes = {}, []
    for vocabulary, table in zip(plan.vocabularies, tables, strict=True):
        name = vocabulary.name
        path = directory / f"{name}.parquet"
        spec = write_vocabulary(table, path, vocabulary.oov_buckets, parents.get(name))
        logger.info("vocabulary %s: %s tokens", name, f"{table.num_rows:,}")
        fitted[name] = spec, table
        if vocabulary.incremental:
            changes.append(describe_changes(spec, known.get(name), table))
            logger.info(
                "vocabulary {name}, version {version}: {kept} kept, {added} added, "
                "{retired} retired, {revived} revived".format(**changes[-1])
            )
    if changes:
        text = json.dumps(changes, indent=1, ensure_ascii=False)
        write_text_atomic(directory / CHANGES_FILE, text + "\n")
    return fitted


def _find_last_day(train: TrainSplit) -> datetime.date | None:
    """The last day of the train split, whether or not it has a token."""
    if train.time_column_ms is None:
        return None
    last_ms = train.rows.agg(F.max(quote_name(train.time_column_ms))).collect()[0][0]
    return None if last_ms is None else _EPOCH + datetime.timedelta(milliseconds=last_ms)


def _plan_fit(
    train: TrainSplit,
    plan: VocabularyPlan,
    known: pa.Table | None,
    last_day: datetime.date | None,
) -> VocabularyFit:
    fit = VocabularyFit(plan)
    if plan.incremental:
        tokens = known_tokens(known, fit.dtype, fit.first_id)
        return VocabularyFit(plan, Growth(tokens, last_day, plan.expire_after_days))
    if plan.path is not None:
        return VocabularyFit(plan, None, read_token_file(train.find_file(plan.path), fit.dtype))
    return fit

"""Fitted vocabularies: Spark counts the tokens of the train split, the driver assigns their ids.

All vocabularies share one job: its start costs more than the counting of most columns. Those of
one type that ask for no more than how often tokens occur share one scan. The tokens of a large
vocabulary are sorted by Spark, and pass through the driver a part at a time.
"""

from __future__ import annotations

import datetime
import json
import logging
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from conf.artefacts.encoder_files import read_plan_file
from conf.encoders import TokenDType, VocabularySpec
from conf.local_paths import local_path
from conf.storage.atomic_output import write_text_atomic
from conf.storage.table_files import open_parquet
from etl.encoders.feature_plan import VocabularyPlan
from etl.encoders.vocabulary import (
    LAST_SEEN_COLUMN,
    SPARK_TYPES,
    Growth,
    assign_ids,
    describe_changes,
    extend_vocabulary,
    known_tokens,
    load_vocabulary,
    number_given,
    read_token_file,
    write_ordered,
    write_vocabulary,
)
from etl.tfrecord.spark.schema import quote_name

if TYPE_CHECKING:
    from etl.encoders.feature_plan import FeaturePlan
    from etl.encoders.fit import TrainSplit

logger = logging.getLogger("sluice.encoders")

CHANGES_FILE = "vocabulary_changes.json"
_NUMBER = "__vocabulary"
_COUNTED = pa.schema(
    [
        (_NUMBER, pa.int32()),
        ("int64", pa.int64()),  # the token, of one of two types
        ("string", pa.string()),
        ("count", pa.int64()),
        (LAST_SEEN_COLUMN, pa.date32()),
    ]
)
_PARTS_DIR = ".sorted_tokens"
_EPOCH = datetime.date(1970, 1, 1)
_DAY_MS = 86_400_000


@dataclass(frozen=True)
class VocabularyFit:
    """A vocabulary to fit."""

    plan: VocabularyPlan
    growth: Growth | None = None  # of one that grows
    tokens: pa.Array | None = None  # by rising id, each once; None: those of the train split
    parent: VocabularySpec | None = None  # what it grows out of

    @property
    def needs_all(self) -> bool:
        """Whether the driver numbers the tokens beside others, and so holds all of them."""
        return self.growth is not None or self.tokens is not None

    @property
    def is_plain(self) -> bool:
        """Whether all that it asks of a token is how often it occurs."""
        limits = (self.plan.max_size, self.plan.top_per_group)
        return not self.needs_all and all(limit is None for limit in limits)


def count_tokens(
    df: DataFrame, fits: Sequence[VocabularyFit], time_ms: str | None = None
) -> DataFrame:
    """Counts tokens in one job; null is none, the empty string is one."""
    found = [df.sparkSession.createDataFrame(_COUNTED.empty_table())]
    together: dict[TokenDType, dict[int, VocabularyFit]] = defaultdict(dict)
    for number, fit in enumerate(fits):
        if fit.is_plain:
            together[fit.plan.token_dtype][number] = fit
        else:
            tokens = _find_tokens(df, number, fit, time_ms)
            found.append(tokens.withColumnRenamed("token", fit.plan.token_dtype))
    for dtype, some in together.items():
        found.append(_count_together(df, some).withColumnRenamed("token", dtype))
    return reduce(lambda one, other: one.unionByName(other, allowMissingColumns=True), found)


def number_tokens(found: pa.Table, fits: Sequence[VocabularyFit]) -> list[pa.Table]:
    """Numbers the tokens of vocabularies, each by falling count, ties by token (UTF-8 bytes)."""
    return [
        _number(found.filter(pc.equal(found[_NUMBER], number)), fit)
        for number, fit in enumerate(fits)
    ]


def _number(found: pa.Table, fit: VocabularyFit) -> pa.Table:
    dtype, first_id = fit.plan.token_dtype, fit.plan.first_id
    found = found.select([dtype, "count", LAST_SEEN_COLUMN])
    found = found.rename_columns(["token", "count", LAST_SEEN_COLUMN])
    if fit.tokens is not None:
        return number_given(fit.tokens, found, dtype, first_id)
    if fit.growth is not None:
        return extend_vocabulary(found, fit.growth, fit.plan.max_size, first_id)
    return assign_ids(found, dtype, first_id)


def _select_tokens(df: DataFrame, fits: Mapping[int, VocabularyFit], *more: Column) -> DataFrame:
    """A row per token of vocabularies of one type: their number, `token` and more columns."""
    scalars: list[Column] = []
    parts = []
    for number, fit in fits.items():
        kind = SPARK_TYPES[fit.plan.token_dtype]
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
    if fit.growth is None:
        return _most_frequent(counted, tokens, fit.plan)
    # Known tokens however rare they are now, and new ones that are frequent enough.
    known = _to_frame(df, fit.growth.known["token"].combine_chunks())
    new = counted.join(known, "token", "left_anti")
    if fit.growth.oldest_day is not None:  # They take the places of no others.
        new = new.where(F.col(LAST_SEEN_COLUMN) >= F.lit(fit.growth.oldest_day))
    old = counted.join(known, "token", "left_semi")
    return old.unionByName(_most_frequent(new, tokens, fit.plan))


def _to_frame(df: DataFrame, tokens: pa.Array) -> DataFrame:
    return df.sparkSession.createDataFrame(pa.table({"token": tokens}))


def _most_frequent(counted: DataFrame, tokens: DataFrame, plan: VocabularyPlan) -> DataFrame:
    """The counted tokens that are within the vocabulary's limits."""
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
    train: TrainSplit,
    plan: FeaturePlan,
    directory: Path,
    most_bytes: int,
    previous: Path | None = None,
) -> list[VocabularySpec]:
    """Fits all vocabularies, and writes them; returns their entries in the plan."""
    fits = _plan_fits(train, plan, previous)
    if not fits:
        return []
    counted = count_tokens(train.rows, fits, train.time_column_ms).persist()
    try:
        large = _find_large(counted, fits, most_bytes)
        fitted = {n: _write_sorted(counted, n, fits[n], directory) for n in large}
        held = counted.where(~F.col(_NUMBER).isin(large)) if large else counted
        tables = number_tokens(held.toArrow(), fits)
    finally:
        counted.unpersist()
    for number, (fit, table) in enumerate(zip(fits, tables, strict=True)):
        if number not in fitted:
            path = directory / f"{fit.plan.name}.parquet"
            fitted[number] = write_vocabulary(table, path, fit.plan.oov_buckets, fit.parent)
    specs = [fitted[number] for number in range(len(fits))]
    _report(specs, fits, tables, directory)
    return specs


def _find_large(counted: DataFrame, fits: Sequence[VocabularyFit], most_bytes: int) -> list[int]:
    """The vocabularies that the driver is not to hold, by number."""
    numbers = [number for number, fit in enumerate(fits) if not fit.needs_all]
    bytes_each = F.coalesce(F.octet_length("string") + 4, F.lit(8)).cast("bigint")
    sizes = counted.where(F.col(_NUMBER).isin(numbers)).groupBy(_NUMBER)
    large = sizes.agg(F.sum(bytes_each).alias("bytes")).where(F.col("bytes") > most_bytes)
    return [row[_NUMBER] for row in large.collect()]


def _write_sorted(
    counted: DataFrame, number: int, fit: VocabularyFit, directory: Path
) -> VocabularySpec:
    """Writes a vocabulary whose tokens Spark sorts; tasks leave a file of each range of them."""
    parts = directory.absolute() / _PARTS_DIR
    tokens = counted.where(F.col(_NUMBER) == number)
    tokens = tokens.select(F.col(fit.plan.token_dtype).alias("token"), "count")
    try:
        tokens.orderBy(F.desc("count"), F.asc("token")).write.parquet(f"file://{parts}")
        batches = chain.from_iterable(map(_read_batches, sorted(parts.glob("*.parquet"))))
        file = directory / f"{fit.plan.name}.parquet"
        return write_ordered(batches, file, fit.plan.token_dtype, fit.plan.oov_buckets)
    finally:
        shutil.rmtree(parts, ignore_errors=True)


def _read_batches(part: Path) -> Iterator[pa.RecordBatch]:
    with open_parquet(part) as opened:
        yield from opened.iter_batches()


def _report(
    specs: Sequence[VocabularySpec],
    fits: Sequence[VocabularyFit],
    tables: Sequence[pa.Table],
    directory: Path,
) -> None:
    """Logs the vocabularies, and writes down how those that grow have changed."""
    changes = []
    for spec, fit, table in zip(specs, fits, tables, strict=True):
        logger.info("vocabulary %s: %s tokens", spec.name, f"{spec.size - fit.plan.first_id:,}")
        if fit.growth is not None:
            changes.append(describe_changes(spec, fit.growth.known, table))
            logger.info(
                "vocabulary {name}, version {version}: {kept} kept, {added} added, "
                "{retired} retired, {revived} revived".format(**changes[-1])
            )
    if changes:
        text = json.dumps(changes, indent=1, ensure_ascii=False)
        write_text_atomic(directory / CHANGES_FILE, text + "\n")


def _find_last_day(train: TrainSplit) -> datetime.date | None:
    """The last day of the train split, whether or not it has a token."""
    if train.time_column_ms is None:
        return None
    last_ms = train.rows.agg(F.max(quote_name(train.time_column_ms))).collect()[0][0]
    return None if last_ms is None else _EPOCH + datetime.timedelta(milliseconds=last_ms)


def _plan_fits(train: TrainSplit, plan: FeaturePlan, previous: Path | None) -> list[VocabularyFit]:
    specs = [] if previous is None else read_plan_file(previous).vocabularies
    parents = {spec.name: spec for spec in specs}
    last_day = _find_last_day(train) if plan.has_incremental_vocabulary else None
    fits = []
    for own in plan.vocabularies:
        fit, parent = VocabularyFit(own), parents.get(own.name)
        if own.incremental:
            known = None if parent is None else load_vocabulary(cast(Path, previous), parent)
            tokens = known_tokens(known, own.token_dtype, own.first_id)
            growth = Growth(tokens, last_day, own.expire_after_days)
            fit = VocabularyFit(own, growth, parent=parent)
        elif own.path is not None:
            file = local_path(train.data_dir) / local_path(own.path)
            fit = VocabularyFit(own, tokens=read_token_file(file, own.token_dtype))
        fits.append(fit)
    return fits

"""Vocabularies that are too large for each Python worker: a join in Spark looks their tokens up.

Beside a column of tokens stands then what was found of them, which is encoded in their place
(`etl.encoders.token_lookup.JoinedTokenEncoder`). The tokens of a list are joined one by one, and
put together again in their order, for each list once: what they become depends on the list alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
from pyarrow.parquet import read_metadata
from pyspark.sql import functions as F

from conf.encoders import EncoderPlan, VocabularySpec
from conf.storage.table_files import open_parquet
from etl.encoders.pipeline import raw_inputs
from etl.encoders.token_lookup import found_column
from etl.encoders.vocabulary import SPARK_TYPES, live_tokens, measure_tokens
from etl.tfrecord.spark.schema import quote_name
from etl.tfrecord.spark.write_job import use_own_python

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_TOKEN, _KNOWN, _ID = "__token", "__known_token", "__token_id"
_LIST, _KEY, _PLACE = "__list", "__list_key", "__place"


@dataclass(frozen=True)
class JoinedColumn:
    """A raw column whose tokens are looked up by a join."""

    column: str
    is_list: bool
    directory: Path  # of the encoders
    spec: VocabularySpec

    @property
    def name(self) -> str:
        """The column of what was found."""
        return found_column(self.spec.name, self.column)

    @property
    def tokens(self) -> Column:
        """The raw column, as tokens."""
        kind = SPARK_TYPES[self.spec.token_dtype]
        return F.col(quote_name(self.column)).cast(f"array<{kind}>" if self.is_list else kind)

    def look_up(self, rows: DataFrame) -> DataFrame:
        """Replaces the tokens of rows by what is found of them."""
        known = read_tokens(rows.sparkSession, self.directory, self.spec).toDF(_KNOWN, _ID)
        unknown = F.lit(None) if self.spec.oov_buckets is None else F.col(_TOKEN)
        unknown = F.when(F.col(_ID).isNull(), unknown).cast(SPARK_TYPES[self.spec.token_dtype])
        found = F.struct(F.col(_ID).alias("id"), unknown.alias("unknown"))
        joined = rows.join(known.hint("merge"), F.col(_TOKEN) == F.col(_KNOWN), "left")
        return joined.withColumn(self.name, found).drop(_TOKEN, _KNOWN, _ID)


def plan_joins(directory: Path, plan: EncoderPlan, most_bytes: int) -> tuple[JoinedColumn, ...]:
    """Plans the joins of the vocabularies with more bytes of tokens than a worker may hold."""
    large = {
        spec.name: spec
        for spec in plan.vocabularies
        if measure_tokens(directory / spec.file) > most_bytes
    }
    found: dict[str, JoinedColumn] = {}
    for spec, column in zip(plan.schema.features, plan.columns, strict=True):
        if column.vocabulary in large:
            raw = raw_inputs(spec, column)[0]
            own = JoinedColumn(raw.name, raw.is_list, directory, large[column.vocabulary])
            found[own.name] = own
    return tuple(found.values())


def join_vocabularies(records: DataFrame, joined: Sequence[JoinedColumn]) -> DataFrame:
    """Adds what was found of the tokens of each joined column; no row is added or left out.

    Lists are taken from the records as they came: each join is in the plan once.
    """
    rows = records
    for column in joined:
        if column.is_list:
            rows = _join_lists(rows, _find_lists(records, column), column)
        else:
            rows = _join_values(rows, column)
    return rows


def _join_values(records: DataFrame, column: JoinedColumn) -> DataFrame:
    return column.look_up(records.withColumn(_TOKEN, column.tokens))


def _find_lists(records: DataFrame, column: JoinedColumn) -> DataFrame:
    """What was found of the tokens of each list, by the list's key."""
    tokens = column.tokens
    lists = records.select(_list_key(tokens).alias(_KEY), tokens.alias(_LIST)).dropDuplicates(
        [_KEY]
    )
    values = column.look_up(lists.select(_KEY, F.posexplode(_LIST).alias(_PLACE, _TOKEN)))
    pairs = values.groupBy(_KEY).agg(
        F.collect_list(F.struct(_PLACE, quote_name(column.name))).alias(_LIST)
    )
    return pairs.select(_KEY, F.sort_array(_LIST)[column.name].alias(column.name))


def _join_lists(rows: DataFrame, found: DataFrame, column: JoinedColumn) -> DataFrame:
    tokens, name = column.tokens, column.name
    joined = rows.withColumn(_KEY, _list_key(tokens)).join(found, _KEY, "left").drop(_KEY)
    # A list without values has no place.
    empty = F.when(tokens.isNotNull(), F.array().cast(joined.schema[name].dataType))
    return joined.withColumn(name, F.coalesce(F.col(quote_name(name)), empty))


def _list_key(tokens: Column) -> Column:
    # JSON leaves nulls out unless they are kept: a null must not look like another value.
    return F.unhex(F.sha2(F.to_json(tokens, {"ignoreNullFields": "false"}), 256))


def read_tokens(spark: SparkSession, directory: Path, spec: VocabularySpec) -> DataFrame:
    """Reads a vocabulary as a frame: `token` and `id`, without those that are retired.

    Spark takes any frame that tasks in Python make for a small one: a join with it needs a hint.
    """
    use_own_python()
    file = (directory / spec.file).absolute()
    groups = read_metadata(file).num_row_groups

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with open_parquet(file) as opened:
            for group in chain.from_iterable(batch["id"].to_pylist() for batch in batches):
                yield from live_tokens(opened.read_row_group(group)).to_batches()

    columns = f"token {SPARK_TYPES[spec.token_dtype]}, id bigint"
    return spark.range(0, groups, 1, max(1, groups)).mapInArrow(read, columns)

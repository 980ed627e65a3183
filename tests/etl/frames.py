"""Sources that lie in memory: logs and dictionaries without files, for small frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from conf.etl import BuildConfig, SourceConfig
from etl.sources.source import FILE_COLUMN, LINE_COLUMN, ORDER_COLUMN, REASON_COLUMN, Source

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_SPARK_TYPES = {"int64": "bigint", "float32": "float", "string": "string"}


def columns(**types: str) -> list[dict[str, Any]]:
    """Column declarations; a type that ends in `?` is nullable."""
    return [
        {"name": name, "type": kind.removesuffix("?"), "nullable": kind.endswith("?")}
        for name, kind in types.items()
    ]


def behaviour_config(**changes: Any) -> BuildConfig:
    """A log of behaviours, without a main history unless one is asked for."""
    data: dict[str, Any] = {
        "name": "behaviours",
        "sources": {
            "log": {
                "path": "log.tsv",
                "columns": columns(
                    user="int64", item="int64", action="string", price="float32", ts="int64"
                ),
            }
        },
        "events": {"source": "log", "user": "user", "item": "item", "time": "ts"},
        "history": None,
        "split": {"validation": False},
        "features": [
            {"name": "user", "column": "user", "role": "user"},
            {"name": "item", "column": "item", "role": "item"},
        ],
    }
    return BuildConfig.model_validate({**data, **changes})


def rows_frame(
    spark: SparkSession, config: SourceConfig, rows: Sequence[Sequence[Any]]
) -> DataFrame:
    """The declared columns and `__order`: the place in the sequence."""
    fields = [f"{c.name} {_SPARK_TYPES[c.type]}" for c in config.columns]
    schema = ", ".join([*fields, "line bigint"])
    frame = spark.createDataFrame([(*row, i) for i, row in enumerate(rows)], schema)
    order = F.struct(F.lit("f").alias("file"), F.lit(0).alias("block"), F.col("line"))
    return frame.withColumn(ORDER_COLUMN, order).drop("line")


def memory_source(
    spark: SparkSession, config: BuildConfig, name: str, rows: Sequence[Sequence[Any]]
) -> Source:
    """A source as it would be read from lines that are all good."""
    nothing = F.lit(None).cast("string")
    frame = rows_frame(spark, config.sources[name], rows)
    for column in (REASON_COLUMN, LINE_COLUMN, FILE_COLUMN):
        frame = frame.withColumn(column, nothing)
    return Source(name, frame, ())

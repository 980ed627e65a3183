"""Generated logs with Zipf users and items, by Spark's range and a hash: the same anywhere."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from conf.etl import BuildConfig

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

EVENTS_PER_USER = 50
EVENTS_PER_ITEM = 100
HEAVY_SHARE_PERCENT = 5
FIRST_TS_S, SPAN_S = 1_700_000_000, 90 * 24 * 3600
CATEGORIES = 40
HISTORY_LEN = 50
MIN_DWELL = 150.0

_EVENTS = "user_id bigint, item_id bigint, dwell float, ts bigint, device string"
_USERS = "user_id bigint, country string, age bigint"
_ITEMS = "item_id bigint, category string, tags string"
SCHEMAS = {"events": _EVENTS, "users": _USERS, "items": _ITEMS}


@dataclass(frozen=True)
class LogSize:
    """How large the generated logs are.

    Attributes:
        rows: Events.
        is_skewed: Whether one user has 5 % of the events.
    """

    rows: int
    is_skewed: bool = False

    @property
    def users(self) -> int:
        """Number of users."""
        return max(100, self.rows // EVENTS_PER_USER)

    @property
    def items(self) -> int:
        """Number of items."""
        return max(100, self.rows // EVENTS_PER_ITEM)

    @property
    def name(self) -> str:
        """Name for tables and folders."""
        return f"{self.rows:,} rows{', one user has 5 %' if self.is_skewed else ''}"


def _uniform(name: str) -> Column:
    """A number in [0, 1) by a hash of the row's id and the column's name."""
    return F.pmod(F.xxhash64(F.col("id"), F.lit(name)), F.lit(1 << 40)) / float(1 << 40)


def build_events(spark: SparkSession, size: LogSize, partitions: int) -> DataFrame:
    """Builds the event log.

    Users follow a Zipf law of exponent 1/2 (rank = N u²), items one of exponent 1
    (rank = N^u), by the inverse of the distribution function of the continuous law.
    """
    user = F.floor(_uniform("user") ** 2 * size.users)
    if size.is_skewed:
        is_heavy = F.pmod(F.xxhash64(F.col("id"), F.lit("heavy")), F.lit(100)) < HEAVY_SHARE_PERCENT
        user = F.when(is_heavy, F.lit(0)).otherwise(user)
    item = F.floor(F.pow(F.lit(float(size.items)), _uniform("item"))) - 1
    device = F.element_at(
        F.array(*map(F.lit, ("phone", "tablet", "desktop", "tv"))),
        (F.floor(_uniform("device") * 4) + 1).cast("int"),
    )
    return spark.range(0, size.rows, 1, partitions).select(
        user.cast("bigint").alias("user_id"),
        item.cast("bigint").alias("item_id"),
        F.round(_uniform("dwell") * 300, 1).cast("float").alias("dwell"),
        (F.lit(FIRST_TS_S) + F.floor(_uniform("ts") * SPAN_S)).cast("bigint").alias("ts"),
        device.alias("device"),
    )


def build_users(spark: SparkSession, size: LogSize) -> DataFrame:
    """Builds the dictionary of users."""
    return spark.range(size.users).select(
        F.col("id").alias("user_id"),
        F.concat(F.lit("c"), (F.floor(_uniform("country") * 60)).cast("string")).alias("country"),
        (F.floor(_uniform("age") * 60) + 15).cast("bigint").alias("age"),
    )


def build_items(spark: SparkSession, size: LogSize) -> DataFrame:
    """Builds the dictionary of items."""
    tag = [F.floor(_uniform(f"tag{k}") * 200).cast("string") for k in range(3)]
    category = F.floor(_uniform("category") * CATEGORIES).cast("string")
    return spark.range(size.items).select(
        F.col("id").alias("item_id"),
        category.alias("category"),
        F.concat_ws("|", *tag).alias("tags"),
    )


def write_logs(spark: SparkSession, size: LogSize, folder: Path, partitions: int) -> int:
    """Writes the logs as tab-separated text; returns their bytes."""
    frames = {
        "events": build_events(spark, size, partitions),
        "users": build_users(spark, size),
        "items": build_items(spark, size),
    }
    for name, frame in frames.items():
        frame.write.mode("overwrite").option("sep", "\t").csv(str(folder / name))
    return sum(file.stat().st_size for file in folder.rglob("part-*"))


def build_config(folder: Path, root: Path, **output: Any) -> BuildConfig:
    """The build that is measured: two dictionaries, a history of 50, a label, ten features."""
    source: dict[str, Any] = {"separator": "\t"}
    plain = {"kind": "identity"}
    vocabulary = {"kind": "vocabulary", "name": "item_id"}
    return BuildConfig.model_validate({
        "name": "bench",
        "data_dir": str(folder),
        "sources": {
            "events": {**source, "path": "events", "columns": [
                {"name": "user_id", "type": "int64"}, {"name": "item_id", "type": "int64"},
                {"name": "dwell", "type": "float32"}, {"name": "ts", "type": "int64"},
                {"name": "device", "type": "string"}]},
            "users": {**source, "path": "users", "key": "user_id", "columns": [
                {"name": "user_id", "type": "int64"}, {"name": "country", "type": "string"},
                {"name": "age", "type": "int64"}]},
            "items": {**source, "path": "items", "key": "item_id", "columns": [
                {"name": "item_id", "type": "int64"}, {"name": "category", "type": "string"},
                {"name": "tags", "type": "list<string>", "separator": "|"}]},
        },
        "events": {"source": "events", "user": "user_id", "item": "item_id", "time": "ts"},
        "joins": [
            {"source": "users", "column": "user_id"},
            {"source": "items", "column": "item_id"},
        ],
        "history": {"name": "history", "max_len": HISTORY_LEN},
        "label": {"column": "dwell", "at_least": MIN_DWELL},
        "split": {"strategy": "leave_one_out", "validation_users": 1000},
        "features": [
            {"name": "user_id", "column": "user_id", "role": "user"},
            {"name": "country", "column": "country", "role": "user"},
            {"name": "age", "column": "age", "role": "user"},
            {"name": "history", "column": "history", "role": "user", "max_len": HISTORY_LEN,
             "encoding": vocabulary},
            {"name": "item_id", "column": "item_id", "role": "item"},
            {"name": "category", "column": "category", "role": "item"},
            {"name": "tags", "column": "tags", "role": "item"},
            {"name": "device", "column": "device", "role": "context"},
            {"name": "dwell", "column": "dwell", "role": "context", "encoding": plain},
            {"name": "ts", "column": "ts", "role": "id", "encoding": plain},
        ],
        "output": {"root": str(root), **output},
    })  # fmt: skip

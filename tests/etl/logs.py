"""Small logs whose every outcome is known, in files and in memory, with their configs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from conf.etl.build import BuildConfig
from conf.etl.sources import SourceConfig
from conf.load import override_config
from etl.sources.source import FILE_COLUMN, LINE_COLUMN, ORDER_COLUMN, REASON_COLUMN, Source

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


USERS = ["1::F::a", "2::M::b", "3::F::a", "9::M::never seen"]
ITEMS = ["10::x|y", "11::x", "12::y|z", "13::z", "14::", "15::x", "99::never seen"]
RATINGS = [
    # user 1: out of order in the file; 12 and 13 share a time, the file's order decides.
    *("1::11::5::200", "1::10::3::100", "1::12::4::300", "1::13::2::300", "1::14::5::400"),
    "1::10::3::100",  # exact duplicate
    "1::77::3::150",  # unknown item
    *("2::10::4::100", "2::12::4::200", "2::15::1::300"),
    *("3::10::5::50", "3::11::5::60"),  # too few events to be split
    *("8::10::5::10", "8::11::5::20"),  # unknown user
]


def write_logs(folder: Path, ratings: list[str] = RATINGS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in (("users", USERS), ("items", ITEMS), ("ratings", ratings)):
        (folder / f"{name}.dat").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def _dat_file(name: str, declared: list[dict[str, Any]], **more: str) -> dict[str, Any]:
    return {"path": f"{name}.dat", "separator": "::", "columns": declared, **more}


def build_config(logs: Path, root: Path, **changes: Any) -> BuildConfig:
    tags = {"name": "tags", "type": "list<string>", "separator": "|", "nullable": True}
    data = {
        "name": "small",
        "data_dir": str(logs),
        "sources": {
            "ratings": _dat_file(
                "ratings", columns(user="int64", item="int64", rating="int64", ts="int64")
            ),
            "users": _dat_file(
                "users", columns(user="int64", gender="string", group="string"), key="user"
            ),
            "items": _dat_file("items", [*columns(item="int64"), tags], key="item"),
        },
        "events": {"source": "ratings", "user": "user", "item": "item", "time": "ts"},
        "joins": [{"source": "users", "column": "user"}, {"source": "items", "column": "item"}],
        "histories": [{"name": "history", "max_len": 3}],
        "label": {"column": "rating", "at_least": 4},
        "split": {"strategy": "leave_one_out"},
        "features": [
            feature("user", "user", "user"),
            feature("gender", "gender", "user"),
            feature("history", "history", "user", kind="vocabulary", name="item", max_len=3),
            feature("item", "item", "item"),
            feature("tags", "tags", "item"),
            feature("rating", "rating", kind="identity"),
        ],
        "output": {"root": str(root), "shards": 2, "eval_shards": 1},
    }
    return BuildConfig.model_validate({**data, **changes})


def feature(name: str, column: str, role: str = "context", /, **encoding: Any) -> dict[str, Any]:
    """A feature of a config; without an encoding, with the usual one."""
    limits = {key: encoding.pop(key) for key in ("max_len", "length") if key in encoding}
    encodings = {"encoding": encoding} if encoding else {}
    return {"name": name, "column": column, "role": role, **encodings, **limits}


def change_keys(config: BuildConfig, changes: Mapping[str, Any]) -> BuildConfig:
    """A config with some keys set, by their paths: `sources.ratings.columns.3.type`."""
    return override_config(config, changes, "of the test")


_SPARK_TYPES = {
    "int64": "bigint", "float32": "float", "string": "string", "list<int64>": "array<bigint>",
}  # fmt: skip


def columns(**types: str) -> list[dict[str, Any]]:
    """Column declarations; a type that ends in `?` is nullable."""
    return [
        {"name": name, "type": kind.removesuffix("?"), "nullable": kind.endswith("?")}
        for name, kind in types.items()
    ]


def behaviour_config(**changes: Any) -> BuildConfig:
    """A log of behaviours, without a main history unless one is asked for."""
    log = {"user": "int64", "item": "int64", "action": "string", "price": "float32", "ts": "int64"}
    data: dict[str, Any] = {
        "name": "behaviours",
        "sources": {"log": {"path": "log.tsv", "columns": columns(**log)}},
        "events": {"source": "log", "user": "user", "item": "item", "time": "ts"},
        "histories": [],
        "split": {"validation": False},
        "features": [feature("user", "user", "user"), feature("item", "item", "item")],
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


INTERNAL = {
    "__drop": "string",
    "__skip": "string",
    "__given_test": "boolean",
    "__given_validation": "boolean",
    "__position": "bigint",
    "__moment": "bigint",
    "__tie": "boolean",
    "__total": "bigint",
    "__event_ts_ms": "bigint",
    "__split": "string",
    "label": "float",
}
DEFAULTS = {"__given_test": False, "__given_validation": False, "__split": "train"}


def log_config(**changes: Any) -> BuildConfig:
    """A log of users, items, actions and times, with a dictionary of items."""
    log = {"user": "int64", "item": "int64", "action": "string", "dwell": "float32", "ts": "int64"}
    items = columns(item="int64", genre="string")
    orders = columns(buyer="int64", product="int64", at="int64")
    data = {
        "name": "log",
        "sources": {
            "log": {"path": "log.tsv", "columns": columns(**log)},
            "items": {"path": "items.tsv", "key": "item", "columns": items},
            "orders": {"path": "orders.tsv", "columns": orders},
        },
        "events": {"source": "log", "user": "user", "item": "item", "time": "ts"},
        "joins": [{"source": "items", "column": "item"}],
        "features": [
            feature("user", "user", "user"),
            feature("item", "item", "item"),
            feature("genre", "genre", "item"),
        ],
    }
    return BuildConfig.model_validate({**data, **changes})


def frame(spark: SparkSession, types: dict[str, str], rows: Sequence[dict[str, Any]]) -> DataFrame:
    """A frame of rows given by name; what the build's own columns lack is filled in."""
    types = {**types, **INTERNAL}
    values = [tuple({**DEFAULTS, **row}.get(name) for name in types) for row in rows]
    return spark.createDataFrame(values, ", ".join(f"`{n}` {t}" for n, t in types.items()))


def ctr_config(folder: Path, **changes: Any) -> BuildConfig:
    """A log whose rows are samples: a click, a number and two categories, some missing."""
    log = columns(click="int64", count="float32?", site="string?", device="string?")
    data = {
        "name": "clicks",
        "data_dir": str(folder),
        "sources": {"log": {"path": "log.tsv", "columns": log}},
        "events": {"source": "log"},
        "label": {"column": "click", "at_least": 1},
        "split": {"strategy": "hash", "test": 0.2, "validation": 0.2},
        "features": [feature("site", "site"), feature("device", "device")],
        "output": {"root": str(folder / "datasets"), "shards": 2, "eval_shards": 1},
    }
    return BuildConfig.model_validate({**data, **changes})

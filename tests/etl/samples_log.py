"""Frames and configs of small logs for the parts that make samples of events."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.etl import BuildConfig

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

IDENTITY = {"kind": "identity"}
INTERNAL = {
    "__drop": "string",
    "__skip": "string",
    "__given_test": "boolean",
    "__given_validation": "boolean",
    "__position": "bigint",
    "__total": "bigint",
    "__event_ts_ms": "bigint",
    "__split": "string",
    "label": "float",
}
DEFAULTS = {"__given_test": False, "__given_validation": False, "__split": "train"}


def log_config(**changes: Any) -> BuildConfig:
    """A log of users, items, actions and times, with a dictionary of items."""
    names = [("user", "int64"), ("item", "int64"), ("action", "string"), ("dwell", "float32")]
    columns = [{"name": n, "type": t} for n, t in (*names, ("ts", "int64"))]
    data = {
        "name": "log",
        "sources": {
            "log": {"path": "log.tsv", "columns": columns},
            "items": {
                "path": "items.tsv",
                "key": "item",
                "columns": [
                    {"name": "item", "type": "int64"},
                    {"name": "genre", "type": "string"},
                ],
            },
            "orders": {
                "path": "orders.tsv",
                "columns": [{"name": n, "type": "int64"} for n in ("buyer", "product", "at")],
            },
        },
        "events": {"source": "log", "user": "user", "item": "item", "time": "ts"},
        "joins": [{"source": "items", "column": "item"}],
        "features": [
            {"name": "user", "column": "user", "role": "user"},
            {"name": "item", "column": "item", "role": "item"},
            {"name": "genre", "column": "genre", "role": "item"},
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
    data = {
        "name": "clicks",
        "data_dir": str(folder),
        "sources": {
            "log": {
                "path": "log.tsv",
                "columns": [
                    {"name": "click", "type": "int64"},
                    {"name": "count", "type": "float32", "nullable": True},
                    {"name": "site", "type": "string", "nullable": True},
                    {"name": "device", "type": "string", "nullable": True},
                ],
            }
        },
        "events": {"source": "log"},
        "label": {"column": "click", "at_least": 1},
        "split": {"strategy": "hash", "test_fraction": 0.2, "validation_fraction": 0.2},
        "features": [
            {"name": "site", "column": "site", "role": "context"},
            {"name": "device", "column": "device", "role": "context"},
        ],
        "output": {"root": str(folder / "datasets"), "shards": 2, "eval_shards": 1},
    }
    return BuildConfig.model_validate({**data, **changes})

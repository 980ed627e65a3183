"""Versions of single days: numbers of the first are kept, then fitted anew."""

from __future__ import annotations

import itertools
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.dates import DateRange
from conf.etl.build import BuildConfig
from etl.build import BuildResult, build_dataset
from etl.versions.run_fingerprint import RunRequest
from tests.etl.logs import build_config, columns, feature

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DAY_S = 24 * 3600
NUMBERS = ("price", "level", "item_rate", "item_count", "crossed", "weight")


def log_config(folder: Path) -> BuildConfig:
    """Prices double from day to day, and each day brings an item of its own."""
    rows = []
    for day, step, user in itertools.product(range(3), range(8), range(1, 4)):
        item = 90 + day if step % 4 == 3 else 10 + (user + step) % 3
        price = "" if (step + user) % 8 == 1 else f"{(1 + day) ** 2 * (1.1 + step)}"
        rows.append(f"{user},{item},{price},{(step + user) % 2},{day * DAY_S + 100 * step + user}")
    folder.mkdir(parents=True)
    (folder / "log.csv").write_text("\n".join(rows) + "\n")
    items = [f"{item},{item % 7 + 0.5 if item != 91 else ''}" for item in (10, 11, 12, 90, 91, 92)]
    (folder / "items.csv").write_text("\n".join(items) + "\n")
    declared = columns(user="int64", item="int64", price="float64?", bought="int64", ts="int64")

    return build_config(
        folder, folder / "datasets", histories=[], seen=False,
        sources={
            "log": {"path": "log.csv", "separator": ",", "columns": declared},
            "items": {"path": "items.csv", "separator": ",", "key": "item",
                      "columns": columns(item="int64", weight="float32?")},
        },
        joins=[{"source": "items", "column": "item"}],
        events={"source": "log", "user": "user", "item": "item", "time": "ts"},
        label={"column": "bought", "at_least": 1},
        split={"strategy": "temporal", "validation": False, "test": 0.25},
        features=[
            feature("user", "user", "user", kind="vocabulary"),
            feature("item", "item", "item", kind="vocabulary", incremental=True),
            feature("weight", "weight", "item", kind="normalize", fill_missing=2.0),
            feature("price", "price", "context", kind="normalize"),
            feature("level", "price", "context", kind="quantile", buckets=4),
            feature("item_rate", "item", "context", kind="target", name="item"),
            feature("item_count", "item", "context", kind="count", name="item"),
            feature("crossed", "item", "context", kind="cross", crossed_with=["price"],
                    buckets=50, prepared={"price": {"kind": "quantile", "buckets": 3}}),
            feature("hot", "user", "context", kind="multi_hot"),
        ],
    )  # fmt: skip


def run(day: int, **asked: Any) -> RunRequest:
    return RunRequest(DateRange(date(1970, 1, 1 + day), date(1970, 1, 1 + day)), **asked)


def build_days(spark: SparkSession, config: BuildConfig) -> list[BuildResult]:
    """The version of day 0, that of day 1 after it, and that of day 1 fitted anew."""
    # Each day's log is what had been written by then.
    log = Path(config.data_dir) / "log.csv"
    whole = log.read_text().splitlines()
    built = []
    for day, request in ((0, run(0)), (1, run(1)), (1, run(1, refit=True))):
        log.write_text("\n".join(line for line in whole if int(line.split(",")[4]) // DAY_S <= day))
        built.append(build_dataset(spark, config, request=request))
    return built

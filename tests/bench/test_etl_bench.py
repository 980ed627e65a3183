"""Generated logs: as skewed as they say, the same however they are partitioned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from pyspark.sql import functions as F
from rich.console import Console

from etl.encoders.feature_plan import plan_features
from tests.bench.clock import DriverResult
from tests.bench.etl import __main__
from tests.bench.etl.__main__ import BAR, BARE, BUILD, BY_HAND, BY_HAND_BAR, EtlSettings
from tests.bench.etl.driver import (
    HISTORY_LEN,
    SCHEMAS,
    EtlJob,
    LogSize,
    build_config,
    build_events,
    run_by_hand,
    write_logs,
)
from tests.bench.measurements import judge

ROWS = 20_000


def test_users_and_items_follow_zipf_and_one_user_may_have_five_percent(spark, tmp_path):
    size = LogSize(ROWS)
    events = build_events(spark, size, 2)
    counts = {
        name: [r["count"] for r in events.groupBy(name).count().orderBy(F.desc("count")).collect()]
        for name in ("user_id", "item_id")
    }
    assert len(counts["user_id"]) <= size.users
    assert len(counts["item_id"]) <= size.items
    # Exponent 1/2: a quarter of the ranks has half of the events.
    quarter = sum(counts["user_id"][: size.users // 4])
    assert abs(quarter / ROWS - 0.5) < 0.03
    # Exponent 1: rank 1 has ln 2 / ln N of them.
    assert abs(counts["item_id"][0] / ROWS - 0.131) < 0.02
    usual = events.where("user_id = 0").count() / ROWS
    heavy = build_events(spark, LogSize(ROWS, is_skewed=True), 2).where("user_id = 0").count()
    assert abs(heavy / ROWS - (0.05 + 0.95 * usual)) < 0.01
    plan_features(build_config(tmp_path, tmp_path))


def test_the_same_events_whatever_the_partitions(spark):
    def digest(partitions: int) -> int:
        events = build_events(spark, LogSize(2000), partitions)
        return events.select(F.sum(F.xxhash64("*").cast("decimal(38,0)"))).collect()[0][0]

    assert digest(1) == digest(5)


def fake_driver(calls: list[str], seconds_per_row: dict[int, float]):
    def run(module: str, job: dict[str, Any]) -> DriverResult:
        calls.append(job["task"])
        Path(job["output"]).mkdir(exist_ok=True)
        wall = job["rows"] * seconds_per_row[job["rows"]] * (2 if job["task"] == "build" else 1)
        stages = '"stages": {"read sources": {"wall_s": 1, "cpu_s": 2}}'
        text = (
            f'noise\n{{"wall_s": {wall + len(calls)}, "cpu_s": {wall}, "input_bytes": 7, '
            f'"peak_rss_bytes": {{"jvm": 5000000}}, {stages}}}'
        )
        return DriverResult(0, text, "")

    return run


def render(table: Any) -> str:
    console = Console(width=200, record=True)
    console.print(table)
    return console.export_text()


def test_turns_bars_stages_and_growth(tmp_path, monkeypatch):
    calls: list[str] = []
    monkeypatch.setattr(
        __main__, "run_driver_process", fake_driver(calls, {1000: 1.0, 10_000: 1.5})
    )
    settings = EtlSettings(tmp_path, "local[2]", "2g", 4, repeats=2)
    found = [m for rows in (1000, 10_000) for m in __main__.measure_size(LogSize(rows), settings)]
    assert calls[:5] == ["generate", "bare", "by_hand", "build", "bare"]
    first = [m for m in found if m.shape == "1,000 rows"]
    assert {m.name: m.wall_s for m in first} == {BARE: 1002, BY_HAND: 1003, BUILD: 2004}
    bare, by_hand = judge("1,000 rows", first, (BAR, BY_HAND_BAR))
    assert (bare.ratio, bare.is_met) == (2.0, True)
    assert (by_hand.ratio, by_hand.is_met) == (2.0, False)
    assert "read sources" in render(__main__.build_stage_table(first[-1]))
    growth = render(__main__.build_growth_table(found))
    assert "(!)" in growth  # half as much again per row is more than a tenth
    assert "1,000 rows" in growth
    assert not list(tmp_path.glob("logs"))


def test_rows_by_hand_have_histories_labels_and_dictionaries(spark, tmp_path):
    size = LogSize(6000)
    write_logs(spark, size, tmp_path / "logs", 2)
    job = EtlJob("by_hand", size.rows, False, str(tmp_path / "logs"), str(tmp_path), "", "", 2)
    assert run_by_hand(spark, job)["output_bytes"] > 0

    found = pd.read_parquet(tmp_path / "rows.parquet").sort_values(["user_id", "ts", "item_id"])
    log = spark.read.option("sep", "\t").schema(SCHEMAS["events"]).csv(job.folder + "/events")
    wanted = log.toPandas().sort_values(["user_id", "ts", "item_id"])
    assert found["item_id"].tolist() == wanted["item_id"].tolist()
    assert found["label"].tolist() == (wanted["dwell"] >= 150).astype(float).tolist()
    assert found[["country", "category"]].notna().all(axis=None)
    for _, rows in found.groupby("user_id"):
        items = rows["item_id"].tolist()
        histories = [items[:end][-HISTORY_LEN:][::-1] for end in range(len(items))]
        assert [list(h) for h in rows["history"]] == histories
    assert found.groupby("user_id").size().max() > HISTORY_LEN  # some are cut

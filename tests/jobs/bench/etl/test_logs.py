"""Generated logs: as skewed as they say, the same however they are partitioned."""

from __future__ import annotations

from pyspark.sql import functions as F

from etl.features import plan_features
from jobs.bench.etl.logs import LogSize, build_config, build_events

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

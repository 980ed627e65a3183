"""The hand-written job that the build is measured beside makes the rows it says it makes."""

from __future__ import annotations

import pandas as pd

from jobs.bench.etl.driver import EtlJob, run_by_hand
from jobs.bench.etl.logs import HISTORY_LEN, SCHEMAS, LogSize, write_logs


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

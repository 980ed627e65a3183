"""What a build adds to a write."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from conf.encoders import ENCODERS_FILE, ColumnEncoding, EncoderPlan
from conf.schema import FeatureSchema, FeatureSpec
from etl.encoders.vocabulary import write_vocabulary
from etl.records.spark_source import open_encoders


def write_encoders(folder: Path, tokens: list[int]) -> None:
    table = pa.table({"token": tokens, "id": range(2, 2 + len(tokens)), "count": [1] * len(tokens)})
    spec = write_vocabulary(table, folder / "item.parquet")
    feature = FeatureSpec("item", "int64", "item", encoding="item", vocabulary_size=spec.size)
    columns = (ColumnEncoding("item", "item_id", "int64", "item"),)
    plan = EncoderPlan(FeatureSchema((feature,)), columns, (spec,))
    (folder / ENCODERS_FILE).write_text(plan.dumps())


def test_tasks_share_the_encoders_of_one_plan(tmp_path: Path) -> None:
    write_encoders(tmp_path, [7, 8])
    first = open_encoders(str(tmp_path))
    assert open_encoders(str(tmp_path)) is first
    batch = pa.record_batch({"item_id": [8, 9]})
    assert first.apply(batch)["item"].to_pylist() == [3, 1]
    write_encoders(tmp_path, [7, 8, 9])
    assert open_encoders(str(tmp_path)).apply(batch)["item"].to_pylist() == [3, 4]

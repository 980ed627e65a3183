"""Encoders of a write: read once per process, and anew where their plan is another file."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from conf.encoders import ENCODERS_FILE, ColumnEncoding, EncoderPlan
from conf.errors import InputDataError
from conf.schema import FeatureSchema, FeatureSpec
from etl.encoders.vocabulary import write_vocabulary
from etl.tfrecord.write_plan import read_pipeline


def write_encoders(folder: Path, tokens: list[int]) -> None:
    table = pa.table({"token": tokens, "id": range(2, 2 + len(tokens)), "count": [1] * len(tokens)})
    spec = write_vocabulary(table, folder / "item.parquet")
    feature = FeatureSpec("item", "int64", "item", encoding="item", vocabulary_size=spec.size)
    columns = (ColumnEncoding("item", "item_id", "int64", "item"),)
    plan = EncoderPlan(FeatureSchema((feature,)), columns, (spec,))
    (folder / ENCODERS_FILE).write_text(plan.dumps())


def test_tasks_share_the_encoders_of_one_plan(tmp_path: Path) -> None:
    write_encoders(tmp_path, [7, 8])
    first = read_pipeline(str(tmp_path))
    assert read_pipeline(str(tmp_path)) is first
    batch = pa.record_batch({"item_id": [8, 9]})
    assert first.apply(batch)["item"].to_pylist() == [3, 1]
    write_encoders(tmp_path, [7, 8, 9])
    assert read_pipeline(str(tmp_path)).apply(batch)["item"].to_pylist() == [3, 4]


def test_a_missing_plan_is_told_each_time(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(InputDataError, match="cannot read the encoders"):
            read_pipeline(str(tmp_path))

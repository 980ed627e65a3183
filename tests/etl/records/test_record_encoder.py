"""What a build adds to a write."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from conf.encoders import ENCODERS_FILE, ColumnEncoding, EncoderPlan
from conf.schema import FeatureSchema, FeatureSpec
from etl.encoders.vocabulary import write_vocabulary
from etl.records.feature_lists import flatten_lists, nest_lists, nest_schema
from etl.records.record_encoder import open_encoders


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


lists = st.lists(st.one_of(st.none(), st.lists(st.integers(-5, 5), max_size=4)), max_size=12)


@given(lists, st.integers(0, 3))
def test_nesting_is_undone_by_flattening_also_in_slices(rows, first):
    batch = pa.record_batch({"h": pa.array(rows, pa.list_(pa.int64())), "x": [1] * len(rows)})
    batch = batch.slice(min(first, len(rows)))
    nested = nest_lists(batch, ("h",))
    wanted = [None if row is None else [[v] for v in row] for row in batch.column("h").to_pylist()]
    assert nested.column("h").to_pylist() == wanted
    assert nested.schema == nest_schema(batch.schema, ("h",))
    assert flatten_lists(nested, ("h",)).to_pylist() == batch.to_pylist()

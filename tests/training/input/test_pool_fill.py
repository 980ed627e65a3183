from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from conf.errors import InputDataError
from conf.manifest import Manifest
from conf.schema import FeatureSpec
from conf.training.input import FilterConfig
from training.input.columns import plan_columns
from training.input.damage import DamagePolicy
from training.input.epoch_plan import PoolPlan, Segment
from training.input.filters import RowFilter
from training.input.pool_config import LENGTH, PoolConfig
from training.input.pool_fill import PoolFill

SPECS = (
    FeatureSpec("number", "int64", "user"),
    FeatureSpec("padded", "int64", "user", shape=(None,), max_len=3),
    FeatureSpec("ragged", "float32", "user", shape=(None,)),
)
PLAN = PoolPlan(0, 0, 4, (Segment(0, 0, 4, 0),))


def batch_of(numbers: list[int]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [
            pa.array(numbers, pa.int64()),
            pa.array([[n] * (n % 5) for n in numbers], pa.list_(pa.int64())),
            pa.array([[float(n)] * (n % 3) for n in numbers], pa.list_(pa.float32())),
        ],
        ["number", "padded", "ragged"],
    )


def test_rows_go_to_their_places_from_any_number_of_blocks(tiny_manifest: Manifest) -> None:
    config = PoolConfig(plan_columns(tiny_manifest, SPECS), has_lengths=True)
    fill = PoolFill(PLAN, np.array([2, 0, 3, 1]), config)
    fill.place(batch_of([14, 11]), fill.places[:2], "here")
    fill.place(batch_of([13, 17]), fill.places[2:], "here")
    rows = fill.build()
    assert rows.dense["number"].tolist() == [11, 17, 14, 13]
    assert rows.dense["padded"].tolist() == [[11, 0, 0], [17, 17, 0], [14, 14, 14], [13, 13, 13]]
    assert rows.lists["ragged"].to_pylist() == [[11.0] * 2, [17.0] * 2, [14.0] * 2, [13.0]]
    assert rows.dense[LENGTH].tolist() == [1, 2, 4, 3]


def test_rows_that_the_filter_leaves_out_leave_no_gap(tiny_manifest: Manifest) -> None:
    columns = plan_columns(tiny_manifest, SPECS)
    row_filter = RowFilter(columns[:1], (FilterConfig(feature="number", op=">", value=12),), None)
    damage = DamagePolicy()
    fill = PoolFill(PLAN, np.array([2, 0, 3, 1]), PoolConfig(columns, row_filter, damage=damage))
    fill.place(batch_of([14, 11, 13, 12]), fill.places, "here")
    rows = fill.build()
    assert rows.count == 2
    assert rows.dense["number"].tolist() == [14, 13]
    assert rows.lists["ragged"].to_pylist() == [[14.0] * 2, [13.0]]
    assert damage.counts.filtered == 2


def test_a_label_that_is_not_binary_is_named(tiny_manifest: Manifest) -> None:
    config = PoolConfig(plan_columns(tiny_manifest, SPECS), binary_label="number")
    fill = PoolFill(PLAN, np.arange(4), config)
    with pytest.raises(InputDataError, match=r"'number'[\s\S]*7 in file f"):
        fill.place(batch_of([0, 1, 7, 0]), fill.places, "file f")


def test_threads_are_let_go_after_the_last_segment(tiny_manifest: Manifest) -> None:
    config = PoolConfig(plan_columns(tiny_manifest, SPECS), threads=2)
    fill = PoolFill(PLAN, np.arange(4), config)
    fill.end_segment()
    assert fill.is_over
    assert [fill.waiting.get(timeout=1) for _ in range(2)] == [None, None]
    empty = fill.build()  # nothing was placed: every record was bad
    assert empty.count == 0
    assert len(empty.lists["ragged"]) == 0

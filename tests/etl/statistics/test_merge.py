from __future__ import annotations

import json

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.errors import InputDataError
from etl.statistics import StatisticsAccumulator, merge_statistics, summarize_statistics

SCHEMA = pa.schema(
    [("item", pa.int64()), ("history", pa.list_(pa.int64())), ("price", pa.float32()),
     ("tag", pa.string())]
)  # fmt: skip
ROW = st.fixed_dictionaries(
    {
        "item": st.one_of(st.none(), st.integers(0, 40), st.integers(-(10**12), 10**12)),
        "history": st.one_of(st.none(), st.lists(st.integers(0, 9), max_size=5)),
        "price": st.one_of(st.none(), st.floats(-1e6, 1e6, width=32), st.just(float("nan"))),
        "tag": st.one_of(st.none(), st.sampled_from(["", "a", "é"])),
    }
)
SHARDS = st.lists(st.lists(ROW, max_size=10), min_size=1, max_size=4)


def statistics(rows: list[dict]) -> dict:
    accumulator = StatisticsAccumulator(SCHEMA)
    accumulator.update(pa.RecordBatch.from_pylist(rows, schema=SCHEMA))
    return json.loads(json.dumps(accumulator.to_dict(), allow_nan=False))


def check_equal(left: dict, right: dict) -> None:
    """Equal: counts, histograms, frequencies exactly, moments but for rounding."""
    left, right = summarize_statistics(left), summarize_statistics(right)
    assert left.keys() == right.keys()
    for name, feature in left.items():
        other = right[name]
        assert feature.keys() == other.keys()
        for key, value in feature.items():
            if key in ("mean", "std") and value is not None:
                assert other[key] == pytest.approx(value, rel=1e-6, abs=1e-3)
            else:
                assert other[key] == value, (name, key)


@settings(deadline=None, max_examples=60)
@given(SHARDS)
def test_merging_equals_one_pass(shards):
    merged = merge_statistics([statistics(rows) for rows in shards])
    check_equal(merged, statistics([row for rows in shards for row in rows]))


@settings(deadline=None, max_examples=30)
@given(SHARDS)
def test_merging_is_associative(shards):
    parts = [statistics(rows) for rows in shards]
    nested = merge_statistics([merge_statistics(parts[:2]), *parts[2:]])
    check_equal(nested, merge_statistics(parts))


def test_the_result_is_json_and_repeatable():
    parts = [statistics([{"item": 3, "history": [1], "price": 0.1 * k}]) for k in range(5)]
    texts = {json.dumps(merge_statistics(parts), allow_nan=False) for _ in range(3)}
    assert len(texts) == 1


def test_no_parts_give_nothing():
    assert merge_statistics([]) == {}


def test_a_summary_says_the_same_in_less():
    part = statistics([{"item": 3, "history": [1, 2], "price": 0.5, "tag": "a"}])
    summary = summarize_statistics(part)
    assert summary["item"]["top"] == part["item"]["top"]
    assert all("sketch" not in feature for feature in summary.values())
    with pytest.raises(InputDataError, match="sketch"):
        merge_statistics([summary, part])


def test_parts_that_do_not_belong_together_are_refused():
    part = statistics([{"item": 3}])
    with pytest.raises(InputDataError, match="different features"):
        merge_statistics([part, {"item": part["item"]}])
    with pytest.raises(InputDataError, match="'item'"):
        merge_statistics([part, {**part, "item": part["tag"]}])

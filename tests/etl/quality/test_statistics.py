"""Statistics: gathered per shard, merged, the same however the rows are cut."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.errors import InputDataError
from etl.quality.label_statistics import COMPARED_ROWS, MAX_GROUPS, LabelFocus
from etl.quality.statistics import StatisticsAccumulator, merge_statistics, summarize_statistics

SCHEMA = pa.schema(
    [("item", pa.int64()), ("history", pa.list_(pa.int64())), ("price", pa.float32()),
     ("tags", pa.large_list(pa.string())), ("flag", pa.bool_())]
)  # fmt: skip
ROWS = [
    {"item": 5, "history": [1, 2, 3], "price": 1.5, "tags": ["a", "b"], "flag": True},
    {"item": 1, "history": [], "price": None, "tags": None, "flag": False},
    {"item": 5, "history": None, "price": float("nan"), "tags": ["a"], "flag": True},
    {"item": 0, "history": [1] * 9, "price": -2.5, "tags": [], "flag": True},
]


def statistics(*batches: pa.RecordBatch) -> dict:
    accumulator = StatisticsAccumulator(SCHEMA)
    for batch in batches:
        accumulator.update(batch)
    return accumulator.to_dict()


def test_rows_missing_and_values_are_counted():
    result = statistics(pa.RecordBatch.from_pylist(ROWS, schema=SCHEMA))
    counts = {name: (f["rows"], f["missing"], f["values"]) for name, f in result.items()}
    assert counts == {
        "item": (4, 0, 4), "history": (4, 1, 12), "price": (4, 1, 3), "tags": (4, 1, 3),
        "flag": (4, 0, 4),
    }  # fmt: skip
    assert (result["item"]["oov"], result["item"]["zeros"]) == (1, 1)
    assert result["history"]["oov"] == 10
    assert (result["price"]["nan"], result["price"]["mean"]) == (1, -0.5)
    assert result["flag"]["mean"] == 0.75
    assert result["tags"]["top"]["values"] == [["a", 2], ["b", 1]]


def test_lengths_of_lists():
    length = statistics(pa.RecordBatch.from_pylist(ROWS, schema=SCHEMA))["history"]["length"]
    assert (length["min"], length["max"], length["mean"], length["total"]) == (0, 9, 4.0, 12)
    assert [(i["low"], i["high"], i["count"]) for i in length["histogram"]] == [
        (0, 0, 1), (2, 3, 1), (8, 15, 1),
    ]  # fmt: skip


@pytest.mark.parametrize("cut", range(len(ROWS) + 1))
def test_batches_and_slices_do_not_matter(cut):
    whole = pa.RecordBatch.from_pylist(ROWS, schema=SCHEMA)
    assert statistics(whole[:cut], whole[cut:]) == statistics(whole)


def test_nothing_gives_statistics_of_nothing_as_strict_json():
    result = statistics()
    json.dumps(result, allow_nan=False)
    assert result["history"]["length"]["mean"] is None
    json.dumps(statistics(pa.RecordBatch.from_pylist(ROWS, schema=SCHEMA)), allow_nan=False)


@pytest.mark.parametrize("data_type", [pa.timestamp("s"), pa.list_(pa.list_(pa.int64()))])
def test_types_without_statistics_are_refused(data_type):
    with pytest.raises(InputDataError, match="'when'"):
        StatisticsAccumulator(pa.schema([("when", data_type)]))


MERGE_SCHEMA = pa.schema(
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


def merge_statistics_2(rows: list[dict]) -> dict:
    accumulator = StatisticsAccumulator(MERGE_SCHEMA)
    accumulator.update(pa.RecordBatch.from_pylist(rows, schema=MERGE_SCHEMA))
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
    merged = merge_statistics([merge_statistics_2(rows) for rows in shards])
    check_equal(merged, merge_statistics_2([row for rows in shards for row in rows]))


@settings(deadline=None, max_examples=30)
@given(SHARDS)
def test_merging_is_associative(shards):
    parts = [merge_statistics_2(rows) for rows in shards]
    nested = merge_statistics([merge_statistics(parts[:2]), *parts[2:]])
    check_equal(nested, merge_statistics(parts))


def test_the_result_is_json_and_repeatable():
    parts = [merge_statistics_2([{"item": 3, "history": [1], "price": 0.1 * k}]) for k in range(5)]
    texts = {json.dumps(merge_statistics(parts), allow_nan=False) for _ in range(3)}
    assert len(texts) == 1


def test_no_parts_give_nothing():
    assert merge_statistics([]) == {}


def test_a_summary_says_the_same_in_less():
    part = merge_statistics_2([{"item": 3, "history": [1, 2], "price": 0.5, "tag": "a"}])
    summary = summarize_statistics(part)
    assert summary["item"]["top"] == part["item"]["top"]
    assert all("sketch" not in feature for feature in summary.values())
    with pytest.raises(InputDataError, match="sketch"):
        merge_statistics([summary, part])


def test_parts_that_do_not_belong_together_are_refused():
    part = merge_statistics_2([{"item": 3}])
    with pytest.raises(InputDataError, match="different features"):
        merge_statistics([part, {"item": part["item"]}])
    with pytest.raises(InputDataError, match="'item'"):
        merge_statistics([part, {**part, "item": part["tag"]}])


FOCUS = LabelFocus("label", ("gender",))


def compare(table: dict, shards: int = 1, focus: LabelFocus = FOCUS) -> dict:
    """The summary by feature, over as many shards."""
    whole = pa.table(table).combine_chunks()
    parts = []
    for k in range(shards):
        low, high = k * len(whole) // shards, (k + 1) * len(whole) // shards
        accumulator = StatisticsAccumulator(whole.schema, focus)
        for batch in whole[low:high].to_batches(max_chunksize=997):
            accumulator.update(batch)
        parts.append(json.loads(json.dumps(accumulator.to_dict(), allow_nan=False)))
    summary = summarize_statistics(merge_statistics(parts))
    json.dumps(summary, allow_nan=False)
    return {name: feature.get("label") for name, feature in summary.items()}


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4))
def test_correlation_is_that_of_numpy_whatever_the_shards(seed, shards):
    rng = np.random.default_rng(seed)
    x = rng.normal(1000, 3, 300)
    y = (x + rng.normal(0, 3, 300) > 1000).astype(np.float32)
    found = compare({"x": x.astype(np.float32), "label": y}, shards)["x"]
    expected = np.corrcoef(x.astype(np.float32).astype(float), y)[0, 1]
    assert found["correlation"] == pytest.approx(expected, abs=1e-9)
    assert found["rows"] == 300


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(2, 12))
def test_correlation_ratio_is_the_variance_between_groups(seed, shards, groups):
    rng = np.random.default_rng(seed)
    g, y = rng.integers(0, groups, 400), rng.normal(size=400).astype(np.float32)
    y += g % 2
    found = compare({"g": [f"v{v}" for v in g], "label": y}, shards)["g"]["correlation_ratio"]
    y = y.astype(float)
    within = sum(((y[g == v] - y[g == v].mean()) ** 2).sum() for v in np.unique(g))
    k = len(np.unique(g))
    epsilon = 1 - (within / (400 - k)) / (((y - y.mean()) ** 2).sum() / 399)
    assert found == pytest.approx(np.sqrt(max(epsilon, 0)), abs=1e-6)


def test_a_category_that_determines_the_label_and_one_that_only_tells_rows_apart():
    rng = np.random.default_rng(3)
    label = rng.integers(0, 2, 600)
    colour = np.where(label == 1, rng.integers(0, 3, 600), rng.integers(3, 6, 600))
    found = compare(
        {
            "colour": [f"c{c}" for c in colour],
            "row": np.arange(600),
            "label": label.astype(np.float32),
        }
    )
    assert found["colour"]["correlation_ratio"] == 1.0
    assert found["row"]["correlation_ratio"] is None


def test_missing_values_are_a_group_of_their_own():
    label = np.array([0, 1] * 200, np.float32)
    found = compare({"x": [None if y else 1.5 for y in label], "label": label})["x"]
    assert found["correlation_ratio"] == 1.0
    assert found["correlation"] is None


def test_slices_count_every_row_most_frequent_first():
    rows = COMPARED_ROWS + 5000
    gender = ["F" if k % 4 else None for k in range(rows)]
    label = np.array([k % 4 == 1 for k in range(rows)])
    found = compare({"gender": gender, "other": np.arange(rows) % 7, "label": label}, shards=1)
    assert found["gender"]["slices"] == [
        ["F", rows - rows // 4, pytest.approx(1 / 3)],
        [None, rows // 4, 0.0],
    ]
    assert found["other"]["rows"] == COMPARED_ROWS
    assert "slices" not in found["other"]


def test_long_texts_that_begin_alike_are_slices_of_their_own():
    pages = [f"https://shop.example/{'catalogue/' * 6}{k % 2}" for k in range(90)]
    found = compare({"gender": pages, "label": [float(k % 2) for k in range(90)]}, shards=2)
    slices = sorted((rate, rows) for _, rows, rate in found["gender"]["slices"])
    assert slices == [(0.0, 45), (1.0, 45)]
    assert found["gender"]["correlation_ratio"] == 1.0
    assert all(len(value) == 64 for value, _, _ in found["gender"]["slices"])


def test_too_many_groups_and_a_constant_label_say_nothing():
    rows = 2 * (MAX_GROUPS + 1)
    table = {"gender": np.arange(rows) // 2, "label": np.ones(rows, np.float32)}
    found = compare(table, shards=3)["gender"]
    assert (found["slices"], found["correlation"], found["correlation_ratio"]) == (None, None, None)


def test_without_the_label_or_for_lists_there_is_nothing_to_compare():
    assert compare({"x": [1, 2]}) == {"x": None}
    assert compare({"tags": [[1], [2]], "label": [0.0, 1.0]})["tags"] is None


def test_means_of_labels_by_weight_are_those_of_all_rows_and_shards_without_them_leave_none():
    rng = np.random.default_rng(4)
    label, like = (rng.random(900) < 0.3).astype(np.float32), rng.normal(size=900)
    weight = rng.choice([1.0, 10.0], 900).astype(np.float32)
    table = pa.table({"label": label, "like": like, "weight": weight}).combine_chunks()
    focus = LabelFocus("label", (), "weight", ("label", "like", "absent"))
    parts = []
    for rows in (table[:400], table[400:]):
        accumulator = StatisticsAccumulator(table.schema, focus)
        for batch in rows.to_batches(max_chunksize=97):
            accumulator.update(batch)
        parts.append(json.loads(json.dumps(accumulator.to_dict())))
    summary = summarize_statistics(merge_statistics(parts))
    assert summary["label"]["weighted_mean"] == pytest.approx(np.average(label, weights=weight))
    assert summary["like"]["weighted_mean"] == pytest.approx(np.average(like, weights=weight))
    assert "weighted_mean" not in summary["weight"]
    del parts[0]["label"]["weighted"]  # As an earlier release wrote a kept shard.
    assert "weighted_mean" not in summarize_statistics(merge_statistics(parts))["label"]

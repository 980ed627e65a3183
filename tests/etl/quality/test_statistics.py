"""Statistics and their sketches: gathered per shard, merged, the same however rows are cut."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.quality.label_statistics import COMPARED_ROWS, MAX_GROUPS, LabelFocus
from etl.quality.sketches import (
    ENTRIES,
    JSON_ENTRIES,
    PROBABILITIES,
    TOP_VALUES,
    FrequencySketch,
    Moments,
    QuantileSummary,
    estimate_distinct,
    sketch_distinct,
)
from etl.quality.statistics import (
    DENSE_VALUES,
    StatisticsAccumulator,
    describe_feature,
    feature_to_json,
    merge_features,
    merge_statistics,
    summarize_statistics,
)

SCHEMA = pa.schema(
    [("item", pa.int64()), ("history", pa.list_(pa.int64())), ("price", pa.float32()),
     ("tags", pa.large_list(pa.string()))]
)  # fmt: skip
ROWS = [
    {"item": 5, "history": [1, 2, 3], "price": 1.5, "tags": ["a", "b"]},
    {"item": 1, "history": [], "price": None, "tags": None},
    {"item": 5, "history": None, "price": float("nan"), "tags": ["a"]},
    {"item": 0, "history": [1] * 9, "price": -2.5, "tags": []},
]


def gather(
    batches: list[pa.RecordBatch], schema: pa.Schema = SCHEMA, focus: LabelFocus | None = None
) -> dict:
    """Statistics of a shard, as strict JSON."""
    accumulator = StatisticsAccumulator(schema, focus)
    for batch in batches:
        accumulator.update(batch)
    return json.loads(json.dumps(accumulator.to_dict(), allow_nan=False))


def test_rows_missing_values_and_lengths_are_counted():
    result = gather([pa.RecordBatch.from_pylist(ROWS, schema=SCHEMA)])
    counts = {name: (f["rows"], f["missing"], f["values"]) for name, f in result.items()}
    assert counts == {
        "item": (4, 0, 4), "history": (4, 1, 12), "price": (4, 1, 3), "tags": (4, 1, 3),
    }  # fmt: skip
    assert (result["item"]["oov"], result["item"]["zeros"]) == (1, 1)
    assert result["history"]["oov"] == 10
    assert (result["price"]["nan"], result["price"]["mean"]) == (1, -0.5)
    assert result["tags"]["top"]["values"] == [["a", 2], ["b", 1]]
    length = result["history"]["length"]
    assert (length["min"], length["max"], length["mean"], length["total"]) == (0, 9, 4.0, 12)
    assert [(i["low"], i["high"], i["count"]) for i in length["histogram"]] == [
        (0, 0, 1), (2, 3, 1), (8, 15, 1),
    ]  # fmt: skip


@pytest.mark.parametrize("cut", range(len(ROWS) + 1))
def test_batches_and_slices_do_not_matter(cut):
    whole = pa.RecordBatch.from_pylist(ROWS, schema=SCHEMA)
    assert gather([whole[:cut], whole[cut:]]) == gather([whole])


ROW = st.fixed_dictionaries(
    {
        "item": st.one_of(st.none(), st.integers(0, 40), st.integers(-(10**12), 10**12)),
        "history": st.one_of(st.none(), st.lists(st.integers(0, 9), max_size=5)),
        "price": st.one_of(st.none(), st.floats(-1e6, 1e6, width=32), st.just(float("nan"))),
        "tags": st.one_of(st.none(), st.lists(st.sampled_from(["", "a", "é"]), max_size=2)),
    }
)
SHARDS = st.lists(st.lists(ROW, max_size=10), min_size=1, max_size=4)


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
    def of(rows: list[dict]) -> dict:
        return gather([pa.RecordBatch.from_pylist(rows, schema=SCHEMA)])

    merged = merge_statistics([of(rows) for rows in shards])
    check_equal(merged, of([row for rows in shards for row in rows]))


FOCUS = LabelFocus("label", ("gender",))


def summarize(table: dict, shards: int = 1, focus: LabelFocus = FOCUS) -> dict:
    """The summary by feature, over as many shards."""
    whole = pa.table(table).combine_chunks()
    cuts = [k * len(whole) // shards for k in range(shards + 1)]
    parts = [
        gather(whole[low:high].to_batches(max_chunksize=97), whole.schema, focus)
        for low, high in pairwise(cuts)
    ]
    return json.loads(json.dumps(summarize_statistics(merge_statistics(parts)), allow_nan=False))


def compare(table: dict, shards: int = 1) -> dict:
    """What the summary says of the label beside each feature."""
    found = summarize(table, shards)
    return {name: feature.get("label") for name, feature in found.items()}


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


def test_slices_count_every_row_most_frequent_first():
    rows = COMPARED_ROWS + 5000
    gender = ["F" if k % 4 else None for k in range(rows)]
    label = np.array([k % 4 == 1 for k in range(rows)], np.float32)
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


def test_what_cannot_be_compared_with_the_label_says_nothing():
    rows = 2 * (MAX_GROUPS + 1)
    table = {"gender": np.arange(rows) // 2, "label": np.ones(rows, np.float32)}
    found = compare(table, shards=3)["gender"]
    assert (found["slices"], found["correlation"], found["correlation_ratio"]) == (None, None, None)
    # Missing values are a group of their own; a constant has no correlation.
    label = np.array([0, 1] * 200, np.float32)
    found = compare({"x": [None if y else 1.5 for y in label], "label": label})["x"]
    assert (found["correlation_ratio"], found["correlation"]) == (1.0, None)
    assert compare({"x": [1, 2]}) == {"x": None}
    assert compare({"tags": [[1], [2]], "label": [0.0, 1.0]})["tags"] is None
    assert gather([])["history"]["length"]["mean"] is None


def test_means_of_labels_by_weight_are_those_of_all_rows():
    rng = np.random.default_rng(4)
    label, like = (rng.random(900) < 0.3).astype(np.float32), rng.normal(size=900)
    weight = rng.choice([1.0, 10.0], 900).astype(np.float32)
    focus = LabelFocus("label", (), "weight", ("label", "like", "absent"))
    summary = summarize({"label": label, "like": like, "weight": weight}, 2, focus)
    assert summary["label"]["weighted_mean"] == pytest.approx(np.average(label, weights=weight))
    assert summary["like"]["weighted_mean"] == pytest.approx(np.average(like, weights=weight))
    assert "weighted_mean" not in summary["weight"]


INTEGERS = st.lists(
    st.one_of(st.integers(0, 3), st.integers(-(2**63), 2**63 - 1), st.just(DENSE_VALUES)),
    max_size=60,
)


def describe(*arrays: pa.Array) -> dict:
    return feature_to_json(merge_features([describe_feature(array) for array in arrays]))


def check_frequencies(result: dict, values: list) -> None:
    ordered = sorted(Counter(values).items(), key=lambda item: (-item[1], item[0]))
    assert result["top"] == {"values": [list(item) for item in ordered[:20]], "exact": True}
    assert result["distinct"]["count"] == len(set(values))
    assert result["distinct"]["exact"]


def check_moments(result: dict, values: list) -> None:
    if not values:
        assert (result["min"], result["max"], result["mean"], result["std"]) == (None,) * 4
        return
    numbers = np.array(values, np.float64)
    assert (result["min"], result["max"]) == (min(values), max(values))
    scale = float(np.abs(numbers).max())
    assert result["mean"] == pytest.approx(numbers.mean(), rel=1e-9, abs=1e-9 * scale)
    assert result["std"] == pytest.approx(numbers.std(), rel=1e-6, abs=1e-6 * scale)


@settings(deadline=None)
@given(INTEGERS, INTEGERS)
def test_integers(first, second):
    result = describe(pa.array(first, pa.int64()), pa.array([0, *second], pa.int64())[1:])
    whole = first + second
    assert (result["zeros"], result["oov"]) == (whole.count(0), whole.count(1))
    check_frequencies(result, whole)
    check_moments(result, whole)


@settings(deadline=None)
@given(st.lists(st.one_of(st.floats(width=32), st.sampled_from([0.0, -0.0, 1.0])), max_size=60))
def test_floats(floats):
    first, second = pa.array(floats[:20], pa.float32()), pa.array(floats[20:], pa.float64())
    finite = [value for value in floats if np.isfinite(value)]
    result = describe(first, second)
    assert result["nan"] == int(np.isnan(floats).sum())
    assert result["infinite"] == int(np.isinf(floats).sum())
    assert result["zeros"] == finite.count(0.0)
    check_frequencies(result, finite)
    check_moments(result, finite)


@settings(deadline=None)
@given(st.lists(st.text("ab é漢\0", max_size=12), max_size=60))
def test_strings(texts):
    result = describe(pa.array(texts, pa.string())[3:], pa.array(texts[:3], pa.large_binary()))
    check_frequencies(result, texts)


def test_long_and_undecodable_strings_stay_apart_and_short():
    texts = [b"x" * 500 + b"1", b"x" * 500 + b"2", b"\xff", b"x" * 500 + b"2"]
    shown = [text for text, _ in describe(pa.array(texts))["top"]["values"]]
    assert len(set(shown)) == 3
    assert all(len(text) <= 64 for text in shown)
    assert "\\xff" in shown


def registers(keys: np.ndarray) -> np.ndarray:
    return sketch_distinct(pa.array(keys.astype(np.int64)))


@pytest.mark.parametrize("distinct", [0, 1, 10, 500, 2_000, 5_000, 100_000, 2_000_000])
def test_the_estimate_of_distinct_values_is_within_four_standard_errors(distinct):
    keys = np.arange(distinct) * 7919 - distinct
    found = registers(keys)
    assert estimate_distinct(found) == pytest.approx(distinct, rel=4 * 0.0325, abs=2)
    halves = np.maximum(registers(keys[: distinct // 2]), registers(keys[distinct // 3 :]))
    assert np.array_equal(halves, found)


def sketch(values: list[int]) -> FrequencySketch:
    found, counts = np.unique(np.asarray(values), return_counts=True)
    return FrequencySketch.of(pa.array(found), counts)


def top(values: list[int]) -> list[list[int]]:
    ordered = sorted(Counter(values).items(), key=lambda item: (-item[1], item[0]))
    return [list(item) for item in ordered[:TOP_VALUES]]


def reload(found: FrequencySketch) -> FrequencySketch:
    return FrequencySketch.loads(json.loads(json.dumps(found.to_json()))["sketch"])


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1), st.floats(1.05, 2.5))
def test_many_values_merge_within_their_bounds(seed, skew):
    generator = np.random.default_rng(seed)
    parts = [np.minimum(generator.zipf(skew, 4000), 3000).tolist() for _ in range(4)]
    truth = Counter(value for part in parts for value in part)
    sketches = [reload(sketch(part)) for part in parts]
    merged = reload(
        FrequencySketch.merge(
            [FrequencySketch.merge(sketches[:2]), FrequencySketch.merge(sketches[2:])]
        )
    )
    assert len(merged.listed) <= JSON_ENTRIES
    for value, count, missed in merged.listed:
        assert count <= truth[value] <= count + missed
    listed = {value for value, _, _ in merged.listed}
    assert max((c for v, c in truth.items() if v not in listed), default=0) <= merged.bound
    result = merged.to_json()
    if result["top"]["exact"]:
        assert result["top"]["values"] == top([v for part in parts for v in part])
    if skew > 1.5:  # clear leaders: exactness must not be given away
        assert result["top"]["exact"]


@pytest.mark.parametrize("kind", [np.int64, np.float32])
def test_of_too_many_values_the_most_frequent_stay(kind):
    values = [*range(2 * ENTRIES), *range(ENTRIES, ENTRIES + 50)]
    found = sketch(np.array(values, kind))
    assert found.listed[:50] == [(v, 2, 0) for v in range(ENTRIES, ENTRIES + 50)]
    assert (len(found.listed), found.bound) == (ENTRIES, 1)
    assert not found.to_json()["distinct"]["exact"]
    assert len(found.to_json()["sketch"]) < 10_000


def test_a_value_that_a_shard_cut_is_not_called_exact():
    even = reload(sketch([value for value in range(1000) for _ in range(3)]))  # cut by value
    late = sketch([999] * 2)  # in this shard alone listed, in the other cut
    result = FrequencySketch.merge([even, late]).to_json()
    assert not result["top"]["exact"]
    assert not result["distinct"]["exact"]


NUMBERS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60)


def summarize_quantiles(values: np.ndarray) -> QuantileSummary:
    found, counts = np.unique(values, return_counts=True)
    return QuantileSummary(found, counts.astype(np.float64))


@given(NUMBERS, NUMBERS)
def test_quantiles_of_few_values_are_those_of_numpy_merged_or_not(first, second):
    whole = np.array(first + second)
    merged = QuantileSummary.merge(
        [summarize_quantiles(np.array(first)), summarize_quantiles(np.array(second))]
    )
    assert merged.exact
    for p in PROBABILITIES:
        expected = np.quantile(whole, p, method="inverted_cdf")
        assert summarize_quantiles(whole).quantile(p) == expected
        assert merged.quantile(p) == expected


@pytest.mark.parametrize("order", ["shuffled", "sorted"])
def test_ranks_of_many_values_are_off_by_little(order):
    rng = np.random.default_rng(7)
    shards = [rng.lognormal(0, 2, 40_000) for _ in range(6)]
    if order == "sorted":
        shards = np.split(np.sort(np.concatenate(shards)), 6)
    merged = QuantileSummary.merge(
        [QuantileSummary.loads(summarize_quantiles(shard).to_json()["summary"]) for shard in shards]
    )
    whole = np.sort(np.concatenate(shards))
    assert not merged.exact
    for p in np.linspace(0.01, 0.99, 33):
        rank = np.searchsorted(whole, merged.quantile(float(p))) / len(whole)
        assert rank == pytest.approx(p, abs=0.005)


def test_a_large_offset_does_not_swallow_the_spread():
    parts = [Moments.of(np.array([[1e15 + k, 1e15 + k + 1]])) for k in (0, 2)]
    assert Moments.merge(parts).scatter[0, 0] == pytest.approx(5)

"""Sketches: distinct values, frequent values and quantiles within their stated errors."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


def summarize(values: np.ndarray) -> QuantileSummary:
    found, counts = np.unique(values, return_counts=True)
    return QuantileSummary(found, counts.astype(np.float64))


@given(NUMBERS, NUMBERS)
def test_quantiles_of_few_values_are_those_of_numpy_merged_or_not(first, second):
    whole = np.array(first + second)
    merged = QuantileSummary.merge([summarize(np.array(first)), summarize(np.array(second))])
    assert merged.exact
    for p in PROBABILITIES:
        expected = np.quantile(whole, p, method="inverted_cdf")
        assert summarize(whole).quantile(p) == expected
        assert merged.quantile(p) == expected


@pytest.mark.parametrize("order", ["shuffled", "sorted"])
def test_ranks_of_many_values_are_off_by_little(order):
    rng = np.random.default_rng(7)
    shards = [rng.lognormal(0, 2, 40_000) for _ in range(6)]
    if order == "sorted":
        shards = np.split(np.sort(np.concatenate(shards)), 6)
    merged = QuantileSummary.merge(
        [QuantileSummary.loads(summarize(shard).to_json()["summary"]) for shard in shards]
    )
    whole = np.sort(np.concatenate(shards))
    assert not merged.exact
    for p in np.linspace(0.01, 0.99, 33):
        rank = np.searchsorted(whole, merged.quantile(float(p))) / len(whole)
        assert rank == pytest.approx(p, abs=0.005)


def test_a_large_offset_does_not_swallow_the_spread():
    parts = [Moments.of(np.array([[1e15 + k, 1e15 + k + 1]])) for k in (0, 2)]
    assert Moments.merge(parts).scatter[0, 0] == pytest.approx(5)

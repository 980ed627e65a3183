"""Sketches: distinct values, frequent values and quantiles within their stated errors."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.quality.sketches import (
    KEPT,
    MAX_DISTINCT,
    MAX_ENTRIES,
    PROBABILITIES,
    SAMPLED_VALUES,
    SUMMARY_POINTS,
    TOP_VALUES,
    FrequencySketch,
    KeyCounter,
    QuantileSummary,
    StratifiedSample,
    add_keys,
    build_registers,
    build_sketch,
    build_summary,
    estimate_distinct,
    merge_registers,
    merge_sketches,
    merge_summaries,
    most_frequent,
)


def sketch(keys: np.ndarray) -> np.ndarray:
    registers = build_registers()
    add_keys(keys.astype(np.int64), registers)
    return registers


@pytest.mark.parametrize("distinct", [0, 1, 10, 500, 2_000, 5_000, 100_000, 2_000_000])
def test_the_estimate_is_within_four_standard_errors(distinct):
    keys = np.arange(distinct) * 7919 - distinct
    assert estimate_distinct(sketch(keys)) == pytest.approx(distinct, rel=4 * 0.0325, abs=2)


def test_repetition_does_not_count():
    keys = np.arange(1000)
    assert np.array_equal(sketch(np.tile(keys, 5)), sketch(keys))


def test_merging_equals_one_pass():
    keys = np.arange(50_000) * 31
    merged = merge_registers(sketch(keys[:30_000]), sketch(keys[20_000:]))
    assert np.array_equal(merged, sketch(keys))


def test_a_hash_of_zeros_has_the_highest_rank():
    registers = sketch(np.array([0]))  # mix64(0) is 0
    assert registers[0] == 64 - 10 + 1


def counted(counter: KeyCounter) -> dict[int, int]:
    return dict(zip(*(part.tolist() for part in counter.counts()), strict=True))


@settings(deadline=None)
@given(st.lists(st.lists(st.one_of(st.integers(-3, 3), st.integers(-(2**63), 2**63 - 1)))))
def test_few_keys_are_counted_exactly(batches):
    counter = KeyCounter()
    seen: set[int] = set()
    for batch in batches:
        fresh = counter.add(np.array(batch, np.int64))
        first = [i for i, key in enumerate(batch) if key not in seen and key not in batch[:i]]
        assert fresh.tolist() == first
        seen.update(batch)
    assert counted(counter) == Counter(key for batch in batches for key in batch)
    assert counter.bound == 0


@pytest.mark.parametrize("distinct", [MAX_DISTINCT, MAX_DISTINCT + 1, 5 * MAX_DISTINCT])
def test_many_keys_are_counted_in_bounded_memory(distinct):
    generator = np.random.default_rng(3)
    leaders = np.arange(distinct)[::7][:50]
    tail = generator.integers(0, distinct, 20_000)
    keys = np.concatenate((leaders, np.arange(distinct), leaders, tail)) * 1_000_003
    counter = KeyCounter()
    fresh = np.concatenate([batch[counter.add(batch)] for batch in np.array_split(keys, 7)])
    exact = counted(counter)
    truth = Counter(keys.tolist())
    assert exact == {key: truth[key] for key in exact}
    assert exact.keys() <= set(fresh.tolist())
    assert len(fresh) == len(set(fresh.tolist())) <= MAX_DISTINCT
    if distinct <= MAX_DISTINCT:
        assert exact.keys() == truth.keys()
    else:  # those that led when there were too many are still exact
        assert len(exact) <= KEPT
        assert exact.keys() >= set((leaders * 1_000_003).tolist())
    others = [count for key, count in truth.items() if key not in exact]
    assert counter.bound >= max(others, default=0)
    assert bool(counter.bound) == bool(counter.registers.any()) == bool(others)


def sketch_sketch(values: list[int]) -> FrequencySketch:
    registers = build_registers()
    add_keys(np.array(values, np.int64), registers)
    return build_sketch(((v, c, 0) for v, c in Counter(values).items()), 0, registers)


def top(values: list[int]) -> list[list[int]]:
    ordered = sorted(Counter(values).items(), key=lambda item: (-item[1], item[0]))
    return [list(item) for item in ordered[:TOP_VALUES]]


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 60)), min_size=1, max_size=4))
def test_few_values_merge_exactly_in_any_grouping(parts):
    whole = [value for part in parts for value in part]
    sketches = [sketch_sketch(part) for part in parts]
    flat = merge_sketches(sketches).to_json()
    nested = merge_sketches([merge_sketches(sketches[:2]), *sketches[2:]]).to_json()
    assert flat == nested == sketch_sketch(whole).to_json()
    assert flat["top"] == {"values": top(whole), "exact": True}
    assert (flat["distinct"]["count"], flat["distinct"]["exact"]) == (len(set(whole)), True)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1), st.floats(1.05, 2.5))
def test_many_values_merge_within_their_bounds(seed, skew):
    generator = np.random.default_rng(seed)
    parts = [np.minimum(generator.zipf(skew, 4000), 3000).tolist() for _ in range(4)]
    truth = Counter(value for part in parts for value in part)
    sketches = [sketch_sketch(part) for part in parts]
    merged = merge_sketches([merge_sketches(sketches[:2]), merge_sketches(sketches[2:])])
    assert len(merged.entries) <= MAX_ENTRIES
    for value, count, missed in merged.entries:
        assert count <= truth[value] <= count + missed
    listed = {value for value, _, _ in merged.entries}
    assert max((c for v, c in truth.items() if v not in listed), default=0) <= merged.bound
    result = merged.to_json()
    if result["top"]["exact"]:
        assert result["top"]["values"] == top([v for part in parts for v in part])
    if skew > 1.5:  # clear leaders: exactness must not be given away
        assert result["top"]["exact"]


def test_a_value_that_a_shard_cut_is_not_called_exact():
    even = sketch_sketch(
        [value for value in range(1000) for _ in range(3)]
    )  # all alike: cut by value
    late = sketch_sketch([999] * 2)  # in this shard alone listed, in the other cut
    result = merge_sketches([even, late]).to_json()
    assert not result["top"]["exact"]
    assert not result["distinct"]["exact"]


def test_json_round_trip():
    original = sketch_sketch([5, 5, -1])
    data = json.loads(json.dumps(original.to_json()))
    again = FrequencySketch.loads(data["sketch"])
    assert again.entries == ((5, 2, 0), (-1, 1, 0))
    assert again.to_json() == original.to_json()


@settings(deadline=None)
@given(st.lists(st.integers(1, 6), max_size=2 * MAX_ENTRIES), st.randoms())
def test_most_frequent_equals_sorting_all(counts, random):
    values = random.sample(range(-1000, 1000), len(counts))
    order = sorted(range(len(counts)), key=lambda i: (-counts[i], values[i]))
    positions, left_out = most_frequent(np.array(values), np.array(counts, np.int64))
    assert sorted(positions.tolist()) == sorted(order[:MAX_ENTRIES])
    assert left_out == max((counts[i] for i in order[MAX_ENTRIES:]), default=0)


NUMBERS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60)


def summarize(values: np.ndarray, cuts: list[int] | None = None) -> QuantileSummary:
    sample = StratifiedSample()
    for piece in np.split(values, cuts or []):
        sample.add(piece)
    return sample.summarize(len(values))


@given(NUMBERS, NUMBERS)
def test_quantiles_of_few_values_are_those_of_numpy_merged_or_not(first, second):
    whole = np.array(first + second)
    merged = merge_summaries([summarize(np.array(first)), summarize(np.array(second))])
    assert merged.exact
    for p in PROBABILITIES:
        expected = np.quantile(whole, p, method="inverted_cdf")
        assert summarize(whole).quantile(p) == expected
        assert merged.quantile(p) == expected


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.lists(st.integers(0, 50_000), max_size=4).map(sorted))
def test_batches_do_not_matter_to_a_sample(seed, cuts):
    values = np.random.default_rng(seed).normal(size=50_000)
    left, right = summarize(values, cuts), summarize(values)
    assert np.array_equal(left.values, right.values)
    assert np.array_equal(left.weights, right.weights)


@pytest.mark.parametrize("order", ["shuffled", "sorted"])
def test_ranks_of_many_values_are_off_by_little(order):
    rng = np.random.default_rng(7)
    shards = [rng.lognormal(0, 2, 40_000) for _ in range(6)]
    if order == "sorted":
        shards = np.split(np.sort(np.concatenate(shards)), 6)
    merged = merge_summaries([summarize(shard) for shard in shards])
    whole = np.sort(np.concatenate(shards))
    assert not merged.exact
    assert len(merged.values) <= SUMMARY_POINTS
    for p in np.linspace(0.01, 0.99, 33):
        rank = np.searchsorted(whole, merged.quantile(float(p))) / len(whole)
        assert rank == pytest.approx(p, abs=0.012)


def test_a_sample_is_bounded_and_leaves_out_what_is_not_finite():
    sample = StratifiedSample()
    for _ in range(40):
        sample.add(np.array([np.nan, 1.0, 2.0, np.inf] * 500))
    summary = sample.summarize(40_000)
    assert sample._size <= SAMPLED_VALUES
    assert set(summary.values) <= {1.0, 2.0}
    assert summary.weights.sum() == pytest.approx(40_000)


def test_vectors_of_a_length_that_is_a_power_of_two_are_sampled_in_all_their_elements():
    values = np.tile(np.arange(64.0), 20_000)
    for p in (0.25, 0.5, 0.75):
        assert summarize(values).quantile(p) == pytest.approx(64 * p, abs=2)


def test_a_summary_survives_its_text():
    summary = build_summary(np.array([3.0, 1.0, 3.0]), np.ones(3), True)
    loaded = QuantileSummary.loads(summary.to_json()["summary"])
    assert (loaded.values.tolist(), loaded.weights.tolist(), loaded.exact) == ([1, 3], [1, 2], True)
    assert QuantileSummary(np.empty(0), np.empty(0)).to_json()["quantiles"]["values"] == []

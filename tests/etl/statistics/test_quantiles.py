from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.statistics.quantiles import (
    PROBABILITIES,
    SAMPLED_VALUES,
    SUMMARY_POINTS,
    QuantileSummary,
    StratifiedSample,
    build_summary,
    merge_summaries,
)

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

"""Drift: PSI and its kin, distributions laid over each other."""

from __future__ import annotations

import json
import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.quality.drift import (
    OTHER,
    build_distribution,
    jensen_shannon_divergence,
    kolmogorov_smirnov_distance,
    measure_drift,
    overlay,
    population_stability_index,
)
from etl.quality.statistics import StatisticsAccumulator

MEASURES = [
    population_stability_index,
    jensen_shannon_divergence,
    kolmogorov_smirnov_distance,
]
PAIR = st.integers(1, 30).flatmap(
    lambda bins: st.tuples(
        *[st.lists(st.integers(0, 10**6), min_size=bins, max_size=bins).filter(any)] * 2
    )
)


def reference(name: str, first: list[int], second: list[int]) -> float:
    """The formulas of the papers, term by term in plain Python."""
    p = [value / sum(first) for value in first]
    q = [value / sum(second) for value in second]
    if name == "population_stability_index":
        p, q = [max(x, 1e-4) for x in p], [max(x, 1e-4) for x in q]
        return sum((a - b) * math.log(a / b) for a, b in zip(p, q, strict=True))
    if name == "kolmogorov_smirnov_distance":
        return max(abs(sum(p[: k + 1]) - sum(q[: k + 1])) for k in range(len(p)))

    # Jensen-Shannon as an entropy of the mean less the mean of the entropies (Lin, equation 4.1).
    def entropy(shares: list[float]) -> float:
        return -sum(x * math.log2(x) for x in shares if x > 0)

    middle = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
    return entropy(middle) - (entropy(p) + entropy(q)) / 2


@pytest.mark.parametrize("measure", MEASURES)
@given(PAIR)
def test_each_equals_its_formula_is_symmetric_and_not_negative(measure, pair):
    first, second = (np.array(part) for part in pair)
    found = measure(first, second)
    assert found == pytest.approx(reference(measure.__name__, *pair), rel=1e-9, abs=1e-9)
    assert found == pytest.approx(measure(second, first), rel=1e-12, abs=1e-12)
    assert found >= 0
    if measure is not population_stability_index:
        assert found <= 1


@pytest.mark.parametrize("measure", MEASURES)
@given(PAIR, st.integers(1, 1000))
def test_equal_shares_are_no_distance_whatever_the_number_of_rows(measure, pair, times):
    counts = np.array(pair[0])
    assert measure(counts, counts * times) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("measure", MEASURES)
def test_disjoint_is_farthest_and_nothing_is_no_distance(measure):
    apart = measure(np.array([5, 0]), np.array([0, 7]))
    assert apart > measure(np.array([5, 1]), np.array([1, 7]))
    assert measure(np.zeros(3), np.array([1, 2, 3])) == 0.0
    if measure is not population_stability_index:
        assert apart == 1.0


def distribution(values, kind=None, tokens=None):
    array = pa.array(values, kind)
    accumulator = StatisticsAccumulator(pa.schema([("x", array.type)]))
    accumulator.update(pa.record_batch({"x": array}))
    statistics = json.loads(json.dumps(accumulator.to_dict()))["x"]
    return build_distribution(statistics, tokens)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(-5, 40), min_size=1, max_size=80),
       st.lists(st.integers(-5, 40), min_size=1, max_size=80))  # fmt: skip
def test_few_numbers_drift_by_their_exact_shares(first, second):
    before, after = distribution(first), distribution(second)
    values = sorted({*first, *second})
    shares = [[part.count(v) / len(part) for v in values] for part in (first, second)]
    farthest = np.abs(np.cumsum(shares[0]) - np.cumsum(shares[1])).max()
    assert measure_drift("ks", before, after) == pytest.approx(farthest)
    for metric in ("psi", "js", "ks"):
        assert measure_drift(metric, before, before) == pytest.approx(0, abs=1e-12)
        there, back = measure_drift(metric, before, after), measure_drift(metric, after, before)
        assert there == pytest.approx(back)


def test_many_numbers_fall_into_the_deciles_of_the_first():
    rng = np.random.default_rng(5)
    first, second = rng.normal(0, 1, 60_000), rng.normal(0.5, 1, 60_000)
    before = distribution(first.astype(np.float32))
    after = distribution(second.astype(np.float32))
    laid = overlay(before, after)
    assert laid.before / laid.before.sum() == pytest.approx(np.full(10, 0.1), abs=0.01)
    edges = np.quantile(first, np.arange(1, 10) / 10)
    q = np.bincount(np.searchsorted(edges, second), minlength=10) / len(second)
    expected = float(np.sum((0.1 - q) * np.log(0.1 / q)))
    assert measure_drift("psi", before, after) == pytest.approx(expected, rel=0.12)
    # Of two normals half a deviation apart: 2 Phi(1/4) - 1.
    assert measure_drift("ks", before, after) == pytest.approx(0.1974, abs=0.015)


def test_ids_are_compared_by_their_tokens_and_have_no_order():
    before = distribution([2] * 6 + [3] * 4, tokens={2: "a", 3: "b"})
    renumbered = distribution([3] * 6 + [2] * 4, tokens={3: "a", 2: "b"})
    assert measure_drift("psi", before, renumbered) == 0.0
    assert measure_drift("js", before, renumbered) == 0.0
    assert measure_drift("ks", before, renumbered) is None


def test_of_many_values_the_frequent_ones_count_and_the_others_count_together():
    rng = np.random.default_rng(2)
    ranks = np.arange(1, 9001)
    share = 1 / ranks / (1 / ranks).sum()
    draw = [f"v{v}" for v in rng.choice(ranks, 60_000, p=share)]
    again = [f"v{v}" for v in rng.choice(ranks, 60_000, p=share)]
    moved = ["new" if k % 10 == 0 else value for k, value in enumerate(again)]
    before = distribution(draw)
    laid = overlay(before, distribution(again))
    assert OTHER in laid.bins
    assert len(laid.bins) == 51
    assert measure_drift("psi", before, distribution(again)) < 0.01
    assert measure_drift("psi", before, distribution(moved)) > 0.2

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.quality.distribution import OTHER, build_distribution, measure_drift, overlay
from etl.statistics import StatisticsAccumulator


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

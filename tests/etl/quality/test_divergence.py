from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etl.quality.divergence import (
    jensen_shannon_divergence,
    kolmogorov_smirnov_distance,
    population_stability_index,
)

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


def test_a_textbook_example_of_the_index():
    # 0.1 ln 1.5 + 0 - 0.1 ln(0.3 / 0.4)
    found = population_stability_index(np.array([30, 30, 40]), np.array([20, 30, 50]))
    assert found == pytest.approx(0.1 * math.log(1.5) - 0.1 * math.log(0.8))

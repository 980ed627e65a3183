from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.baselines import PopularityScorer, RandomScorer, popularity_percentiles
from training.ranks import rank_all

COUNTS = st.lists(st.integers(0, 5), min_size=1, max_size=30)


@given(COUNTS)
def test_popularity_ranks_by_count_then_by_id_without_a_tie(counts: list[int]) -> None:
    scores = PopularityScorer(np.array(counts)).scores({}, len(counts))
    ranks = rank_all(scores, np.arange(len(counts)))
    order = sorted(range(len(counts)), key=lambda c: (-counts[c], c))
    assert [order.index(c) + 1 for c in range(len(counts))] == ranks.tolist()


def test_random_scores_depend_on_the_row_and_the_seed_only() -> None:
    whole = RandomScorer(11, 4).scores({}, 9)
    scorer = RandomScorer(11, 4)
    parts = np.concatenate([scorer.scores({}, rows) for rows in (2, 3, 4)])
    np.testing.assert_array_equal(whole, parts)
    assert not np.array_equal(whole, RandomScorer(11, 5).scores({}, 9))


def test_random_hits_as_often_as_chance() -> None:
    ranks = rank_all(RandomScorer(100, 0).scores({}, 5000), np.arange(5000) % 100)
    assert np.mean(ranks <= 10) == pytest.approx(0.1, abs=0.02)


@given(COUNTS)
def test_percentiles_rise_with_popularity_and_average_one_half(counts: list[int]) -> None:
    array = np.array(counts)
    found = popularity_percentiles(array)
    expected = [(np.sum(array < c) + 0.5 * np.sum(array == c)) / len(array) for c in array]
    np.testing.assert_allclose(found, expected)
    assert found.mean() == pytest.approx(0.5)

"""Alias tables give back exactly the distribution that they were built from."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from etl.negatives.alias import AliasTable, build_alias_table


def outcome_probabilities(table: AliasTable, groups: np.ndarray) -> np.ndarray:
    """What a draw gives: each row is taken alike in its group, then itself or its alias."""
    chance = 1 / np.bincount(groups)[groups]
    own = chance * table.thresholds
    other = np.bincount(table.aliases, chance * (1 - table.thresholds), minlength=len(groups))
    return own + other


weights = st.lists(
    st.one_of(st.floats(1e-6, 1e6), st.just(1.0), st.integers(1, 100).map(float)),
    min_size=1,
    max_size=40,
)


@given(st.lists(weights, min_size=1, max_size=8))
def test_every_group_keeps_its_own_distribution(parts):
    groups = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    values = np.concatenate([np.asarray(part) for part in parts])
    table = build_alias_table(values, groups)
    expected = np.concatenate([np.asarray(part) / sum(part) for part in parts])
    assert_allclose(table.probabilities, expected, rtol=1e-12)
    assert_allclose(outcome_probabilities(table, groups), expected, rtol=1e-6, atol=1e-12)
    assert (groups[table.aliases] == groups).all()
    assert ((table.thresholds >= 0) & (table.thresholds <= 1)).all()


def test_long_tail_of_many_items_keeps_its_distribution():
    counts = np.floor(1e7 / np.arange(1, 200_001)) + 1
    groups = np.zeros(len(counts), dtype=np.int64)
    table = build_alias_table(counts**0.75, groups)
    expected = counts**0.75 / np.sum(counts**0.75)
    assert_allclose(outcome_probabilities(table, groups), expected, rtol=1e-6)

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from training.negatives import UniformNegatives
from training.ranks import Pairs, build_pairs

SEEN = st.lists(st.sets(st.integers(0, 19), max_size=20), min_size=1, max_size=6)


def _pairs(seen: list[set[int]], targets: np.ndarray) -> Pairs:
    rows = np.repeat(np.arange(len(seen)), [len(s) for s in seen])
    columns = np.array([c for s in seen for c in sorted(s)], np.int64)
    return build_pairs(rows, columns, targets, 20)


def _by_row(pairs: Pairs, rows: int) -> list[list[int]]:
    return [pairs.columns[pairs.rows == row].tolist() for row in range(rows)]


@settings(max_examples=60)
@given(SEEN, st.integers(1, 12), st.integers(0, 5), st.integers(-1, 19))
def test_candidates_are_unseen_distinct_and_as_many_as_there_are(
    seen: list[set[int]], count: int, seed: int, target: int
) -> None:
    targets = np.full(len(seen), target)
    drawn = UniformNegatives(20, count, seed).draw(_pairs(seen, targets), targets)
    for row, columns in enumerate(_by_row(drawn, len(seen))):
        allowed = set(range(20)) - (seen[row] | {target})
        assert len(set(columns)) == len(columns) == min(count, len(allowed))
        assert set(columns) <= allowed


def test_draws_do_not_depend_on_the_batch_size() -> None:
    rng = np.random.default_rng(0)
    seen = [set(rng.choice(20, 12, replace=False).tolist()) for _ in range(30)]
    targets = np.zeros(30, np.int64)
    whole = _by_row(UniformNegatives(20, 6, 1).draw(_pairs(seen, targets), targets), 30)
    sampler, parts = UniformNegatives(20, 6, 1), []
    for start in range(0, 30, 7):
        part, rows = seen[start : start + 7], targets[start : start + 7]
        parts += _by_row(sampler.draw(_pairs(part, rows), rows), len(part))
    assert whole == parts


def test_every_unseen_item_is_drawn_equally_often() -> None:
    rows = 4000
    targets = np.zeros(rows, np.int64)
    seen = _pairs([{1, 2, 3}] * rows, targets)
    drawn = UniformNegatives(20, 4, 5).draw(seen, targets)
    counts = np.bincount(drawn.columns, minlength=20)
    assert counts[:4].sum() == 0
    expected = rows * 4 / 16
    assert np.abs(counts[4:] - expected).max() < 5 * np.sqrt(expected)


def test_another_seed_draws_others() -> None:
    targets = np.zeros(50, np.int64)
    first = UniformNegatives(1000, 9, 1).draw(None, targets)
    again = UniformNegatives(1000, 9, 1).draw(None, targets)
    other = UniformNegatives(1000, 9, 2).draw(None, targets)
    assert first.columns.tolist() == again.columns.tolist() != other.columns.tolist()

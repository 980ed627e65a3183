from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from training.ranks import MISSING, build_pairs, rank_all, rank_among, rank_without

SCORES = st.lists(
    st.lists(st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1.0, np.nan]), min_size=7, max_size=7),
    min_size=1,
    max_size=5,
)
CELLS = st.lists(st.tuples(st.integers(0, 4), st.integers(-1, 6)), max_size=30)
TARGETS = st.lists(st.integers(-1, 6), min_size=5, max_size=5)


def _reference(scores: np.ndarray, target: int, among: set[int]) -> float:
    """The worst place that any order by falling score could give the target."""
    if target == MISSING:
        return np.inf
    return 1.0 + sum(not scores[item] < scores[target] for item in among - {target})


@given(SCORES, CELLS, TARGETS)
def test_ranks_equal_a_count_item_by_item(
    rows: list[list[float]], cells: list[tuple[int, int]], targets: list[int]
) -> None:
    scores = np.array(rows, np.float32)
    target = np.array(targets[: len(rows)])
    inside = [(r, c) for r, c in cells if r < len(rows)]
    pairs = build_pairs(
        np.array([r for r, _ in inside], np.int64),
        np.array([c for _, c in inside], np.int64),
        target,
        7,
    )
    full = rank_all(scores, target)
    unseen = rank_without(full, scores, target, pairs)
    among = rank_among(scores, target, pairs)
    for row in range(len(rows)):
        chosen = {c for r, c in inside if r == row and c != MISSING}
        everything = set(range(7))
        t = int(target[row])
        assert full[row] == _reference(scores[row], t, everything)
        assert unseen[row] == _reference(scores[row], t, everything - chosen)
        assert among[row] == _reference(scores[row], t, chosen)


def test_a_constant_scorer_ranks_every_target_last() -> None:
    scores = np.zeros((4, 100), np.float32)
    assert rank_all(scores, np.arange(4)).tolist() == [100.0] * 4


def test_a_nan_scorer_ranks_every_target_last() -> None:
    scores = np.full((1, 50), np.nan, np.float32)
    assert rank_all(scores, np.array([7])).tolist() == [50.0]


def test_the_target_is_never_masked_and_repeats_count_once() -> None:
    scores = np.array([[3.0, 2.0, 1.0, 0.0]], np.float32)
    target = np.array([1])
    pairs = build_pairs(np.zeros(4, np.int64), np.array([0, 0, 1, MISSING]), target, 4)
    assert pairs.columns.tolist() == [0]
    assert rank_without(rank_all(scores, target), scores, target, pairs).tolist() == [1.0]

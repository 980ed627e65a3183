from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.errors import InputDataError
from conf.manifest import Manifest
from tests.training.toy_models import TinyTowers
from training.evaluation.item_index import ItemIndex, Pairs, order_by_id, rank_top_k
from training.evaluation.protocols import RankingBatch
from training.evaluation.systems import (
    ListStatistics,
    score_pairs,
)
from training.input.batches import read_split


def _index(vectors: np.ndarray) -> ItemIndex:
    return order_by_id(np.arange(2, 2 + len(vectors)), vectors.astype(np.float32))


@settings(max_examples=50, deadline=None)
@given(
    st.integers(0, 2**31),
    st.integers(1, 5),
    st.integers(1, 17),
    st.integers(1, 20),
    st.integers(1, 40),
)
def test_top_k_equals_a_full_sort_whatever_the_block(
    seed: int, rows: int, items: int, k: int, block: int
) -> None:
    rng = np.random.default_rng(seed)
    # Small integers: exact products, and many ties.
    users = rng.integers(-2, 3, (rows, 3)).astype(np.float32)
    index = _index(rng.integers(-2, 3, (items, 3)))
    cells = np.unique(rng.integers(0, rows * items, rng.integers(0, rows * items + 1)))
    found = rank_top_k(users, index, k, Pairs(cells // items, cells % items), block)
    scores = users.astype(np.float64) @ index.vectors.T.astype(np.float64)
    scores.ravel()[cells] = -np.inf
    for row in range(rows):
        order = sorted(range(items), key=lambda c: (-scores[row, c], c))
        expected = [2 + c for c in order if scores[row, c] > -np.inf][:k]
        assert found.ids[row].tolist() == expected + [0] * (k - len(expected))
        np.testing.assert_array_equal(
            found.scores[row, : len(expected)], [scores[row, i - 2] for i in expected]
        )


def test_a_repeated_item_and_a_nan_vector_are_refused() -> None:
    with pytest.raises(InputDataError, match="twice"):
        order_by_id(np.array([3, 3]), np.zeros((2, 1), np.float32))
    with pytest.raises(InputDataError, match="not finite"):
        order_by_id(np.array([3, 4]), np.array([[0.0], [np.nan]], np.float32))


def test_pairs_of_vectors_that_are_not_finite_are_refused(
    tiny_version: Path, tiny_manifest: Manifest
) -> None:
    model = TinyTowers(tiny_manifest)
    where = (tiny_version, tiny_manifest)
    batch = next(read_split(*where, "test", 4))
    assert score_pairs(model, batch).shape == (4,)
    rows = model.tables[model.table_of["user_id"]].rows
    values = rows.numpy()
    values[int(batch["user_id"][1])] = np.nan
    rows.assign(values)
    with pytest.raises(InputDataError, match=r"(?s)user vectors are not finite.*1 of 4"):
        score_pairs(model, batch)


COUNTS = st.lists(st.integers(0, 5), min_size=1, max_size=30)


def test_seen_items_are_not_shown_and_batches_add_up() -> None:
    lists = ListStatistics(np.array([9, 5, 5, 1]), (2,), mask_seen=True)
    seen = Pairs(np.array([0, 0, 0, 1]), np.array([0, 1, 2, 0]))
    for _ in range(2):
        scores = np.tile(np.array([3, 2, 1, 0], np.float32), (2, 1))
        lists.update(scores, RankingBatch({}, np.zeros(2, np.int64), seen, None))
    # User 0 is shown the last item alone, user 1 the second and the third: those two beat one of
    # four and tie, the last beats none.
    assert lists.result() == {
        "coverage@2": 0.75,
        # Items are in 0, 2, 2 and 2 lists: the mean difference of pairs over twice the mean.
        "gini@2": pytest.approx(np.abs(np.subtract.outer([2, 2, 2, 0], [2, 2, 2, 0])).mean() / 3),
        "popularity_percentile@2": pytest.approx((0.5 + 2.0 + 2.0) / 4 / 3),
    }

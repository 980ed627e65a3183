from __future__ import annotations

import numpy as np
import pytest

from training.beyond_accuracy import ListStatistics
from training.protocols import RankingBatch
from training.ranks import Pairs

COUNTS = np.array([9, 5, 5, 1])
# By falling count: the first beats three, the next two beat one and tie, the last beats none.
PERCENTILES = np.array([3.5, 2.0, 2.0, 0.5]) / 4


def _batch(rows: int, seen: list[tuple[int, int]]) -> RankingBatch:
    cells = np.array(sorted(seen), np.int64).reshape(-1, 2)
    return RankingBatch({}, np.zeros(rows, np.int64), Pairs(cells[:, 0], cells[:, 1]), None)


def test_lists_of_the_same_item_cover_little() -> None:
    lists = ListStatistics(COUNTS, 1, mask_seen=False)
    scores = np.tile(np.array([3, 2, 1, 0], np.float32), (5, 1))
    lists.update(scores, _batch(5, [(0, 0)]))
    assert lists.result() == {
        "coverage@1": 0.25,
        "popularity_percentile@1": pytest.approx(PERCENTILES[0]),
    }


def test_seen_items_are_not_shown_and_batches_add_up() -> None:
    lists = ListStatistics(COUNTS, 2, mask_seen=True)
    for _ in range(2):
        scores = np.tile(np.array([3, 2, 1, 0], np.float32), (2, 1))
        lists.update(scores, _batch(2, [(0, 0), (0, 1), (0, 2), (1, 0)]))
    # User 0 is shown the last item alone, user 1 the second and the third.
    expected = (PERCENTILES[3] + PERCENTILES[1] + PERCENTILES[2]) / 3
    assert lists.result() == {
        "coverage@2": 0.75,
        "popularity_percentile@2": pytest.approx(expected),
    }

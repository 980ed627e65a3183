from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.errors import ConfigError
from conf.metrics import OWN_PREFIX, find_direction, is_minimised, list_families
from conf.training.train import METRIC_PATTERN
from jobs.support.formatting import read_task_metrics
from tests.training.evaluation.measured import measure_by_hand
from training.evaluation.item_index import (
    MISSING,
    build_pairs,
    count_not_below,
    rank_all,
    rank_among,
)
from training.evaluation.metrics import (
    BINARY_METRICS,
    RANKING_METRICS,
    VALUE_METRICS,
    RankMeasures,
    constant_log_loss,
    measure,
)
from training.evaluation.scored_rows import RowColumns
from training.evaluation.systems import ListStatistics
from training.evaluation.tasks import ErrorScores, LabelScores
from training.loop.plan import TASK_METRICS

SCORES = st.lists(
    st.lists(st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1.0, np.nan]), min_size=7, max_size=7),
    min_size=1,
    max_size=5,
)
CELLS = st.lists(st.tuples(st.integers(0, 4), st.integers(-1, 6)), max_size=30)
TARGETS = st.lists(st.integers(-1, 6), min_size=5, max_size=5)


def _reference(scores: np.ndarray, target: int, among: set[int]) -> float:
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
    pairs = build_pairs(*np.array(inside, np.int64).reshape(-1, 2).T, target, 7)
    full = rank_all(scores, target)
    unseen = full - count_not_below(scores, target, pairs)
    among, everything = rank_among(scores, target, pairs), set(range(7))
    for row, t in enumerate(target.tolist()):
        chosen = {c for r, c in inside if r == row and c != MISSING}
        assert full[row] == _reference(scores[row], t, everything)
        assert unseen[row] == _reference(scores[row], t, everything - chosen)
        assert among[row] == _reference(scores[row], t, chosen)


RELEVANT = st.lists(st.sets(st.integers(1, 36), max_size=6), min_size=1, max_size=8)


@given(RELEVANT, st.integers(1, 30))
def test_ranking_metrics_equal_a_walk_down_the_list(rows: list[set[int]], k: int) -> None:
    width = max(1, *map(len, rows))
    ranks = np.array([sorted(row) + [np.nan] * (width - len(row)) for row in rows], float)
    ranks[ranks > 30] = np.inf  # A miss counts, and scores nothing.
    walks = [measure_by_hand([*range(1, 31)], row, k) for row in rows]
    found = measure(ranks, RankMeasures((k,)), "user")
    assert {name.split("@")[0] for name in found} == set(list_families("ranking"))
    assert found.keys() == walks[0].keys()
    for name, values in found.items():
        np.testing.assert_allclose(values, [walk[name] for walk in walks], atol=1e-12)


def test_constant_log_loss_knows_certainty() -> None:
    assert constant_log_loss(1.0, 1.0) == 0.0
    assert constant_log_loss(0.5, 1.0) is None
    assert constant_log_loss(0.5, 0.0) is None


def test_every_metric_that_is_measured_says_which_way_it_is_better() -> None:
    features, scores = {"label": np.array([1.0, 0.0, 1.0])}, np.array([0.2, 0.1, -1.0])
    rows = RowColumns(label="label").read(features, scores)
    labels, errors = LabelScores(1.0), ErrorScores(0.5)
    labels.add(rows)
    errors.add(rows)
    lists = ListStatistics(np.arange(5), (1, 10), mask_seen=False)
    lists.add(np.array([[0, 1]]))
    compared = ["auc", "gauc", *BINARY_METRICS, *VALUE_METRICS]
    named = {
        *(f"{name}@5" for name in RANKING_METRICS),
        *(name for metrics in TASK_METRICS.values() for name in metrics),
        *compared,
        *(f"buy/{name}" for name in compared),
        *read_task_metrics(labels.result() or {}),
        *read_task_metrics(errors.result() or {}),
        *lists.result(),
        *re.findall(r"[a-z_]{3,}", METRIC_PATTERN),
    } - {OWN_PREFIX}  # Own metrics say it in the config.
    assert [name for name in named if find_direction(name) is None] == []
    assert [is_minimised(name) for name in ("buy/rmse", "mse", "ndcg@10")] == [True, True, False]
    with pytest.raises(ConfigError, match="nothing says whether"):
        is_minimised("surprise@5")

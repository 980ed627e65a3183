from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.errors import ConfigError
from conf.metrics import OWN_PREFIX, find_direction, is_minimised, list_families
from conf.training.train import METRIC_PATTERN
from jobs.support.formatting import read_task_metrics
from training.evaluation.comparison import _compare_binary, _compare_errors
from training.evaluation.label_metrics import LabelScores
from training.evaluation.metrics import (
    MISSING,
    RANKING_METRICS,
    RankingMeans,
    RankMeasures,
    auc,
    build_pairs,
    constant_log_loss,
    hit_rate,
    log_loss,
    measure,
    ndcg,
    rank_all,
    rank_among,
    rank_without,
    recall,
    reciprocal_rank,
)
from training.evaluation.scorers import ListStatistics
from training.evaluation.task_metrics import ErrorScores
from training.loop.plan import TASK_METRICS

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


RELEVANT = st.lists(st.sets(st.integers(1, 30), max_size=6), min_size=1, max_size=8)


def _padded(rows: list[set[int]]) -> np.ndarray:
    width = max(1, *(len(row) for row in rows))
    return np.array([sorted(row) + [np.nan] * (width - len(row)) for row in rows], float)


def _metrics_reference(row: set[int], k: int) -> tuple[float, float, float, float]:
    """From a list of 0/1 gains, position by position."""
    gains = [1.0 if position in row else 0.0 for position in range(1, 31)]
    dcg = sum(g / math.log2(i + 2) for i, g in enumerate(gains[:k]))
    ideal = sum(g / math.log2(i + 2) for i, g in enumerate(sorted(gains, reverse=True)[:k]))
    first = gains.index(1.0) + 1 if row else math.inf
    return (
        float(any(gains[:k])),
        sum(gains[:k]) / len(row) if row else 0.0,
        dcg / ideal if ideal else 0.0,
        1.0 / first,
    )


@given(RELEVANT, st.integers(1, 30))
def test_ranking_metrics_equal_a_walk_down_the_list(rows: list[set[int]], k: int) -> None:
    ranks = _padded(rows)
    expected = np.array([_metrics_reference(row, k) for row in rows])
    found = np.stack(
        [hit_rate(ranks, k), recall(ranks, k), ndcg(ranks, k), reciprocal_rank(ranks)], axis=1
    )
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_a_miss_counts_in_the_denominator_and_scores_nothing() -> None:
    ranks = np.array([[1.0, np.inf], [np.inf, np.nan]])
    assert recall(ranks, 10).tolist() == [0.5, 0.0]
    assert hit_rate(ranks, 10).tolist() == [1.0, 0.0]
    assert reciprocal_rank(ranks).tolist() == [1.0, 0.0]
    assert ndcg(ranks, 10)[0] == pytest.approx(1 / (1 + 1 / math.log2(3)))


@given(st.lists(st.integers(1, 40), min_size=2, max_size=50), st.integers(1, 49))
def test_means_do_not_depend_on_the_batches(ranks: list[int], cut: int) -> None:
    whole, parts = RankingMeans(RankMeasures((1, 10))), RankingMeans(RankMeasures((1, 10)))
    array = np.array(ranks, float)
    whole.update(array)
    for part in (array[:cut], array[cut:]):
        if len(part):
            parts.update(part)
    assert parts.result() == pytest.approx(whole.result(), abs=1e-12)
    assert whole.result()["hit_rate@10"] == pytest.approx(np.mean(array <= 10))


def test_no_rows_is_an_error_rather_than_a_nan() -> None:
    with pytest.raises(ValueError, match="no row"):
        RankingMeans(RankMeasures((10,))).result()


@given(st.lists(st.tuples(st.booleans(), st.integers(-3, 3)), min_size=1, max_size=40))
def test_auc_equals_the_count_over_all_pairs(rows: list[tuple[bool, int]]) -> None:
    labels = np.array([label for label, _ in rows])
    scores = np.array([score for _, score in rows], np.float32)
    positive, negative = scores[labels][:, None], scores[~labels][None, :]
    if not positive.size or not negative.size:
        assert auc(labels, scores) is None
        return
    expected = np.mean((positive > negative) + 0.5 * (positive == negative))
    assert auc(labels, scores) == pytest.approx(float(expected), abs=1e-12)


def test_auc_refuses_what_has_no_order_or_is_no_label() -> None:
    with pytest.raises(ValueError, match="NaN"):
        auc(np.array([0, 1]), np.array([0.0, np.nan]))
    with pytest.raises(ValueError, match="0 or 1"):
        auc(np.array([0, 2]), np.array([0.0, 1.0]))
    with pytest.raises(ValueError, match="both be"):
        auc(np.array([0, 1]), np.array([0.0]))


@given(st.lists(st.tuples(st.booleans(), st.floats(-20, 20)), min_size=1, max_size=40))
def test_log_loss_equals_the_textbook_form(rows: list[tuple[bool, float]]) -> None:
    labels = np.array([label for label, _ in rows], np.float64)
    logits = np.array([logit for _, logit in rows])
    p = 1 / (1 + np.exp(-logits))
    expected = -np.mean(labels * np.log(p) + (1 - labels) * np.log1p(-p))
    assert log_loss(labels, logits) == pytest.approx(expected, abs=1e-7, rel=1e-7)


def test_log_loss_stays_finite_at_extreme_logits() -> None:
    assert log_loss(np.array([1, 0]), np.array([-1e4, 1e4])) == pytest.approx(1e4)


@settings(max_examples=25)
@given(st.lists(st.booleans(), min_size=1, max_size=30), st.floats(0.01, 0.99))
def test_constant_log_loss_is_log_loss_of_a_constant(labels: list[bool], rate: float) -> None:
    array = np.array(labels, float)
    logits = np.full(len(array), math.log(rate / (1 - rate)))
    assert constant_log_loss(float(array.mean()), rate) == pytest.approx(
        log_loss(array, logits), rel=1e-9
    )


def test_constant_log_loss_knows_certainty() -> None:
    assert constant_log_loss(1.0, 1.0) == 0.0
    assert constant_log_loss(0.5, 1.0) is None
    assert constant_log_loss(0.5, 0.0) is None


def test_every_metric_of_ranks_is_computed() -> None:
    assert sorted(RANKING_METRICS) == sorted(list_families("ranking"))
    ranks, at_cutoffs = np.array([1.0, 3.0]), [f"{name}@5" for name in RANKING_METRICS]
    assert set(measure(ranks, RankMeasures((5,)), "user")) == set(at_cutoffs)
    assert set(measure(ranks, RankMeasures((5,)))) == {"mrr", "hit_rate@5", "recall@5", "ndcg@5"}


def test_every_metric_that_is_measured_says_which_way_it_is_better() -> None:
    ranks = np.array([1.0, 3.0])
    features, scores = {"label": np.array([1.0, 0.0, 1.0])}, np.array([0.2, 0.1, -1.0])
    labels, errors = LabelScores("label", temperature=1.0), ErrorScores("label", 0.5)
    labels.update(features, scores)
    errors.update(features, scores)
    lists = ListStatistics(np.arange(5), (1, 10), mask_seen=False)
    lists.add(np.array([[0, 1]]))
    compared = [
        *_compare_binary(features["label"], (scores, scores), np.zeros(3, int), 1, np.ones(3)),
        *_compare_errors(features["label"], (scores, scores), np.zeros(3, int), 1, np.ones(3)),
    ]
    measured = labels.result(None) or {}
    named = {
        *measure(ranks, RankMeasures((5, 10))),
        *measure(ranks, RankMeasures((5, 10)), "user"),
        *(name for metrics in TASK_METRICS.values() for name in metrics),
        *compared,
        *(f"buy/{name}" for name in compared),
        *read_task_metrics(measured),
        *read_task_metrics(errors.result() or {}),
        *measured["calibration"],
        *lists.result(),
        *(name for name in re.findall(r"[a-z_]{3,}", METRIC_PATTERN)),
    } - {"ratio", "bins", OWN_PREFIX}  # Own metrics say it in the config.
    assert [name for name in named if find_direction(name) is None] == []
    assert is_minimised("buy/rmse")
    assert is_minimised("mse")
    assert not is_minimised("ndcg@10")
    for unknown in ("surprise@5", "calibration"):
        with pytest.raises(ConfigError, match="nothing says whether"):
            is_minimised(unknown)

"""EASE beside a model, against one ridge regression per item and rankings by plain loops."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.training.evaluation.measured import build_measured, configure, read_ids
from tests.training.tiny_dataset import TinyConfig, _draw_log, write_tiny_dataset
from training.checkpoint.restore import TrainedModel
from training.evaluation import systems
from training.evaluation.evaluate import evaluate_split
from training.evaluation.item_index import Pairs, build_item_index
from training.evaluation.systems import (
    L2_GRID,
    EaseSystem,
    fit_chosen_ease,
    fit_ease,
    solve_ease,
)

KS = (3, 10)
CONFIG = TinyConfig(users=60, items=30, events_per_user=14, leave_out=2)
_configure = partial(configure, ks=KS, batch_size=7)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainedModel:
    version = write_tiny_dataset(tmp_path_factory.mktemp("ease"), config=CONFIG)
    return _configure(build_measured(version))


def _draw(users: int, items: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    likes = (np.arange(users)[:, None] + np.arange(items)) % 2
    matrix = rng.random((users, items)) < np.where(likes, 0.5, 0.1)
    matrix[-1, 0] = True
    return matrix.astype(np.float64)


@pytest.mark.parametrize("l2", [0.5, 20.0])
def test_each_item_is_the_ridge_regression_on_all_others(l2: float) -> None:
    matrix = _draw(50, 12)
    found = solve_ease(matrix.T @ matrix, l2)
    for item in range(12):
        others = np.delete(np.arange(12), item)
        # Ridge as least squares: a row per penalty below the rows of users.
        rows = np.vstack([matrix[:, others], np.sqrt(l2) * np.eye(11)])
        target = np.concatenate([matrix[:, item], np.zeros(11)])
        expected = np.linalg.lstsq(rows, target, rcond=None)[0]
        np.testing.assert_allclose(found[others, item], expected, atol=1e-6)
        assert found[item, item] == 0


def test_the_penalty_is_the_one_that_finds_most_hidden_items() -> None:
    matrix = _draw(80, 40, seed=3)
    cells = Pairs(*np.nonzero(matrix))
    hidden = np.random.default_rng(7).random(len(cells)) < 0.2
    shown = matrix.copy()
    shown[cells.rows[hidden], cells.columns[hidden]] = 0
    recalls = []
    for l2 in L2_GRID:
        weights, found = solve_ease(shown.T @ shown, l2), []
        for user in range(80):
            asked = set(cells.columns[hidden & (cells.rows == user)].tolist())
            scores = shown[user].astype(np.float32) @ weights
            left = [i for i in range(40) if not shown[user, i]]
            best = sorted(left, key=lambda i, scores=scores: (-scores[i], i))[:10]
            found += [len(asked & set(best)) / len(asked)] if asked else []
        recalls.append(np.mean(found))
    assert len(set(recalls)) > 1
    assert fit_chosen_ease(cells, 40, seed=7).l2 == L2_GRID[int(np.argmax(recalls))]


def _fit_by_hand(trained: TrainedModel) -> tuple[dict[int, int], np.ndarray, Any]:
    index = build_item_index(trained.model, trained.version_dir, trained.manifest, 64)
    columns = {raw: int(index.columns_of(np.array([i]))[0]) for raw, i in
               read_ids(trained, "movie_id").items()}  # fmt: skip
    events = _draw_log(CONFIG).events
    matrix = np.zeros((CONFIG.users, len(index)))
    for row, items in enumerate(events.values()):
        for item in items[: -2 * CONFIG.leave_out]:
            matrix[row, columns[item]] = 1
    return columns, matrix, fit_ease(trained, "test", index)


def test_it_learns_of_the_rows_that_train_alone(trained: TrainedModel) -> None:
    _, matrix, ease = _fit_by_hand(trained)
    assert (ease.users, ease.pairs) == (CONFIG.users, matrix.sum())
    expected = solve_ease(matrix.T @ matrix, ease.l2)
    np.testing.assert_allclose(ease.weights, expected, atol=1e-6)


@pytest.mark.parametrize("masks", [True, False])
def test_users_are_ranked_by_what_they_had_met(trained: TrainedModel, masks: bool) -> None:
    report = evaluate_split(
        _configure(trained, per="user", mask_seen=masks), "test", baselines=True
    )
    columns, _, ease = _fit_by_hand(trained)
    expected: dict[int, list[float]] = {k: [] for k in KS}
    for items in _draw_log(CONFIG).events.values():
        met = [columns[i] for i in set(items[: -CONFIG.leave_out]) if i in columns]
        asked = set(items[-CONFIG.leave_out :])
        scores = ease.weights[met].astype(np.float64).sum(0)
        left = [c for c in range(len(scores)) if not masks or c not in met]
        best = sorted(left, key=lambda c, scores=scores: -scores[c])
        for k, found in expected.items():
            found.append(len({columns.get(i) for i in asked} & set(best[:k])) / len(asked))
    [protocol] = report["protocols"]
    assert list(protocol["systems"]) == ["model", "ease", "popularity", "random"]
    for k, found in expected.items():
        assert protocol["systems"]["ease"][f"recall@{k}"] == pytest.approx(np.mean(found))
    assert report["baselines"] == {"ease": ease.describe()}
    assert "recall@10" in protocol["differences"]["against"]["ease"]
    plain = evaluate_split(_configure(trained, per="user", mask_seen=masks), "test")
    assert "baselines" not in plain
    for name, values in plain["protocols"][0]["systems"].items():
        assert protocol["systems"][name] == values


def test_events_are_ranked_by_what_was_met_before_each(trained: TrainedModel) -> None:
    report = evaluate_split(_configure(trained, per="event"), "test", baselines=True)
    columns, _, ease = _fit_by_hand(trained)
    ranks: dict[str, list[float]] = {"full_unseen": [], "full_all": []}
    for items in _draw_log(CONFIG).events.values():
        for place in range(len(items) - CONFIG.leave_out, len(items)):
            met = {columns[i] for i in items[:place] if i in columns}
            scores = ease.weights[sorted(met)].astype(np.float64).sum(0)
            target = columns.get(items[place])
            for name, found in ranks.items():
                out = met - {target} if name == "full_unseen" else set()
                rivals = [c for c in range(len(scores)) if c != target and c not in out]
                found.append(
                    np.inf if target is None
                    else 1 + sum(scores[c] >= scores[target] - 1e-9 for c in rivals)
                )  # fmt: skip
    by_name = {protocol["name"]: protocol["systems"]["ease"] for protocol in report["protocols"]}
    for name, found in ranks.items():
        hits = np.mean(np.array(found) <= 3)
        assert by_name[name]["hit_rate@3"] == pytest.approx(hits)
        assert by_name[name]["mrr"] == pytest.approx(np.mean(1 / np.array(found)))


def test_of_a_large_catalogue_it_knows_the_frequent_items(
    trained: TrainedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _, matrix, whole = _fit_by_hand(trained)
    monkeypatch.setattr(systems, "MAX_BYTES", 48 * 12**2)
    _, _, ease = _fit_by_hand(trained)
    counts = matrix.sum(0)
    known = ease.columns
    assert len(known) == 12
    assert (np.diff(known) > 0).all()
    assert counts[known].min() >= np.delete(counts, known).max()
    expected = solve_ease(matrix[:, known].T @ matrix[:, known], ease.l2)
    np.testing.assert_allclose(ease.weights, expected, atol=1e-6)
    assert ease.pairs == counts[known].sum()
    assert ease.pairs_outside == np.delete(counts, known).sum() > 0
    assert f"the 12 most frequent of {len(counts)} items" in caplog.text
    index = build_item_index(trained.model, trained.version_dir, trained.manifest, 64)
    unknown = np.delete(np.arange(len(counts)), known)
    met = tf.ragged.constant([index.ids[[known[0], unknown[0], known[3]]].tolist()])
    [scores] = EaseSystem(ease, index, "seen").scores({"seen": met}, 1)
    np.testing.assert_allclose(scores[known], expected[0] + expected[3], atol=1e-6)
    assert scores[unknown].max() < scores[known].min()
    assert (ease.describe()["items"], whole.describe()["items"]) == (12, len(counts))
    assert whole.pairs_outside == 0

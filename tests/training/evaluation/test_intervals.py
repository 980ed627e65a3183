"""Paired differences and their intervals, against formulas written out and simulated draws."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from conf.errors import ConfigError
from conf.manifest import Manifest
from jobs.compare import find_lead, require_metric
from tests.training.evaluation.measured import build_measured, configure
from tests.training.toy_models import TinyTowers
from training.checkpoint.restore import TrainedModel
from training.evaluation.evaluate import compare_runs, evaluate_split
from training.evaluation.intervals import GROUPS, Interval, compare_auc, compare_rows
from training.evaluation.metrics import auc
from training.evaluation.scored_rows import RowColumns, SystemSums, UserGroups
from training.evaluation.tasks import ErrorScores, LabelScores

compare_means, compare_root_means = partial(compare_rows, "mrr"), partial(compare_rows, "rmse")


def _ends(found: Interval) -> tuple[float, float, float]:
    return found["difference"], found["low"], found["high"]


def _scores(seed: int, rows: int = 120) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(seed)
    positive = rng.random(rows) < 0.4
    shared = positive + rng.normal(size=rows)
    own = [np.round(shared + rng.normal(size=rows), 1) for _ in range(2)]
    return positive, (own[0], own[1])


def test_the_interval_of_aucs_is_delongs() -> None:
    positive, scores = _scores(1)
    tens, ones = [], []
    for own in scores:
        pairs = own[positive][:, None] - own[~positive][None, :]
        kernel = (pairs > 0) + 0.5 * (pairs == 0)
        tens.append(kernel.mean(axis=1))
        ones.append(kernel.mean(axis=0))
    m, n = positive.sum(), (~positive).sum()
    covariance = np.cov(tens) / m + np.cov(ones) / n
    contrast = np.array([1.0, -1.0])
    half = 1.959964 * np.sqrt(contrast @ covariance @ contrast)
    found = compare_auc(positive, scores, np.arange(len(positive)))
    assert (found["run"], found["other"]) == pytest.approx((tens[0].mean(), tens[1].mean()))
    gap = tens[0].mean() - tens[1].mean()
    assert _ends(found) == pytest.approx((gap, gap - half, gap + half), rel=1e-6)


def test_users_with_both_labels_are_drawn_whole() -> None:
    rng, users = np.random.default_rng(11), np.repeat(np.arange(200), 6)
    positive, taste = rng.random(1200) < 0.4, np.repeat(rng.normal(size=200), 6)
    scores = [0.7 * positive + taste * at + rng.normal(size=1200) for at in (2.0, 0.0)]
    gaps = []
    for _ in range(400):
        drawn = (rng.integers(0, 200, 200)[:, None] * 6 + np.arange(6)).ravel()
        gaps.append(np.subtract(*(auc(positive[drawn], own[drawn]) for own in scores)))
    found = compare_auc(positive, scores, users)
    assert found["high"] - found["difference"] == pytest.approx(1.96 * np.std(gaps), rel=0.15)


def test_rows_of_one_user_count_as_one_draw() -> None:
    positive, scores = _scores(2)
    owners = np.arange(len(positive))
    once = compare_auc(positive, scores, owners)
    many = (np.repeat(own, 5) for own in scores)
    repeated = compare_auc(np.repeat(positive, 5), tuple(many), np.repeat(owners, 5))
    assert _ends(repeated) == pytest.approx(_ends(once))
    values = np.random.default_rng(3).normal(0.1, 1.0, 400)
    nothing, users = np.zeros(400), np.arange(400)
    once = compare_means((values, nothing), users, 1)
    five = compare_means((np.repeat(values, 5), np.zeros(2000)), np.repeat(users, 5), 1)
    assert _ends(five) == pytest.approx(_ends(once))


def test_the_bootstrap_is_that_of_large_samples() -> None:
    values = np.random.default_rng(4).exponential(1.0, 3000)
    found = compare_means((values, np.zeros(3000)), np.arange(3000), 7)
    half = 1.96 * values.std(ddof=1) / np.sqrt(3000)
    expected = np.array([0, -half, half]) + values.mean()
    assert _ends(found) == pytest.approx(expected, rel=0.01)
    assert compare_means((values, np.zeros(3000)), np.arange(3000), 7) == found


@pytest.mark.parametrize(("users", "has_interval"), [(1, False), (19, False), (20, True)])
def test_few_users_have_no_interval(users: int, has_interval: bool) -> None:
    rng, owners = np.random.default_rng(8), np.repeat(np.arange(users), 6)
    positive, scores = np.tile([True, False], 3 * users), rng.random((2, 6 * users))
    found = [
        compare_means(scores, owners, 1),
        compare_root_means(scores, owners, 1),
        compare_auc(positive, (scores[0], scores[1]), owners),
    ]
    for difference in found:
        assert (difference["low"] is not None) == (difference["high"] is not None) == has_interval
        assert difference["difference"] == pytest.approx(difference["run"] - difference["other"])
        assert (find_lead("auc", difference) is not None) == has_interval


def test_the_interval_of_root_means_is_that_of_drawn_rows() -> None:
    rng = np.random.default_rng(6)
    run, other = rng.exponential(1.0, 400), rng.exponential(1.3, 400)
    found = compare_root_means((run, other), np.arange(400), 1)
    gaps = []
    for _ in range(3000):
        rows = rng.integers(0, 400, 400)
        gaps.append(np.sqrt(run[rows].mean()) - np.sqrt(other[rows].mean()))
    gap = np.sqrt(run.mean()) - np.sqrt(other.mean())
    assert _ends(found) == pytest.approx((gap, *np.percentile(gaps, (2.5, 97.5))), abs=0.01)


@pytest.mark.parametrize("ids", [range(2, 100), range(2, 10 * GROUPS), None])
def test_users_have_a_group_each_and_unknown_ones_that_of_the_id_they_share(
    ids: range | None,
) -> None:
    groups = UserGroups("user", ids)
    found = groups.find({"user": np.array([5, 1, 7, 0, 5, 1])}, np.arange(6))
    assert len({*found.tolist()}) == 4
    assert found[0] == found[4] < GROUPS
    assert found[1] == found[5] >= GROUPS
    later = groups.find({"user": np.array([1, 5])}, np.arange(2))
    np.testing.assert_array_equal(later, found[[1, 0]])


def test_streamed_sums_give_the_interval_of_all_rows_unknown_users_drawn_together() -> None:
    rng = np.random.default_rng(3)
    users = np.concatenate([np.repeat(np.arange(2, 42), 5), np.ones(200, np.int64)])
    model, rival = rng.random((2, 400))
    model[200:] += 0.3
    columns, sums = RowColumns(UserGroups("user", range(2, 42))), SystemSums()
    for part in np.array_split(rng.permutation(400), 6):
        rows = columns.read({"user": users[part]}, model[part])
        sums.add("model", rows, {"mrr": model[part], "ndcg@10": model[part] * 2})
        sums.add("popularity", rows, {"mrr": rival[part], "ndcg@10": rival[part] * 2})
    found = sums.compare("model", seed=4)
    assert found["groups"] == 40
    got, twice = (found["against"]["popularity"][name] for name in ("mrr", "ndcg@10"))
    # The shared group comes last, as the greatest owner does.
    expected = compare_means((model, rival), np.where(users == 1, 99, users), 4)
    assert _ends(got) == pytest.approx(_ends(expected))
    assert twice["low"] == pytest.approx(2 * got["low"])
    alone = compare_means((model, rival), np.where(users == 1, 99 + np.arange(400), users), 4)
    assert got["high"] - got["low"] > 1.5 * (alone["high"] - alone["low"])


def _label_rows(seed: int, rows: int) -> tuple[dict[str, tf.Tensor], np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = (rng.random(rows) < 0.4).astype(np.float32)
    scores = (labels + rng.normal(size=rows)).astype(np.float32)
    return {"label": tf.constant(labels), "user": tf.constant(rng.integers(2, 80, rows))}, scores


def test_labels_are_compared_with_a_constant() -> None:
    features, scores = _label_rows(9, 600)
    users, positive = features["user"].numpy(), features["label"].numpy() > 0.5
    groups = UserGroups("user", range(2, 80))
    columns, collected = RowColumns(groups, label="label"), LabelScores(1.0, groups, 3, 0.3)
    for start in range(0, 600, 100):
        batch = {name: value[start : start + 100] for name, value in features.items()}
        collected.add(columns.read(batch, scores[start : start + 100]))
    values = collected.result()
    found = values["differences"]["against"]["constant"]
    auc = compare_auc(positive, (scores, np.zeros(600)), users)
    assert _ends(found["auc"]) == pytest.approx(_ends(auc))
    losses = np.logaddexp(0, scores.astype(np.float64)) - np.where(positive, scores, 0.0)
    constant = np.where(positive, -np.log(0.3), -np.log(0.7))
    loss = compare_means((losses, constant), users, 3)
    assert _ends(found["log_loss"]) == pytest.approx(_ends(loss))
    assert found["gauc"]["difference"] == pytest.approx(values["gauc"]["value"] - 0.5)
    assert found["gauc"]["low"] < found["gauc"]["difference"] < found["gauc"]["high"]
    assert json.dumps(values)


def test_rows_of_a_dataset_without_users_stand_alone() -> None:
    columns = RowColumns()
    parts = [columns.read({}, np.zeros(250)).groups for _ in range(2)]
    assert len(np.unique(np.concatenate(parts))) == 500


def test_errors_are_compared_with_those_of_the_mean() -> None:
    rng = np.random.default_rng(10)
    labels, users = rng.normal(3.0, 1.0, 300), rng.integers(2, 60, 300)
    scores = (labels + rng.normal(0, 0.5, 300)).astype(np.float32)
    errors = ErrorScores(2.5, seed=5)
    columns = RowColumns(UserGroups("user", range(2, 60)), label="rating")
    errors.add(columns.read({"rating": labels, "user": users}, scores))
    values = errors.result()
    assert values is not None
    found = values["differences"]["against"]["constant"]["rmse"]
    squared = np.square(scores.astype(np.float64) - labels)
    expected = compare_root_means((squared, np.square(labels - 2.5)), users, 5)
    assert _ends(found) == pytest.approx(_ends(expected))
    assert found["difference"] == pytest.approx(values["rmse"] - values["constant"]["rmse"])


def test_the_lead_is_the_end_that_is_worse() -> None:
    found = {"low": -0.02, "high": 0.01}
    assert find_lead("ndcg@10", found) == -0.02
    assert find_lead("like/log_loss", found) == find_lead("mse", found) == -0.01
    assert require_metric({"metrics": {"auc": 1, "log_loss": 2}}, None) == "auc"
    with pytest.raises(ConfigError, match="did you mean"):
        require_metric({"metrics": {"ndcg@10": {}}}, "ndcg@11")


@pytest.fixture(scope="module")
def runs(tiny_version: Path, tiny_manifest: Manifest) -> tuple[TrainedModel, TrainedModel]:
    first = build_measured(tiny_version, evaluation={"ks": [5, 10], "sampled_negatives": None})
    return first, replace(first, model=TinyTowers(tiny_manifest, seed=4))


@pytest.mark.parametrize("per", ["event", "user"])
def test_values_are_those_of_the_evaluation(
    runs: tuple[TrainedModel, TrainedModel], per: str
) -> None:
    own, other = (configure(run, ks=[5, 10], per=[per]) for run in runs)
    found = compare_runs(own, other, "test")
    assert (found["rows"], found["users"]) == (60, 60)
    for side, trained in (("run", own), ("other", other)):
        protocol = evaluate_split(trained, "test")["protocols"][0]
        known = protocol["systems"]["model"]
        assert {m: v[side] for m, v in found["metrics"].items()} == pytest.approx(known)
        assert protocol["differences"]["groups"] == 60
        for rival, intervals in protocol["differences"]["against"].items():
            gaps = {m: known[m] - protocol["systems"][rival][m] for m in known}
            told = {m: interval["difference"] for m, interval in intervals.items()}
            assert told == pytest.approx(gaps, abs=1e-12)
    for values in found["metrics"].values():
        assert values["low"] <= values["difference"] <= values["high"]
    back = compare_runs(other, own, "test")["metrics"]["ndcg@10"]
    assert back["difference"] == pytest.approx(-found["metrics"]["ndcg@10"]["difference"])

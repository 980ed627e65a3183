"""Paired comparison of two runs, against formulas written out and simulated draws."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from conf.errors import ConfigError
from conf.manifest import Manifest
from conf.training.train import TrainConfig
from tests.training.toy_models import TinyTowers
from training.checkpoint.restore import TrainedModel
from training.evaluation.comparison import (
    bootstrap_mean,
    compare_auc,
    compare_means,
    compare_runs,
    find_lead,
    require_metric,
)
from training.evaluation.evaluate import evaluate_split


def _scores(seed: int, rows: int = 120) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(seed)
    positive = rng.random(rows) < 0.4
    shared = positive + rng.normal(size=rows)
    own = [np.round(shared + rng.normal(size=rows), 1) for _ in range(2)]
    return positive, (own[0], own[1])


def test_the_interval_of_aucs_is_delongs() -> None:
    """The components of DeLong et al. 1988 by comparing every positive with every negative."""
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
    assert (found.run, found.other) == pytest.approx((tens[0].mean(), tens[1].mean()))
    assert found.high - found.difference == pytest.approx(half, rel=1e-6)
    assert found.difference - found.low == pytest.approx(half, rel=1e-6)


def test_rows_of_one_user_count_as_one_draw() -> None:
    """Every row five times over: five times the rows tell no more than one time."""
    positive, scores = _scores(2)
    owners = np.arange(len(positive))
    once = compare_auc(positive, scores, owners)
    many = (np.repeat(own, 5) for own in scores)
    repeated = compare_auc(np.repeat(positive, 5), tuple(many), np.repeat(owners, 5))
    assert repeated.difference == pytest.approx(once.difference)
    assert repeated.high - repeated.low == pytest.approx(once.high - once.low)
    values = np.random.default_rng(3).normal(0.1, 1.0, 400)
    nothing, users = np.zeros(400), np.arange(400)
    once_mean = compare_means(values, nothing, users, 1)
    five = compare_means(np.repeat(values, 5), np.zeros(2000), np.repeat(users, 5), 1)
    assert (five.low, five.high) == pytest.approx((once_mean.low, once_mean.high))


def test_the_bootstrap_is_that_of_large_samples() -> None:
    """Of many equal users the interval is that of the normal distribution."""
    values = np.random.default_rng(4).exponential(1.0, 3000)
    low, high = bootstrap_mean(values, np.ones(3000), 7)
    half = 1.96 * values.std(ddof=1) / np.sqrt(3000)
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), rel=0.01)
    assert bootstrap_mean(values, np.ones(3000), 7) == (low, high)


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    rng, inside = np.random.default_rng(5), 0
    for seed in range(150):
        sizes = rng.integers(1, 6, 80)
        owners = np.repeat(np.arange(80), sizes)
        values = np.repeat(rng.normal(0.3, 1.0, 80), sizes) + rng.normal(0, 0.5, len(owners))
        found = compare_means(values, np.zeros(len(owners)), owners, seed)
        inside += found.low <= 0.3 <= found.high
    assert 0.88 <= inside / 150 <= 0.99


def test_the_lead_is_the_end_that_is_worse() -> None:
    found = {"low": -0.02, "high": 0.01}
    assert find_lead("ndcg@10", found) == -0.02
    assert find_lead("like/log_loss", found) == find_lead("mse", found) == -0.01
    assert require_metric({"metrics": {"auc": 1, "log_loss": 2}}, None) == "auc"
    with pytest.raises(ConfigError, match="did you mean"):
        require_metric({"metrics": {"ndcg@10": {}}}, "ndcg@11")


@pytest.fixture(scope="module")
def runs(tiny_version: Path, tiny_manifest: Manifest) -> tuple[TrainedModel, TrainedModel]:
    config = TrainConfig.model_validate(
        {"dataset": "d", "name": "n", "evaluation": {"ks": [5, 10], "sampled_negatives": None}}
    )
    models = (TinyTowers(tiny_manifest, seed=seed) for seed in (3, 4))
    first, second = (
        TrainedModel(Path(), model, config, tiny_manifest, tiny_version) for model in models
    )
    return first, second


@pytest.mark.parametrize("per", ["event", "user"])
def test_values_are_those_of_the_evaluation(
    runs: tuple[TrainedModel, TrainedModel], per: str
) -> None:
    own, other = runs
    evaluation = own.config.evaluation.model_copy(update={"per": (per,)})
    config = own.config.model_copy(update={"evaluation": evaluation})
    own, other = replace(own, config=config), replace(other, config=config)
    found = compare_runs(own, other, "test")
    assert (found["rows"], found["users"]) == (60, 60)
    for side, trained in (("run", own), ("other", other)):
        known = evaluate_split(trained, "test")["protocols"][0]["systems"]["model"]
        assert {m: v[side] for m, v in found["metrics"].items()} == pytest.approx(known)
    for values in found["metrics"].values():
        assert values["low"] <= values["difference"] <= values["high"]
    back = compare_runs(other, own, "test")["metrics"]["ndcg@10"]
    assert back["difference"] == pytest.approx(-found["metrics"]["ndcg@10"]["difference"])


def test_runs_on_other_versions_are_refused(runs: tuple[TrainedModel, TrainedModel]) -> None:
    own, other = runs
    newer = replace(other.manifest, dataset_version="later")
    with pytest.raises(ConfigError, match="different dataset versions"):
        compare_runs(own, replace(other, manifest=newer), "test")

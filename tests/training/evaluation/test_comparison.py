"""Paired comparison of two runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from conf.errors import ConfigError
from conf.manifest import Manifest
from conf.training.train import TrainConfig
from tests.training.toy_models import TinyTowers
from training.checkpoint.restore import TrainedModel
from training.evaluation import scored_rows
from training.evaluation.evaluate import compare_runs, evaluate_split, require_metric
from training.evaluation.intervals import find_lead


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


def test_users_are_the_known_ones(
    runs: tuple[TrainedModel, TrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where ids up to 41 are buckets of users outside the vocabulary."""
    monkeypatch.setattr(scored_rows, "find_named_ids", lambda *_: range(42, 62))
    found = compare_runs(*runs, "test")
    report = evaluate_split(runs[0], "test")
    assert (found["rows"], found["users"]) == (report["rows"], report["users"]) == (60, 20)
    assert report["protocols"][0]["differences"]["groups"] == 20

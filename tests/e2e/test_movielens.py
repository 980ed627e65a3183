"""MovieLens-1M as it is distributed, where the machine has it."""

from __future__ import annotations

import pytest

from conf.etl import BuildConfig
from conf.load import load_config
from conf.training import TrainConfig
from etl.build import build_dataset
from training.evaluate import evaluate_split
from training.models import build_model
from training.trained import TrainedModel

pytestmark = pytest.mark.slow


def test_every_rating_is_joined_and_popularity_is_the_published_one(spark, data_dir, tmp_path):
    config = load_config(
        BuildConfig,
        "etl",
        "ml_1m",
        [f"data_dir={data_dir / 'ml-1m'}", f"output.root={tmp_path}"],
    )
    built = build_dataset(spark, config)
    counts = built.manifest.counts
    assert counts.joined == 1_000_209
    assert counts.kept["test"] == counts.kept["users"] == 6_040
    assert not counts.dropped

    settings = load_config(TrainConfig, "training", "ml_1m_dssm", [f"dataset={built.version}"])
    untrained = build_model(settings.model, built.manifest, seed=1)
    metrics = evaluate_split(
        TrainedModel(untrained, settings, built.manifest, built.version), "test"
    )
    systems = {p["name"]: p["systems"] for p in metrics["protocols"]}
    # Published with DeepMatch's example: 0.1035 with seen items kept; 0.1396 without them.
    assert systems["full_all"]["popularity"]["hit_rate@50"] == pytest.approx(0.1035, abs=5e-4)
    assert systems["full_unseen"]["popularity"]["hit_rate@50"] == pytest.approx(0.1396, abs=5e-4)
    assert systems["full_all"]["model"]["hit_rate@50"] < 0.1

"""A catalogue that is larger than memory: its bytes by hand, in plans, refused before training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conf.errors import ConfigError
from conf.manifest import Manifest
from conf.training.models import HSTUConfig, MFConfig, RankingConfig, SASRecConfig
from conf.training.objectives import SampledSoftmaxConfig, SoftmaxConfig
from conf.training.train import TrainConfig
from training.fit import fit_run, plan_run
from training.monitoring.progress import NoProgress
from training.objectives.catalog_softmax import BLOCK_ITEMS
from training.objectives.softmax_memory import (
    SoftmaxMemory,
    estimate_softmax_memory,
    require_softmax_memory,
)

FREE = "training.objectives.softmax_memory.free_memory_bytes"


def configure(version: Path, root: Path, **model: Any) -> TrainConfig:
    own = {"name": "sasrec", "embedding_dim": 4, "every_position": False, **model}
    return TrainConfig.model_validate(
        {"dataset": str(version.parent.parent), "name": "m", "root": str(root), "model": own,
         "input": {"batch_size": 32}, "fit": {"epochs": 1}}
    )  # fmt: skip


def test_the_estimate_by_hand(tiny_manifest: Manifest) -> None:
    """Items of the vocabulary; 8 positions a row where each is a target; five copies of a row."""
    items = int(tiny_manifest.schema["movie_id"].vocabulary_size or 0)
    for config, queries in (
        (SASRecConfig(embedding_dim=16), 8),
        (HSTUConfig(embedding_dim=16), 8),
        (SASRecConfig(embedding_dim=16, every_position=False), 1),
        (MFConfig(embedding_dim=16, objective=SoftmaxConfig()), 1),
    ):
        memory = estimate_softmax_memory(config, tiny_manifest, 32)
        assert memory == SoftmaxMemory(items, 32 * queries, 16)
        assert memory.logits_bytes == 3 * 4 * items * 32 * queries
        assert memory.vectors_bytes == 5 * 4 * items * 16
    for config in (MFConfig(objective=SampledSoftmaxConfig()), RankingConfig()):
        assert estimate_softmax_memory(config, tiny_manifest, 32) is None


def test_what_does_not_fit_is_refused_with_its_bytes_and_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = SoftmaxMemory(1_000_000, 12_800, 64)
    assert memory.logits_bytes == 3 * 4 * BLOCK_ITEMS * 12_800  # A block of items, not all.
    needed = memory.logits_bytes + memory.vectors_bytes
    monkeypatch.setattr(FREE, lambda: needed)
    require_softmax_memory(memory)
    monkeypatch.setattr(FREE, lambda: needed - 1)
    with pytest.raises(ConfigError, match="does not fit in memory") as refused:
        require_softmax_memory(memory)
    said = refused.value.render()
    assert "314,572,800 bytes of logits" in said
    assert "1,280,000,000 bytes of vectors" in said
    assert "kind=sampled_softmax" in said
    assert "input.batch_size" in said
    monkeypatch.setattr(FREE, lambda: memory.vectors_bytes - 1)
    with pytest.raises(ConfigError) as refused:
        require_softmax_memory(memory)
    assert "model.embedding_dim" in refused.value.render()
    monkeypatch.setattr(FREE, lambda: None)  # Nobody knows what is free.
    require_softmax_memory(memory)


def test_plans_say_it_and_nothing_is_made_before_the_refusal(
    tiny_version: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(tiny_version, tmp_path / "runs")
    plan = plan_run(config)["catalogue_softmax"]
    assert plan["logits_bytes"] == 3 * 4 * 42 * 32
    assert plan["item_vectors_bytes"] == 5 * 4 * 42 * 4
    assert plan["free_bytes"] > 0
    sampled = {"kind": "sampled_softmax", "negatives": {"source": "uniform", "count": 9}}
    other = configure(tiny_version, tmp_path / "runs", objective=sampled)
    assert plan_run(other)["catalogue_softmax"] is None
    monkeypatch.setattr(FREE, lambda: 1000)
    monkeypatch.setattr("training.loop.assembly.build_model", lambda *_: pytest.fail("too late"))
    for run in (plan_run, lambda config: fit_run(config, NoProgress())):
        with pytest.raises(ConfigError, match="does not fit in memory"):
            run(config)
    assert not (tmp_path / "runs").exists()

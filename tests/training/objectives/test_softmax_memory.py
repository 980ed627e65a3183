"""A catalogue that is larger than memory: its bytes by hand, in plans, refused before training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conf.errors import ConfigError
from conf.manifest import Manifest
from conf.training.models import DSSMConfig, HSTUConfig, MFConfig, RankingConfig, SASRecConfig
from conf.training.objectives import SampledSoftmaxConfig, SoftmaxConfig
from conf.training.train import TrainConfig
from tests.training.objectives.softmax_steps import MEASURED, change
from tests.training.tiny_dataset import write_tiny_dataset
from training.fit import fit_run, plan_run
from training.models.registry import build_model
from training.monitoring.progress import NoProgress
from training.objectives.catalog_softmax import BLOCK_ITEMS
from training.objectives.softmax_memory import (
    SoftmaxMemory,
    count_item_tower,
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
    # The id's row and that of genres, both, the vector; and the rows of four genres.
    assert plan["item_tower_bytes"] == 2 * 4 * 42 * (4 + 4 + 8 + 4 + 4 * 4)
    assert plan["mask_bytes"] == 0
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


def test_the_item_tower_and_the_mask_by_hand(tiny_manifest: Manifest) -> None:
    """Outputs of layers and rows of positions, each with its gradient; a byte for each mark."""
    items = int(tiny_manifest.schema["movie_id"].vocabulary_size or 0)
    endless = change(tiny_manifest, "genres", max_len=None)
    seven = replace(endless, statistics={"catalog": {"genres": {"length": {"max": 7}}}})
    dssm = {"embedding_dim": 4, "objective": SoftmaxConfig(mask="user_items")}
    deep, by_id = {**dssm, "item_hidden_units": (16,)}, {**dssm, "item_features": ("movie_id",)}
    tables = {"movie_id": {"dim": 9}, "user_id": {"dim": 9}}
    rows = 4 + 4 + 8  # Of the id, of genres, and both.
    for config, manifest, dim, tower in (
        (DSSMConfig(**by_id), seven, 4, 0),
        (MFConfig(**dssm, embeddings=tables), seven, 9, 0),
        (DSSMConfig(**deep), tiny_manifest, 4, rows + 2 * 16 + 4 + 4 * 4),
        (DSSMConfig(**deep), seven, 4, rows + 2 * 16 + 4 + 7 * 4),
        (DSSMConfig(**deep), endless, 4, rows + 2 * 16 + 4 + 4),
        # Dropout is a layer too.
        (SASRecConfig(**deep), seven, 4, rows + 3 * 16 + 4 + 7 * 4),
    ):
        planned = estimate_softmax_memory(config, manifest, 32)
        assert planned is not None
        found = count_item_tower(planned, build_model(config, manifest, 1), manifest)
        expected = SoftmaxMemory(items, planned.queries, dim, masked_rows=32, tower=tower)
        assert found == expected, config
        assert found.tower_bytes == 2 * 4 * items * tower
        assert found.mask_bytes == items * 32 + (3 + 4) * items * planned.queries
        assert found.free == planned.free


def test_hidden_layers_of_items_are_refused_before_training(
    tiny_version: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.loop.assembly._build_objective", lambda *_: pytest.fail("late"))
    config = configure(tiny_version, tmp_path / "runs", item_hidden_units=[512])
    by_ids = 3 * 4 * 42 * 32 + 5 * 4 * 42 * 4
    tower = 2 * 4 * 42 * (4 + 4 + 8 + 3 * 512 + 4 + 4 * 4)
    monkeypatch.setattr(FREE, lambda: by_ids)  # As much as a model of ids alone needs.
    for run in (plan_run, lambda config: fit_run(config, NoProgress())):
        with pytest.raises(ConfigError, match="does not fit in memory") as refused:
            run(config)
        said = refused.value.render()
        assert "32 queries a step x 42 items: 16,128 bytes of logits, and 3,360 bytes of" in said
        assert f"and {tower:,} bytes of the item tower's layers and lists" in said
        assert "model.item_hidden_units" in said
        assert "mask" not in said
    monkeypatch.setattr(FREE, lambda: by_ids + tower - 1)
    with pytest.raises(ConfigError) as refused:
        plan_run(config)
    assert "input.batch_size" in refused.value.render()
    assert not (tmp_path / "runs").exists()
    monkeypatch.undo()
    monkeypatch.setattr(FREE, lambda: by_ids + tower)
    assert plan_run(config)["catalogue_softmax"]["item_tower_bytes"] == tower


def test_the_mask_is_refused_before_the_model_is_built(
    tiny_version: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_ids, mask = 3 * 4 * 42 * 32 + 5 * 4 * 42 * 4, 42 * 32 + (3 + 4) * 42 * 32
    softmax = {"kind": "softmax", "mask": "user_items"}
    config = configure(tiny_version, tmp_path / "runs", objective=softmax,
                       item_features=["movie_id"])  # fmt: skip
    monkeypatch.setattr(FREE, lambda: by_ids + mask)
    assert plan_run(config)["catalogue_softmax"]["mask_bytes"] == mask
    monkeypatch.setattr("training.loop.assembly.build_model", lambda *_: pytest.fail("too late"))
    for free in (by_ids, by_ids + mask - 1):
        monkeypatch.setattr(FREE, lambda free=free: free)
        with pytest.raises(ConfigError, match="does not fit in memory") as refused:
            fit_run(config, NoProgress())
        said = refused.value.render()
        assert f"and {mask:,} bytes of the mask of users' items" in said
        assert "model.objective.mask=none" in said
        assert "item tower" not in said
    assert not (tmp_path / "runs").exists()


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """What steps of several models take, and what is estimated of each, from a process of its own.

    TensorFlow's allocator is chosen when a process starts, and not every one counts.
    """
    version = write_tiny_dataset(tmp_path_factory.mktemp("steps"))
    measured = subprocess.run(
        [sys.executable, "-m", "tests.training.objectives.softmax_steps", str(version)],
        capture_output=True, text=True, check=True,
        env={**os.environ, "TF_CPU_ALLOCATOR_USE_BFC": "true", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    found: dict[str, dict[str, int]] = json.loads(measured.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", MEASURED)
def test_the_estimate_is_above_what_a_step_takes_and_near_it(
    name: str, steps: dict[str, dict[str, int]]
) -> None:
    """What TensorFlow's allocator held at most while a step's gradients were computed."""
    held, needed, planned = (steps[name][key] for key in ("held", "needed", "planned"))
    assert held < needed < 2.5 * held
    assert planned < held or name == "mask"

"""A catalogue that is larger than memory: its bytes by hand, in plans, refused before training."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.errors import ConfigError
from conf.manifest import Manifest
from conf.training.models import DSSMConfig, HSTUConfig, MFConfig, RankingConfig, SASRecConfig
from conf.training.objectives import SampledSoftmaxConfig, SoftmaxConfig
from conf.training.train import TrainConfig
from training.distribution.workers import require_memory
from training.fit import fit_run
from training.loop.parts import build
from training.loop.plan import read_plan
from training.monitoring.progress import TrainingProgress
from training.objectives.softmax_memory import BLOCK_ITEMS, count_softmax_bytes


def test_the_bytes_by_hand(tiny_manifest: Manifest) -> None:
    """42 items; 8 positions a row where each is a target; five vectors of each item."""
    masked, plain = SoftmaxConfig(mask="user_items"), SoftmaxConfig()
    deep = {"item_hidden_units": (64, 32), "objective": plain}
    for config, scores, numbers, marks in (
        (SASRecConfig(embedding_dim=16), 3 * 8, 5 * 16, 0),
        (HSTUConfig(embedding_dim=16), 3 * 8, 5 * 16, 0),
        (SASRecConfig(embedding_dim=16, every_position=False), 3, 5 * 16, 0),
        (MFConfig(embedding_dim=16, objective=plain), 3, 5 * 16, 0),
        (MFConfig(embedding_dim=16, objective=masked), 5, 5 * 16, 32),
        (DSSMConfig(embedding_dim=4, **deep), 3, 5 * 4 + 2 * 96, 0),
    ):
        found = count_softmax_bytes(config, tiny_manifest, 32)
        assert found == 42 * (4 * (scores * 32 + numbers) + marks)
    assert BLOCK_ITEMS > 42  # Of more items the scores of one block are held.
    for config in (MFConfig(objective=SampledSoftmaxConfig()), RankingConfig()):
        assert count_softmax_bytes(config, tiny_manifest, 32) is None


def test_what_does_not_fit_is_refused_before_anything_is_made(
    tiny_version: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TrainConfig.model_validate(
        {"dataset": str(tiny_version), "name": "m", "root": str(tmp_path / "runs"),
         "model": {"name": "mf", "embedding_dim": 4, "objective": {"kind": "softmax"}},
         "input": {"batch_size": 32}, "fit": {"epochs": 1}}
    )  # fmt: skip
    needed = read_plan(config).to_json()["catalogue_softmax_bytes"]
    assert needed == 4 * 42 * (3 * 32 + 5 * 4)
    free = "training.distribution.workers.free_memory_bytes"
    for enough in (needed, None):  # Nobody knows what is free.
        monkeypatch.setattr(free, lambda enough=enough: enough)
        require_memory("it", needed, "take less")
    monkeypatch.setattr(free, lambda: needed - 1)
    monkeypatch.setattr("training.loop.parts.build_model", lambda *_: pytest.fail("too late"))
    for run in (
        lambda config: build(read_plan(config)),
        lambda config: fit_run(config, TrainingProgress()),
    ):
        with pytest.raises(ConfigError, match=f"(?s)does not fit.*{needed:,} bytes"):
            run(config)
    assert not (tmp_path / "runs").exists()

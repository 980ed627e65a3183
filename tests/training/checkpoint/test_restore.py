from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from conf.errors import InputDataError, UpstreamNotReadyError
from conf.manifest import Manifest
from conf.run import update_run_card
from conf.training import CheckpointConfig, TrainConfig
from tests.training.checkpoint.conftest import MODEL, stand
from training.checkpoint import manifest_sha256, restore_model
from training.checkpoint.shelf import list_entries


@pytest.fixture
def run(tmp_path: Path, tiny_version: Path, tiny_manifest: Manifest) -> Path:
    config = TrainConfig(dataset=str(tiny_version), name="n", model=MODEL)
    update_run_card(
        tmp_path,
        config=config.resolved(),
        dataset={
            "path": str(tiny_version),
            "manifest_sha256": manifest_sha256(tiny_manifest),
        },
    )
    return tmp_path


def test_restores_best_or_last(
    begin, run: Path, tiny_manifest: Manifest, tiny_version: Path
) -> None:
    training = begin()
    for which in ("best", "last"):
        with pytest.raises(UpstreamNotReadyError, match=f"no {which} checkpoint"):
            restore_model(run, which)
    training.save(stand(1), best=True)
    best = training.model.trainable_variables[0].numpy()
    training.step()
    training.save(stand(2))
    restored, config, manifest, version = restore_model(run, "best")
    np.testing.assert_array_equal(restored.trainable_variables[0].numpy(), best)
    assert config.model == MODEL
    assert manifest == tiny_manifest
    assert version == tiny_version
    last, *_ = restore_model(run, "last")
    for a, b in zip(last.trainable_variables, training.model.trainable_variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_a_damaged_best_checkpoint_is_refused_or_the_one_before_taken(begin, run: Path) -> None:
    training = begin(config=CheckpointConfig(keep_best=2))
    training.save(stand(1), best=True)
    first = training.model.trainable_variables[0].numpy()
    training.step()
    training.save(stand(2), best=True)
    older, newer = list_entries(run / "checkpoints" / "best")
    (newer.path / "state.index").unlink()
    restored, *_ = restore_model(run)
    np.testing.assert_array_equal(restored.trainable_variables[0].numpy(), first)
    (older.path / "checkpoint.json").write_bytes(b"")
    with pytest.raises(InputDataError, match="damaged"):
        restore_model(run)


def test_another_dataset_version_is_refused(run: Path) -> None:
    update_run_card(run, dataset={"manifest_sha256": "0" * 64})
    with pytest.raises(InputDataError, match="not the one"):
        restore_model(run)


def test_an_incomplete_card_is_refused(run: Path) -> None:
    update_run_card(run, config=None)
    with pytest.raises(InputDataError, match="run_card"):
        restore_model(run)

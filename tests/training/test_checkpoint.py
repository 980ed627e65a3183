from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from conf.errors import InputDataError, InternalError, UpstreamNotReadyError
from conf.manifest import Manifest
from conf.run import update_run_card
from conf.training import DSSMConfig, OptimizerConfig, TrainConfig
from training.checkpoint import Checkpoints, manifest_sha256, restore_model
from training.models import build_model
from training.models.base import RetrievalModel
from training.optimizers import Optimizers

MODEL = DSSMConfig(embedding_dim=4)


def build(
    run: Path, manifest: Manifest, seed: int = 1
) -> tuple[RetrievalModel, Optimizers, Checkpoints]:
    model = build_model(MODEL, manifest, seed)
    optimizers = Optimizers(OptimizerConfig(), model, 10)
    return model, optimizers, Checkpoints(run, model, optimizers)


def train_a_step(model: RetrievalModel, optimizers: Optimizers) -> None:
    users = {
        "user_id": tf.constant([5]),
        "gender": tf.constant([2]),
        "history": tf.constant([[7, 0]]),
    }
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model.embed_users(users) * tf.range(1.0, 5.0))
    optimizers.apply(tape.gradient(loss, optimizers.variables_in_step_order))


def state(model: RetrievalModel, optimizers: Optimizers) -> list[np.ndarray]:
    values = [*model.trainable_variables, *optimizers.sparse.slots["first_moment"], optimizers.step]
    assert optimizers.dense is not None
    return [v.numpy() for v in values] + [np.asarray(v) for v in optimizers.dense.variables]


@pytest.fixture
def run(tmp_path: Path, tiny_version: Path, tiny_manifest: Manifest) -> Path:
    run = tmp_path / "run"
    run.mkdir()
    config = TrainConfig(dataset=str(tiny_version), name="n", model=MODEL)
    update_run_card(
        run,
        config=config.resolved(),
        dataset={
            "path": str(tiny_version),
            "manifest_sha256": manifest_sha256(tiny_manifest),
        },
    )
    return run


def test_the_whole_state_comes_back(run: Path, tiny_manifest: Manifest) -> None:
    model, optimizers, checkpoints = build(run, tiny_manifest)
    assert checkpoints.restore_last() == 0
    train_a_step(model, optimizers)
    checkpoints.save_last(1)
    other, other_optimizers, other_checkpoints = build(run, tiny_manifest, seed=2)
    assert other_checkpoints.restore_last() == 1
    for a, b in zip(state(model, optimizers), state(other, other_optimizers), strict=True):
        np.testing.assert_array_equal(a, b)


def test_restores_best_or_last(run: Path, tiny_manifest: Manifest, tiny_version: Path) -> None:
    model, optimizers, checkpoints = build(run, tiny_manifest)
    with pytest.raises(UpstreamNotReadyError, match="best checkpoint"):
        restore_model(run)
    checkpoints.save_best(1)
    best = model.trainable_variables[0].numpy()
    train_a_step(model, optimizers)
    checkpoints.save_last(2)
    restored, config, manifest, version = restore_model(run, "best")
    np.testing.assert_array_equal(restored.trainable_variables[0].numpy(), best)
    assert config.model == MODEL
    assert manifest == tiny_manifest
    assert version == tiny_version
    last, *_ = restore_model(run, "last")
    for a, b in zip(last.trainable_variables, model.trainable_variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_the_last_two_and_one_best_are_kept(run: Path, tiny_manifest: Manifest) -> None:
    _, _, checkpoints = build(run, tiny_manifest)
    for epoch in (1, 2, 3):
        checkpoints.save_best(epoch)
        checkpoints.save_last(epoch)
    found = {
        which: sorted(path.stem for path in (run / "checkpoints" / which).glob("*.index"))
        for which in ("best", "last")
    }
    assert found == {"best": ["ckpt-3"], "last": ["ckpt-2", "ckpt-3"]}


def test_a_replayed_best_epoch_is_saved_again(
    run: Path, tiny_manifest: Manifest, tiny_version: Path
) -> None:
    _, _, checkpoints = build(run, tiny_manifest)
    checkpoints.save_best(1)
    model, _, again = build(run, tiny_manifest, seed=2)
    again.save_best(1)
    restored, *_ = restore_model(run)
    first = model.trainable_variables[0].numpy()
    np.testing.assert_array_equal(restored.trainable_variables[0].numpy(), first)


def test_a_disk_that_fills_up_leaves_the_last_checkpoint_readable(
    run: Path, tiny_manifest: Manifest
) -> None:
    model, optimizers, checkpoints = build(run, tiny_manifest)
    checkpoints.save_last(1)
    before = state(model, optimizers)
    train_a_step(model, optimizers)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))  # every write beyond fails
    try:
        with pytest.raises(InternalError, match="cannot write a checkpoint"):
            checkpoints.save_last(2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    other, other_optimizers, again = build(run, tiny_manifest, seed=2)
    assert again.restore_last() == 1
    for a, b in zip(before, state(other, other_optimizers), strict=True):
        np.testing.assert_array_equal(a, b)
    again.save_last(2)  # and there is room again


def test_files_of_a_killed_save_are_not_taken_for_a_checkpoint(
    run: Path, tiny_manifest: Manifest
) -> None:
    _, _, checkpoints = build(run, tiny_manifest)
    checkpoints.save_last(1)
    directory = run / "checkpoints" / "last"
    (directory / "ckpt-2.data-00000-of-00001").write_bytes(b"half")  # killed before the state file
    (directory / "ckpt-2.index").write_bytes(b"")
    _, _, again = build(run, tiny_manifest)
    assert again.restore_last() == 1
    again.save_last(2)
    _, _, third = build(run, tiny_manifest)
    assert third.restore_last() == 2


def damage(directory: Path, epoch: int, kind: str) -> None:
    data = directory / f"ckpt-{epoch}.data-00000-of-00001"
    index = directory / f"ckpt-{epoch}.index"
    if kind == "truncated data":
        data.write_bytes(data.read_bytes()[:40])
    elif kind == "empty data":
        data.write_bytes(b"")
    elif kind == "missing index":
        index.unlink()
    else:
        index.write_bytes(b"nonsense")


DAMAGE = ["truncated data", "empty data", "missing index", "other index"]


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_refused(run: Path, tiny_manifest: Manifest, kind: str) -> None:
    _, _, checkpoints = build(run, tiny_manifest)
    checkpoints.save_best(1)
    checkpoints.save_last(1)
    for which in ("best", "last"):
        damage(run / "checkpoints" / which, 1, kind)
    with pytest.raises(InputDataError, match="damaged") as caught:
        restore_model(run)
    assert caught.value.fix
    _, _, again = build(run, tiny_manifest)
    with pytest.raises(InputDataError, match="damaged"):
        again.restore_last()


@pytest.mark.parametrize("kind", DAMAGE)
def test_the_checkpoint_before_a_damaged_one_is_resumed(
    run: Path, tiny_manifest: Manifest, kind: str
) -> None:
    model, optimizers, checkpoints = build(run, tiny_manifest)
    train_a_step(model, optimizers)
    checkpoints.save_last(1)
    before = state(model, optimizers)
    train_a_step(model, optimizers)
    checkpoints.save_last(2)
    damage(run / "checkpoints" / "last", 2, kind)
    other, other_optimizers, again = build(run, tiny_manifest, seed=2)
    told: list[str] = []
    assert again.restore_last(told.append) == 1
    assert again.newest_epoch == 2
    assert "ckpt-2" in told[0]
    for a, b in zip(before, state(other, other_optimizers), strict=True):
        np.testing.assert_array_equal(a, b)
    again.save_last(2)  # the replayed epoch takes the damaged one's place
    _, _, third = build(run, tiny_manifest)
    assert third.restore_last() == 2


def test_an_empty_state_file_is_named(run: Path, tiny_manifest: Manifest) -> None:
    _, _, checkpoints = build(run, tiny_manifest)
    checkpoints.save_best(1)
    checkpoints.save_last(1)
    for which in ("best", "last"):
        (run / "checkpoints" / which / "checkpoint").write_bytes(b"")
    with pytest.raises(InputDataError, match="checkpoints/best/checkpoint"):
        restore_model(run)
    with pytest.raises(InputDataError, match="checkpoints/last/checkpoint"):
        build(run, tiny_manifest)


def test_another_dataset_version_is_refused(run: Path) -> None:
    update_run_card(run, dataset={"manifest_sha256": "0" * 64})
    with pytest.raises(InputDataError, match="not the one"):
        restore_model(run)


def test_an_incomplete_card_is_refused(run: Path) -> None:
    update_run_card(run, config=None)
    with pytest.raises(InputDataError, match="run_card"):
        restore_model(run)

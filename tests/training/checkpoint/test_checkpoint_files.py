from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from conf.artefacts.run import update_run_card
from conf.errors import InputDataError, UpstreamNotReadyError
from conf.manifest import Manifest
from conf.training.train import CheckpointConfig, TrainConfig
from tests.training.checkpoint.conftest import MODEL, state_at, write_checkpoint
from training.checkpoint.checkpoint_files import (
    CheckpointLayout,
    CheckpointMetadata,
    EpochSums,
    Position,
    ResumeState,
    link_checkpoint,
    list_checkpoints,
    prune_checkpoints,
    publish_checkpoint,
    read_checkpoint,
    remove_leftovers,
)
from training.checkpoint.restore import load_run, manifest_sha256

METADATA = CheckpointMetadata(
    ResumeState(Position(2, 5), EpochSums(1 / 3, 0.1, 2.5), 42),
    CheckpointLayout({"b": "model/b", "a": "model/a"}, ("model/w",)),
)


def write(directory: Path) -> Path:
    tensors = {"x": tf.constant([1.5, 2.5]), "n": tf.constant(3)}
    return write_checkpoint(directory, tensors, METADATA)


def test_round_trip(tmp_path: Path) -> None:
    directory = write(tmp_path / "deep" / "c")
    metadata = read_checkpoint(directory)
    assert metadata == METADATA
    assert list(metadata.layout.tables) == ["b", "a"]  # the order is kept
    reader = tf.train.load_checkpoint(str(directory / "state"))
    np.testing.assert_array_equal(reader.get_tensor("x"), [1.5, 2.5])
    assert reader.get_tensor("n") == 3


@pytest.mark.parametrize(
    ("old", "new"), [('"batch": 5', '"batch": 6'), ('"position"', '"place"'), ("{", "[")]
)
def test_a_seal_that_was_edited_is_refused(tmp_path: Path, old: str, new: str) -> None:
    file = write(tmp_path / "c") / "checkpoint.json"
    file.write_text(file.read_text().replace(old, new, 1))
    with pytest.raises(InputDataError, match=r"checkpoint\.json"):
        read_checkpoint(file.parent)


@pytest.mark.parametrize("links", [True, False])
def test_a_second_checkpoint_of_the_same_files(tmp_path: Path, monkeypatch, links: bool) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no links here")

    directory = write(tmp_path / "c")
    if not links:
        monkeypatch.setattr(os, "link", refuse)
    link_checkpoint(directory, tmp_path / "d")
    assert read_checkpoint(tmp_path / "d") == METADATA
    shared = (directory / "state.index").samefile(tmp_path / "d" / "state.index")
    assert shared is links


def put(directory: Path, epoch: int, batch: int) -> Path:
    written = directory.parent / ".writing"
    written.mkdir(parents=True)
    (written / "file").write_text(f"{epoch} {batch}")
    return publish_checkpoint(written, directory, Position(epoch, batch))


def test_entries_are_in_the_order_of_their_positions(tmp_path: Path) -> None:
    directory = tmp_path / "last"
    assert list_checkpoints(directory) == []
    wanted = [Position(0, 9), Position(0, 10), Position(1, 0), Position(123456, 10**10)]
    for position in reversed(wanted):
        put(directory, position.epoch, position.batch)
    (directory / ".00002-000000000.removed").mkdir()
    (directory / "notes").mkdir()
    (directory / "00009-000000000").write_text("a file")
    assert [entry.position for entry in list_checkpoints(directory)] == wanted


def test_prune_keeps_the_newest_that_can_be_read(tmp_path: Path) -> None:
    directory = tmp_path / "last"
    paths = [put(directory, 0, batch) for batch in range(5)]
    again = [put(directory, 0, 1) for _ in range(11)]  # The last one is the newest.
    prune_checkpoints(directory, 2, unreadable=[paths[4], paths[2]])
    assert [entry.path for entry in list_checkpoints(directory)] == [again[-1], paths[3]]
    (tmp_path / ".writing").mkdir()
    remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["last"]


@pytest.fixture
def run(tmp_path: Path, tiny_version: Path, tiny_manifest: Manifest) -> Path:
    config = TrainConfig(dataset=str(tiny_version), name="n", model=MODEL)
    update_run_card(
        tmp_path,
        config=config.resolved(),
        dataset={"path": str(tiny_version), "manifest_sha256": manifest_sha256(tiny_manifest)},
    )
    return tmp_path


def test_restores_best_or_last(
    begin, run: Path, tiny_manifest: Manifest, tiny_version: Path
) -> None:
    training = begin()
    for which in ("best", "last"):
        with pytest.raises(UpstreamNotReadyError, match=f"no {which} checkpoint"):
            load_run(run, which)
    training.save(state_at(1), best=True)
    best = training.model.trainable_variables[0].numpy()
    training.step()
    training.save(state_at(2))
    trained = load_run(run, "best")
    np.testing.assert_array_equal(trained.model.trainable_variables[0].numpy(), best)
    assert trained.run_dir == run
    assert trained.config.model == MODEL
    assert trained.manifest == tiny_manifest
    assert trained.version_dir == tiny_version
    last = load_run(run, "last").model
    for a, b in zip(last.trainable_variables, training.model.trainable_variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_a_damaged_best_checkpoint_is_refused_or_the_one_before_taken(begin, run: Path) -> None:
    training = begin(config=CheckpointConfig(keep_best=2))
    training.save(state_at(1), best=True)
    first = training.model.trainable_variables[0].numpy()
    training.step()
    training.save(state_at(2), best=True)
    older, newer = list_checkpoints(run / "checkpoints" / "best")
    (newer.path / "state.index").unlink()
    restored = load_run(run).model
    np.testing.assert_array_equal(restored.trainable_variables[0].numpy(), first)
    (older.path / "checkpoint.json").write_bytes(b"")
    with pytest.raises(InputDataError, match="damaged"):
        load_run(run)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"dataset": {"manifest_sha256": "0" * 64}}, "not the one"), ({"config": None}, "run_card")],
)
def test_another_dataset_version_or_an_incomplete_card_is_refused(
    run: Path, changes: dict, message: str
) -> None:
    update_run_card(run, **changes)
    with pytest.raises(InputDataError, match=message):
        load_run(run)

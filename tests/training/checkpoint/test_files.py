from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from conf.errors import InputDataError
from training.checkpoint.files import (
    Layout,
    Seal,
    link_checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from training.position import EpochSums, Position, Standing

SEAL = Seal(
    Standing(Position(2, 5), EpochSums(1 / 3, 0.1, 2.5), 42),
    Layout({"b": "model/b", "a": "model/a"}, ("model/w",)),
)


def write(directory: Path) -> Path:
    write_checkpoint(directory, {"x": tf.constant([1.5, 2.5]), "n": tf.constant(3)}, SEAL)
    return directory


def test_round_trip(tmp_path: Path) -> None:
    directory = write(tmp_path / "deep" / "c")
    seal = read_checkpoint(directory)
    assert seal == SEAL
    assert list(seal.layout.tables) == ["b", "a"]  # the order is kept
    reader = tf.train.load_checkpoint(str(directory / "state"))
    np.testing.assert_array_equal(reader.get_tensor("x"), [1.5, 2.5])
    assert reader.get_tensor("n") == 3


def test_the_seal_names_every_file_with_its_size(tmp_path: Path) -> None:
    directory = write(tmp_path / "c")
    content = json.loads((directory / "checkpoint.json").read_text())
    others = {p.name: p.stat().st_size for p in directory.iterdir() if p.suffix != ".json"}
    assert {name: file["bytes"] for name, file in content["files"].items()} == others


def test_a_seal_that_was_edited_is_refused(tmp_path: Path) -> None:
    directory = write(tmp_path / "c")
    file = directory / "checkpoint.json"
    content = json.loads(file.read_text())
    content["standing"]["position"]["batch"] = 6
    file.write_text(json.dumps(content))
    with pytest.raises(InputDataError, match="not what was written"):
        read_checkpoint(directory)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format_version": 2, "fingerprint": ""}'])
def test_a_seal_that_says_too_little_is_refused(tmp_path: Path, text: str) -> None:
    directory = write(tmp_path / "c")
    (directory / "checkpoint.json").write_text(text)
    with pytest.raises(InputDataError, match=r"checkpoint\.json"):
        read_checkpoint(directory)


@pytest.mark.parametrize("links", [True, False])
def test_a_second_checkpoint_of_the_same_files(tmp_path: Path, monkeypatch, links: bool) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no links here")

    directory = write(tmp_path / "c")
    if not links:
        monkeypatch.setattr(os, "link", refuse)
    link_checkpoint(directory, tmp_path / "d")
    assert read_checkpoint(tmp_path / "d") == SEAL
    shared = (directory / "state.index").samefile(tmp_path / "d" / "state.index")
    assert shared is links

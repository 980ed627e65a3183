from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from conf.manifest import Manifest
from training.divergence import (
    Divergence,
    build_divergence_error,
    describe_feature,
    flatten_batch,
    write_divergence,
)
from training.position import Position

BATCH = {
    "price": tf.constant([1.0, np.nan, 3.0]),
    "age": tf.constant([20.0, 30.0, 9e8]),
    "ids": tf.ragged.constant([[1, 2], [], [3]], dtype=tf.int64),
    "tags": tf.SparseTensor([[0, 1], [2, 5]], [np.inf, 2.0], [3, 9]),
    "name": tf.constant([b"a\0", b"", b"bcd\0"]),
    "file": tf.constant([[1, 2], [3, 4], [5, 6]], tf.int64),
}


def test_the_batch_and_what_is_odd_about_it(tmp_path: Path, tiny_manifest: Manifest) -> None:
    where = write_divergence(
        tmp_path, Divergence(Position(1, 4), 17, float("nan")), BATCH, tiny_manifest
    )
    assert where == tmp_path / "diverged"
    summary = json.loads((where / "diverged.json").read_text())
    assert (summary["epoch"], summary["batch"], summary["step"]) == (2, 4, 17)
    assert summary["loss"] == "nan"
    assert summary["non_finite"] == ["price", "tags"]
    assert summary["extreme"] == ["age"]
    assert summary["features"]["price"]["first_rows"] == [1]
    assert (summary["features"]["price"]["min"], summary["features"]["price"]["max"]) == (1, 3)
    assert summary["features"]["ids"]["max"] == 3
    with np.load(where / "batch.npz", allow_pickle=False) as arrays:
        np.testing.assert_array_equal(arrays["price"], [1, np.nan, 3])
        np.testing.assert_array_equal(arrays["file"], [[1, 2], [3, 4], [5, 6]])
        np.testing.assert_array_equal(arrays["ids.row_splits"], [0, 2, 2, 3])
        np.testing.assert_array_equal(arrays["tags.indices"], [[0, 1], [2, 5]])
        text, offsets = arrays["name.bytes"].tobytes(), arrays["name.offsets"]
    names = [text[a:b] for a, b in itertools.pairwise(offsets)]
    assert names == [b"a\0", b"", b"bcd\0"]


def test_a_second_divergence_replaces_the_first(tmp_path: Path, tiny_manifest: Manifest) -> None:
    for step in (3, 5):
        divergence = Divergence(Position(0, step - 1), step, float("inf"))
        where = write_divergence(tmp_path, divergence, {"x": tf.ones([2])}, tiny_manifest)
    assert json.loads((where / "diverged.json").read_text())["step"] == 5


def test_extreme_is_measured_by_what_training_saw(tmp_path: Path, tiny_manifest: Manifest) -> None:
    values = np.array([5.0, 1000.0], np.float32)
    assert describe_feature(values, {})["extreme"] == 0
    assert describe_feature(values, {"mean": 4.0, "std": 2.0})["extreme"] == 1
    assert describe_feature(values, {"mean": 4.0, "std": 0.0})["extreme"] == 0
    seen = replace(tiny_manifest, statistics={"train": {"x": {"mean": 4.0, "std": 2.0}}})
    divergence = Divergence(Position(0, 0), 1, float("nan"))
    where = write_divergence(tmp_path, divergence, {"x": tf.constant(values)}, seen)
    assert json.loads((where / "diverged.json").read_text())["extreme"] == ["x"]


@pytest.mark.parametrize("values", [np.zeros((0, 3), np.float32), np.array([b"x"], object)])
def test_what_has_no_range(values: np.ndarray) -> None:
    assert describe_feature(values, {})["min"] is None


def test_arrays_need_no_pickle() -> None:
    assert all(array.dtype != object for array in flatten_batch(BATCH).values())


def test_the_error_counts_from_one() -> None:
    error = build_divergence_error("loss nan", Position(1, 4))
    assert "epoch 2, at step 5" in error.what
    assert error.exit_code == 5

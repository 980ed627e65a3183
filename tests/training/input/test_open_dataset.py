"""`open_dataset`: what a user's own Keras model trains on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from conf.errors import ConfigError
from conf.manifest import Manifest
from conf.training.input import InputConfig
from tests.training.sequence_dataset import write_sequences
from tests.training.tiny_dataset import TinyConfig, write_tiny_dataset
from training import open_dataset
from training.input.batches import build_train_dataset

ROWS = 780
INPUTS = {"user_id", "gender", "history", "movie_id", "genres"}


def users_of(dataset: tf.data.Dataset) -> list[int]:
    return [user for inputs, *_ in dataset for user in inputs["user_id"].numpy().tolist()]


def bytes_of(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value.numpy().tobytes() for name, value in batch.items()}


def test_the_batches_are_those_of_the_trainer(tiny_version: Path, tiny_manifest: Manifest) -> None:
    config = InputConfig(batch_size=32, shuffle_buffer=300)
    dataset = open_dataset(tiny_version, 32, seed=5, drop_remainder=True, shuffle_buffer=300)
    for epoch in range(2):
        expected = build_train_dataset(tiny_version, tiny_manifest, config, epoch=epoch, seed=5)
        for (inputs, label), batch in zip(dataset, expected, strict=True):
            assert bytes_of({**inputs, "label": label}) == bytes_of(batch)


def test_each_iterator_is_the_next_epoch(tiny_version: Path) -> None:
    dataset = open_dataset(tiny_version, 64, seed=3)
    epochs = [users_of(dataset) for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert len(epochs[0]) == ROWS
    assert users_of(open_dataset(tiny_version, 64, seed=3).repeat(2)) == epochs[0] + epochs[1]
    assert users_of(open_dataset(tiny_version, 64, seed=3, first_epoch=1)) == epochs[1]
    ordered = open_dataset(tiny_version, 64, shuffle=False)
    assert users_of(ordered) == users_of(ordered) != epochs[0]


def test_cardinality_is_known_where_no_row_is_left_out(tiny_version: Path) -> None:
    for drop, batches in ((False, 25), (True, 24)):
        dataset = open_dataset(tiny_version, 32, drop_remainder=drop)
        assert dataset.cardinality().numpy() == batches == len(list(dataset))
    assert open_dataset(tiny_version, 32).repeat().cardinality() == tf.data.INFINITE_CARDINALITY
    kept = open_dataset(tiny_version, 32, filter=[{"feature": "label", "value": 1}])
    assert kept.cardinality() == tf.data.UNKNOWN_CARDINALITY
    assert 0 < len(list(kept)) < 25
    mixed = open_dataset(tiny_version, 32, mix=[{"dataset": str(tiny_version), "weight": 0.4}])
    assert mixed.cardinality().numpy() == len(list(mixed)) == int(24 / 0.6)


@pytest.mark.parametrize("drop", [False, True])
def test_workers_read_other_rows_in_as_many_steps(drop: bool, tmp_path: Path) -> None:
    version = write_tiny_dataset(tmp_path, config=TinyConfig(train_shards=3))
    parts = [open_dataset(version, 16, worker=(i, 2), drop_remainder=drop) for i in range(2)]
    rows = [users_of(part) for part in parts]
    if drop:
        assert len(rows[0]) == len(rows[1]) == 16 * parts[0].cardinality().numpy()
    else:
        assert sorted(rows[0] + rows[1]) == sorted(users_of(open_dataset(version, 16)))
    with pytest.raises(ConfigError):
        open_dataset(version, 16, worker=(2, 2))
    policy = parts[0].options().experimental_distribute.auto_shard_policy
    assert policy == tf.data.experimental.AutoShardPolicy.OFF


def test_features_and_labels_can_be_chosen(tiny_version: Path) -> None:
    inputs = open_dataset(tiny_version, 8, features=["movie_id", "seen"], labels=())
    assert set(inputs.element_spec) == {"movie_id", "seen"}
    inputs, labels = open_dataset(tiny_version, 8, labels=["label", "gender"]).element_spec
    assert set(labels) == {"label", "gender"}
    assert set(inputs) == INPUTS - {"gender"}
    assert set(open_dataset(tiny_version, 8, "catalog").element_spec) == {"movie_id", "genres"}


def test_sequence_examples_with_weights_train_too(tmp_path: Path, tiny_manifest: Manifest) -> None:
    dataset = open_dataset(write_sequences(tmp_path, tiny_manifest), 8)
    inputs, label, weight = dataset.element_spec
    assert inputs["items"] == tf.TensorSpec([None, 3], tf.int64)
    assert inputs["times"] == tf.TensorSpec([None, 4], tf.float32)  # the longest of train
    assert isinstance(inputs["prices"], tf.RaggedTensorSpec)
    assert label == weight == tf.TensorSpec([None], tf.float32)
    for values, target, factor in dataset:
        users = values["user"].numpy()
        np.testing.assert_array_equal(target.numpy(), (users - 2) % 2)
        assert set(factor.numpy().tolist()) <= {1.0, 2.0, 3.0}

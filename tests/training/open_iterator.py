"""Ends while iterators are half read and threads of TensorFlow read ahead, as scripts do."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

from conf.artefacts.dataset import read_manifest
from conf.training.input import InputConfig
from training.embedding.dynamic_table import DynamicTable
from training.embedding.key_mapping import map_keys, plan_keyed_features
from training.embedding.key_space import KeySpace
from training.input.batches import build_train_dataset

MANY = 1 << 40


def open_shards(version: str) -> tf.data.Dataset:
    """Epochs of a version without end."""
    config = InputConfig(batch_size=2, shuffle_buffer=50)
    epoch = build_train_dataset(
        Path(version), read_manifest(Path(version)), config, epoch=0, seed=1, features=("user_id",)
    )
    return epoch.repeat().prefetch(MANY)


def open_keys() -> tf.data.Dataset:
    """Batches without end whose keys are new."""
    table = DynamicTable("key", KeySpace("key"), 8, seed=1)
    keys = tf.data.Dataset.range(MANY).map(lambda n: {"key": tf.range(n * 512, (n + 1) * 512)})
    return map_keys(keys, plan_keyed_features({"key": table}, {"key": table})).prefetch(MANY)


if __name__ == "__main__":
    kind, version = sys.argv[1:]
    iterator = iter(open_shards(version) if kind == "shards" else open_keys())
    assert next(iterator)
    print("done", flush=True)

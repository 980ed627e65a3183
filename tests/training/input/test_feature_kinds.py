"""Record types, list layouts and feature kinds through the whole input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from conf.artefacts.dataset import read_manifest
from conf.manifest import Manifest, SplitInfo
from conf.schema import FeatureSchema, FeatureSpec
from conf.storage.locations import find_path
from conf.training.input import InputConfig
from tests.object_servers import SCHEMES, ObjectServer, upload
from tests.training.sequence_dataset import write_sequences
from tests.training.tiny_dataset import describe_shard, encode_example, write_shard
from training.input.batches import (
    build_eval_dataset,
    build_sparse,
    build_train_dataset,
    input_errors,
)


def train(folder: Path, manifest: Manifest, **config) -> list[dict]:
    own = InputConfig.model_validate(config)
    names = manifest.schema.names
    dataset = build_train_dataset(folder, manifest, own, epoch=0, seed=1, features=names)
    with input_errors(folder, manifest, "train"):
        return list(dataset)


def test_sequence_examples(tmp_path: Path, tiny_manifest: Manifest) -> None:
    write_sequences(tmp_path, tiny_manifest)
    [batch] = build_eval_dataset(tmp_path, read_manifest(tmp_path), "train", 40)
    for row, user in enumerate(batch["user"].numpy().tolist()):
        assert user == row % 7 + 2
        items = [row % 7 * 10 + step for step in range(row % 5)]
        assert batch["items"][row].numpy().tolist() == (items + [0] * 3)[:3]
        assert batch["times"][row].numpy().tolist() == [float(s) for s in range(row % 5)]
    batches = train(tmp_path, read_manifest(tmp_path), batch_size=8)
    assert {tuple(batch["times"].shape) for batch in batches} == {(8, 4)}  # the longest of train


def test_byte_strings_and_fixed_lists(tmp_path: Path, tiny_manifest: Manifest) -> None:
    schema = FeatureSchema(
        (
            FeatureSpec("key", "bytes", "id"),
            FeatureSpec("words", "bytes", "user", shape=(None,), max_len=2, pad_value="-"),
            FeatureSpec("tags", "bytes", "user", shape=(None,)),
            FeatureSpec("dense", "float32", "user", shape=(3,)),
            FeatureSpec("absent", "bytes", "user", pad_value="x"),
        )
    )
    rows = []
    for i in range(10):
        words = [b"w%d" % n for n in range(i % 4)] or None
        rows.append({"key": b"k%d" % i, "words": words, "tags": words, "dense": [i + 0.5] * 3})
    write_shard(tmp_path / "a.tfrecord", rows, schema)
    shard = describe_shard(tmp_path, "a.tfrecord", 10)
    manifest = replace(tiny_manifest, schema=schema, splits=(SplitInfo("train", (shard,)),))
    batches = train(tmp_path, manifest, batch_size=5)
    assert [batch["key"].shape for batch in batches] == [(5,), (5,)]
    for batch in batches:
        assert batch["absent"].numpy().tolist() == [b"x"] * 5
        for row, key in enumerate(batch["key"].numpy().tolist()):
            i = int(key[1:])
            words = [b"w%d" % n for n in range(i % 4)]
            assert batch["words"][row].numpy().tolist() == (words + [b"-"] * 2)[:2]
            assert batch["tags"][row].numpy().tolist() == words
            assert batch["dense"][row].numpy().tolist() == [i + 0.5] * 3


def test_batches_of_like_length_are_padded_to_their_boundary(
    tiny_version: Path, tiny_manifest: Manifest
) -> None:
    batches = train(
        tiny_version, tiny_manifest, batch_size=16, bucket_boundaries=[2, 5], shuffle_buffer=300
    )
    assert len(batches) == 780 // 16
    widths = {batch["history"].shape[1] for batch in batches}
    assert widths == {2, 5, 8}
    assert all(batch["genres"].shape[1] == min(4, batch["history"].shape[1]) for batch in batches)


def test_sparse_rows_are_those_of_tensorflow() -> None:
    ids, weights = [[5, 2], [], [7, 7, 1]], [[0.5, 1.5], [], [1.0, 2.0, 3.0]]
    lists = [FeatureSpec(*names, "user", (None,)) for names in (("i", "int64"), ("w", "float32"))]
    rows = [{"i": i, "w": w} for i, w in zip(ids, weights, strict=True)]
    records = [encode_example(row, FeatureSchema(tuple(lists))) for row in rows]
    spec = tf.io.SparseFeature("i", "w", tf.float32, 9)
    expected = tf.io.parse_example(records, {"s": spec})["s"]
    given, factors, others = (
        tf.ragged.constant(rows, dtype, row_splits_dtype=tf.int64)
        for rows, dtype in ((ids, tf.int64), (weights, tf.float32), (weights[::-1], tf.float32))
    )
    found = build_sparse(given, factors, 9)
    for name in ("indices", "values", "dense_shape"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    with pytest.raises(tf.errors.InvalidArgumentError, match="as many weights as ids"):
        build_sparse(given, others, 9)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_shards_of_a_bucket(
    tmp_path: Path, tiny_manifest: Manifest, scheme: str, server_of: Callable[[str], ObjectServer]
) -> None:
    schema = FeatureSchema((FeatureSpec("f", "int64", "user"),))
    write_shard(tmp_path / "a.tfrecord", [{"f": i} for i in range(100)], schema)
    uri = upload(tmp_path, server_of(scheme).place("shards"))
    shard = describe_shard(tmp_path, "a.tfrecord", 100)
    manifest = replace(tiny_manifest, schema=schema, splits=(SplitInfo("test", (shard,)),))
    batches = list(build_eval_dataset(find_path(uri), manifest, "test", 30))
    found = np.concatenate([batch["f"].numpy() for batch in batches])
    assert found.tolist() == list(range(100))

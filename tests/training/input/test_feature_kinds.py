"""Record types, list layouts and feature kinds through the whole input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from conf.manifest import Manifest, SplitInfo
from conf.schema import FeatureSchema, FeatureSpec
from conf.storage.locations import find_path
from conf.training.input import InputConfig
from tests.object_servers import SCHEMES, ObjectServer, upload
from tests.training.tiny_dataset import describe_shard, write_shard
from training.input.batches import (
    build_eval_dataset,
    build_sparse,
    build_train_dataset,
    read_batches,
)


def feature(values: list) -> tf.train.Feature:
    if isinstance(values[0], bytes):
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
    if isinstance(values[0], float):
        return tf.train.Feature(float_list=tf.train.FloatList(value=values))
    return tf.train.Feature(int64_list=tf.train.Int64List(value=values))


def dataset_of(
    folder: Path, manifest: Manifest, schema: FeatureSchema, records: list[bytes], **change
) -> Manifest:
    with tf.io.TFRecordWriter(str(folder / "a.tfrecord")) as writer:
        for record in records:
            writer.write(record)
    shard = describe_shard(folder, "a.tfrecord", len(records))
    return replace(manifest, schema=schema, splits=(SplitInfo("train", (shard,)),), **change)


def train(folder: Path, manifest: Manifest, **config) -> list[dict]:
    dataset = build_train_dataset(
        folder, manifest, InputConfig.model_validate(config), epoch=0, seed=1
    )
    return list(read_batches(dataset, folder, manifest, "train"))


def test_sequence_examples(tmp_path: Path, tiny_manifest: Manifest) -> None:
    schema = FeatureSchema(
        (
            FeatureSpec("user", "int64", "user", vocabulary_size=9),
            FeatureSpec("items", "int64", "user", shape=(None,), max_len=3, vocabulary_size=99),
            FeatureSpec("times", "float32", "user", shape=(None,)),
        )
    )
    records = []
    for i in range(8):
        example = tf.train.SequenceExample()
        example.context.feature["user"].CopyFrom(feature([i]))
        for step in range(i % 5):
            lists = example.feature_lists.feature_list
            lists["items"].feature.append(feature([i * 10 + step]))
            lists["times"].feature.append(feature([float(step)]))
        records.append(example.SerializeToString())
    manifest = dataset_of(tmp_path, tiny_manifest, schema, records, record_type="SequenceExample")
    [batch] = train(tmp_path, manifest, batch_size=8)
    for row, user in enumerate(batch["user"].numpy().tolist()):
        steps = [user * 10 + step for step in range(user % 5)]
        assert batch["items"][row].numpy().tolist() == (steps + [0] * 3)[:3]
        assert batch["times"][row].numpy().tolist() == [float(s) for s in range(user % 5)]


def test_byte_strings_and_fixed_lists(tmp_path: Path, tiny_manifest: Manifest) -> None:
    schema = FeatureSchema(
        (
            FeatureSpec("key", "bytes", "id"),
            FeatureSpec("words", "bytes", "user", shape=(None,), max_len=2, pad_value="-"),
            FeatureSpec("tags", "bytes", "user", shape=(None,)),
            FeatureSpec("dense", "float32", "user", shape=(3,)),
        )
    )
    records = []
    for i in range(10):
        example = tf.train.Example()
        words = [b"w%d" % n for n in range(i % 4)]
        example.features.feature["dense"].CopyFrom(feature([i + 0.5] * 3))
        example.features.feature["key"].CopyFrom(feature([b"k%d" % i]))
        if words:
            example.features.feature["words"].CopyFrom(feature(words))
            example.features.feature["tags"].CopyFrom(feature(words))
        records.append(example.SerializeToString())
    manifest = dataset_of(tmp_path, tiny_manifest, schema, records)
    dataset = build_train_dataset(
        tmp_path, manifest, InputConfig(batch_size=5), epoch=0, seed=2,
        features=schema.names,
    )  # fmt: skip
    batches = list(dataset)
    assert [batch["key"].shape for batch in batches] == [(5,), (5,)]
    for batch in batches:
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
    records = [
        tf.train.Example(
            features=tf.train.Features(feature={"i": feature(i), "w": feature(w)} if i else {})
        ).SerializeToString()
        for i, w in zip(ids, weights, strict=True)
    ]
    spec = tf.io.SparseFeature("i", "w", tf.float32, 9)
    expected = tf.io.parse_example(records, {"s": spec})["s"]
    found = build_sparse(
        tf.ragged.constant(ids, tf.int64, row_splits_dtype=tf.int64),
        tf.ragged.constant(weights, tf.float32, row_splits_dtype=tf.int64),
        9,
    )
    for name in ("indices", "values", "dense_shape"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))


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

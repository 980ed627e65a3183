"""A small version of SequenceExamples, written by TensorFlow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import tensorflow as tf

from conf.manifest import MANIFEST_FILE, Manifest, SplitInfo
from conf.schema import FeatureSchema, FeatureSpec
from conf.storage.atomic_output import write_text_atomic
from tests.training.tiny_dataset import describe_shard


def write_sequences(folder: Path, manifest: Manifest) -> Path:
    """A version of SequenceExamples with a weight per sample and a list without a bound."""
    schema = FeatureSchema(
        (
            FeatureSpec("user", "int64", "user", vocabulary_size=9),
            FeatureSpec("items", "int64", "user", (None,), max_len=3, vocabulary_size=99),
            FeatureSpec("times", "float32", "user", (None,)),
            FeatureSpec("prices", "float32", "user", (None,)),
            FeatureSpec("label", "float32", "label"),
            FeatureSpec("weight", "float32", "weight"),
        )
    )
    with tf.io.TFRecordWriter(str(folder / "a.tfrecord")) as writer:
        for row in range(40):
            example = tf.train.SequenceExample()
            context = example.context.feature
            context["user"].int64_list.value.append(row % 7 + 2)
            context["label"].float_list.value.append(row % 7 % 2)
            context["weight"].float_list.value.append(1 + row % 3)
            lists = example.feature_lists.feature_list
            for step in range(row % 5):
                lists["items"].feature.add().int64_list.value.append(row % 7 * 10 + step)
                lists["times"].feature.add().float_list.value.append(step)
                lists["prices"].feature.add().float_list.value.append(row)
            writer.write(example.SerializeToString())
    splits = (SplitInfo("train", (describe_shard(folder, "a.tfrecord", 40),)),)
    own = replace(
        manifest, schema=schema, splits=splits, record_type="SequenceExample",
        keys=replace(manifest.keys, weight="weight"), encoder_files=(),
        statistics={"train": {"times": {"length": {"max": 4}}}},
    )  # fmt: skip
    write_text_atomic(folder / MANIFEST_FILE, own.dumps())
    return folder

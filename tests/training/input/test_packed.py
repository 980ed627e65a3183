"""Packed datasets give the batches of the same rows in columns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conf.artefacts.dataset import read_manifest
from conf.manifest import Manifest, SplitInfo
from conf.schema import FeatureSchema, FeatureSpec, plan_slots
from conf.training.input import InputConfig
from tests.datasets import pack_manifest, pack_version
from tests.tfrecord_files import read_records
from tests.training.tiny_dataset import describe_shard, write_shard
from training.input.batches import build_eval_dataset, build_train_dataset
from training.reader.training_data import InputOptions

ROWS = (37, 20, 41)
SCHEMA = FeatureSchema(
    (
        FeatureSpec("user", "int64", "user", vocabulary_size=50),
        FeatureSpec("age", "float32", "user", pad_value=-1.0),
        FeatureSpec("history", "int64", "user", (None,), max_len=4, vocabulary_size=50),
        FeatureSpec("word", "bytes", "context", pad_value=""),
        FeatureSpec("item", "int64", "item"),
        FeatureSpec("bag", "float32", "item", (2,), pad_value=0.5),
        FeatureSpec("tags", "int64", "item", (None,)),
        FeatureSpec("label", "float32", "label"),
        FeatureSpec("weight", "float32", "weight", pad_value=1.0),
        FeatureSpec("note", "bytes", "id", pad_value="none"),
    )
)


def draw_row(rng: np.random.Generator) -> dict[str, Any]:
    row = {
        "user": int(rng.integers(2, 50)),
        "age": float(rng.integers(0, 90)) / 8,
        "history": rng.integers(2, 50, rng.integers(0, 7)).tolist(),
        "word": bytes(rng.integers(0, 256, rng.integers(0, 40)).astype(np.uint8)),
        "bag": rng.random(2).astype(np.float32).tolist(),
        "tags": rng.integers(-5, 5, rng.integers(0, 3)).tolist(),
        "weight": float(rng.integers(1, 9)) / 4,
        "note": b"n" * int(rng.integers(0, 3)),
    }
    present = {name: value for name, value in row.items() if rng.random() > 0.15}
    item = int(rng.integers(-(2**62), 2**62)) >> int(rng.integers(0, 62))
    return {**present, "item": item, "label": float(rng.integers(0, 2))}


@pytest.fixture(scope="module")
def versions(
    tmp_path_factory: pytest.TempPathFactory, tiny_manifest: Manifest
) -> dict[str, tuple[Path, Manifest]]:
    """The same rows in both layouts; most may be absent."""
    rng = np.random.default_rng(0)
    folders = {name: tmp_path_factory.mktemp(name) for name in ("columns", "packed")}
    shards = []
    for number, rows in enumerate(ROWS):
        path = f"train/{number}.tfrecord"
        write_shard(folders["columns"] / path, [draw_row(rng) for _ in range(rows)], SCHEMA)
        shards.append(describe_shard(folders["columns"], path, rows))
    manifest = replace(tiny_manifest, schema=SCHEMA, splits=(SplitInfo("train", tuple(shards)),))
    packed = pack_manifest(manifest, folders["columns"], folders["packed"])
    return {
        "columns": (folders["columns"], manifest),
        "packed": (folders["packed"], Manifest.loads(packed.dumps())),
    }


def plain(dataset: tf.data.Dataset) -> list[dict[str, Any]]:
    """Batches as values that compare bit by bit."""
    batches = []
    for batch in dataset:
        batches.append(
            {
                name: [part.numpy().tobytes() if part.dtype != tf.string else part.numpy().tolist()
                       for part in tf.nest.flatten(value, expand_composites=True)]
                for name, value in batch.items()
            }
        )  # fmt: skip
    return batches


def test_the_two_layouts_are_two(versions):
    version, manifest = versions["packed"]
    record = next(iter(read_records(version / "train/0.tfrecord")))
    features = tf.train.Example.FromString(bytes(record)).features.feature
    assert {"packed.int64", "packed.float", "packed.bytes"} <= set(features)
    assert not {"user", "label"} & set(features)
    assert manifest.layout == "packed"
    assert versions["columns"][1].layout == "columns"


CONFIGS = st.fixed_dictionaries(
    {
        "batch_size": st.integers(1, 40),
        "shuffle_buffer": st.integers(1, 120),
        "interleave_shards": st.integers(1, 3),
    },
    optional={
        "filter": st.sampled_from(
            [
                [{"feature": "age", "op": ">=", "value": 2}],
                [{"feature": "user", "op": "not_in", "value": [1, 3, 7]}],
                [{"feature": "history", "op": ">", "value": 1}],
                [{"feature": "note", "op": "==", "value": "none"}],
            ]
        ),
        "validation": st.just({"hash_of": "item", "share": 0.2}),
        "class_balance": st.just({"feature": "label", "shares": {0: 0.5, 1: 0.5}}),
        "bucket_boundaries": st.just([2]),
        "on_corrupt": st.sampled_from(["fail", "skip_record", "skip_shard"]),
    },
)
CHOICES = st.one_of(st.none(), st.lists(st.sampled_from(SCHEMA.names), min_size=1, unique=True))


def assert_same_batches(versions, config, names, start, seed, is_binary) -> None:
    if "bucket_boundaries" in config and not set(names or SCHEMA.names) & {"history"}:
        del config["bucket_boundaries"]
    options = InputOptions(binary_labels=("label",) if is_binary else ())
    found = []
    resolved = InputConfig.model_validate(config)
    for layout in ("columns", "packed"):
        dataset = build_train_dataset(
            *versions[layout], resolved, epoch=seed, seed=seed, features=names,
            start_batch=start, options=options,
        )  # fmt: skip
        found.append((dataset.element_spec, plain(dataset)))
    assert found[0] == found[1]


DRAWN = st.tuples(CONFIGS, CHOICES, st.integers(0, 3), st.integers(0, 2), st.booleans())


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(DRAWN)
def test_training_batches_are_the_same(versions, drawn):
    assert_same_batches(versions, *drawn)


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(1, 120), CHOICES, st.data())
def test_evaluation_batches_are_the_same(versions, batch_size, names, data):
    ragged = data.draw(st.lists(st.sampled_from(names or SCHEMA.names), unique=True))
    found = []
    for layout in ("columns", "packed"):
        version, manifest = versions[layout]
        dataset = build_eval_dataset(version, manifest, "train", batch_size, names, ragged)
        found.append(plain(dataset))
    assert found[0] == found[1]


def test_workers_and_resumed_epochs_see_the_same(tiny_version, tmp_path):
    version = pack_version(tiny_version, tmp_path / "packed")
    where = ((tiny_version, read_manifest(tiny_version)), (version, read_manifest(version)))
    config = InputConfig(batch_size=32, shuffle_buffer=100)
    for worker in range(2):
        options = InputOptions(worker=(worker, 2))
        columns, packed = (
            plain(build_train_dataset(*at, config, epoch=1, seed=3, start_batch=5, options=options))
            for at in where
        )
        assert columns == packed


def encode(**features: list) -> bytes:
    example = tf.train.Example()
    for name, values in features.items():
        kind = "float_list" if isinstance(values[0], float) else "int64_list"
        getattr(example.features.feature[name.replace("_", ".")], kind).value.extend(values)
    return example.SerializeToString()


GOOD = encode(packed_int64=[1, 2], packed_float=[0.5])
BAD = {
    "short": encode(packed_int64=[1], packed_float=[0.5]),
    "long": encode(packed_int64=[1, 2, 3], packed_float=[0.5]),
    "missing": encode(packed_float=[0.5]),
    "absent": encode(packed_int64=[1, 2], packed_float=[0.5], packed_absent=[3]),
}
REASONS = {
    "short": "'packed.int64' holds 1 values instead of 2",
    "long": "'packed.int64' holds 3 values instead of 2",
    "missing": "'packed.int64' holds 0 values instead of 2",
    "absent": "'packed.absent' names slot 3 of 3",
}


def damaged(folder: Path, manifest: Manifest, bad: bytes) -> tuple[Manifest, int]:
    """A version of one shard with one bad record, and where that begins."""
    specs = ("a", "int64"), ("b", "int64"), ("c", "float32")
    schema = FeatureSchema(tuple(FeatureSpec(name, dtype, "context") for name, dtype in specs))
    with tf.io.TFRecordWriter(str(folder / "0.tfrecord")) as writer:
        for payload in (GOOD, GOOD, bad, GOOD):
            writer.write(payload)
    shard = describe_shard(folder, "0.tfrecord", 4)
    splits = (SplitInfo("train", (shard,)),)
    manifest = replace(manifest, schema=schema, slots=plan_slots(schema), splits=splits)
    return manifest, 2 * (len(GOOD) + 16) + 12


@pytest.mark.parametrize("damage", BAD)
def test_a_mutilated_record_is_damage(tmp_path, tiny_manifest, damage):
    manifest, offset = damaged(tmp_path, tiny_manifest, BAD[damage])

    def read(on_corrupt: str, counts: InputOptions) -> list:
        config = InputConfig.model_validate({"batch_size": 1, "on_corrupt": on_corrupt})
        return plain(
            build_train_dataset(tmp_path, manifest, config, epoch=0, seed=0, options=counts)
        )

    with pytest.raises(tf.errors.OpError, match=REASONS[damage]) as error:
        read("fail", InputOptions())
    assert f"byte offset {offset}" in str(error.value)
    assert "0.tfrecord" in str(error.value)
    options = InputOptions()
    assert len(read("skip_record", options)) == 3
    assert options.counts.totals() == {"bad_records": 1}
    assert options.counts.first_bad == f"{tmp_path}/0.tfrecord, byte offset {offset}"
    options = InputOptions()
    assert read("skip_shard", options) == []
    assert options.counts.totals() == {"shards": 1}


def test_another_kind_of_values_is_refused_as_such(tmp_path, tiny_manifest):
    manifest, _ = damaged(
        tmp_path, tiny_manifest, encode(packed_int64=[1.0, 2.0], packed_float=[0.5])
    )
    config = InputConfig.model_validate({"batch_size": 1, "on_corrupt": "skip_record"})
    dataset = build_train_dataset(tmp_path, manifest, config, epoch=0, seed=0)
    with pytest.raises(tf.errors.OpError, match=r"'packed.int64' holds another kind"):
        list(dataset)

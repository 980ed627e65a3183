from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import tensorflow as tf

from conf.dataset import read_manifest
from conf.errors import InputDataError
from conf.manifest import Manifest
from conf.schema import FeatureSchema, FeatureSpec
from conf.training import InputConfig
from tests.training.one_feature import one_feature
from training.input import build_eval_dataset, build_train_dataset, read_batches
from training.input_errors import carry, input_errors

CONFIG = InputConfig(batch_size=32, shuffle_buffer=100, interleave_shards=2)


@pytest.mark.parametrize("position", [9, 30])  # in the length's checksum, and in the data
def test_one_flipped_byte_names_the_shard(
    tmp_path: Path, tiny_version: Path, position: int
) -> None:
    version = tmp_path / "damaged"
    shutil.copytree(tiny_version, version)
    shard = version / "train" / "part-00002.tfrecord"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2 + position] ^= 1
    shard.write_bytes(content)
    manifest = read_manifest(version)
    dataset = build_train_dataset(version, manifest, CONFIG, epoch=0, seed=0)
    with pytest.raises(InputDataError, match="part-00002") as caught:
        list(read_batches(dataset, version, manifest, "train"))
    assert re.search(r"checksum of the (length|payload).* at byte offset \d+", str(caught.value))
    assert "input.on_corrupt" in caught.value.render()


def test_a_missing_shard_is_named(
    tmp_path: Path, tiny_version: Path, tiny_manifest: Manifest
) -> None:
    version = tmp_path / "damaged"
    shutil.copytree(tiny_version, version)
    (version / "test" / "part-00001.tfrecord").unlink()
    dataset = build_eval_dataset(version, tiny_manifest, "test", 8)
    with pytest.raises(InputDataError, match="part-00001"):
        list(read_batches(dataset, version, tiny_manifest, "test"))


def test_an_absent_value_without_pad_value_names_the_feature(
    tmp_path: Path, tiny_manifest: Manifest
) -> None:
    spec = FeatureSpec("price", "float32", "user")
    manifest = one_feature(tmp_path, tiny_manifest, spec, [{"price": 1.0}, {}])
    dataset = build_eval_dataset(tmp_path, manifest, "test", 2)
    with (
        pytest.raises(InputDataError, match="'price'"),
        input_errors(tmp_path, manifest, "test"),
    ):
        list(dataset)


def test_a_value_of_another_type_names_the_feature(tmp_path: Path, tiny_manifest: Manifest) -> None:
    written = FeatureSpec("price", "int64", "user")
    manifest = one_feature(tmp_path, tiny_manifest, written, [{"price": 1}])
    expected = FeatureSpec("price", "float32", "user", pad_value=0.0)
    manifest = replace(manifest, schema=FeatureSchema((expected,)))
    dataset = build_eval_dataset(tmp_path, manifest, "test", 1)
    with pytest.raises(InputDataError, match="'price'"):
        list(read_batches(dataset, tmp_path, manifest, "test"))


def test_other_errors_pass_through(tiny_version: Path, tiny_manifest: Manifest) -> None:
    with (
        pytest.raises(tf.errors.InvalidArgumentError),
        input_errors(tiny_version, tiny_manifest, "train"),
    ):
        tf.ensure_shape(tf.zeros([2]), [3])


def test_an_error_of_the_input_comes_back_as_it_was(
    tiny_version: Path, tiny_manifest: Manifest
) -> None:
    error = InputDataError("no such thing", received="this")

    def fail() -> None:
        raise carry(error)

    with (
        pytest.raises(InputDataError, match="no such thing") as caught,
        input_errors(tiny_version, tiny_manifest, "train"),
    ):
        tf.py_function(fail, [], [])
    assert caught.value is error

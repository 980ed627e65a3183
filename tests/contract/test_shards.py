"""Every shard reads identically by protobuf, by TensorFlow's parser, by our decoder and trainer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from conf.manifest import Manifest
from conf.schema import FeatureSpec
from conf.training.input import InputConfig
from etl.tfrecord.types.features import WireFeature
from jobs.support.java_runtime import ensure_java
from tests.tfrecord_files import read_file
from training.input.batches import build_eval_dataset, build_train_dataset

SPLITS = ["train", "validation", "test", "catalog", "users"]
Row = dict[str, Any]


@pytest.fixture(scope="module")
def version(built) -> tuple[Path, Manifest]:
    return built[0].version, built[0].manifest


def records(version: Path, manifest: Manifest, split: str) -> list[bytes]:
    files = [str(version / shard.path) for shard in manifest.split(split).shards]
    return list(tf.data.TFRecordDataset(files).as_numpy_iterator())


def by_protobuf(payloads: list[bytes], specs: tuple[FeatureSpec, ...]) -> list[Row]:
    rows = []
    for payload in payloads:
        features = tf.train.Example.FromString(payload).features.feature
        row: Row = {}
        for spec in specs:
            if spec.name not in features:
                row[spec.name] = None
                continue
            kind = {"int64": "int64_list", "float32": "float_list", "bytes": "bytes_list"}
            assert features[spec.name].WhichOneof("kind") == kind[spec.dtype]
            values = list(getattr(features[spec.name], kind[spec.dtype]).value)
            row[spec.name] = values if spec.is_list else values[0]
        assert set(features) <= {spec.name for spec in specs}
        rows.append(row)
    return rows


def by_parse_example(payloads: list[bytes], specs: tuple[FeatureSpec, ...]) -> list[Row]:
    parsed = tf.io.parse_example(
        tf.constant(payloads),
        {spec.name: tf.io.RaggedFeature(tf.as_dtype(spec.dtype)) for spec in specs},
    )
    return [
        {spec.name: _plain(parsed[spec.name][i].numpy().tolist(), spec.is_list) for spec in specs}
        for i in range(len(payloads))
    ]


def _plain(values: list[Any], is_list: bool) -> Any:
    return values if is_list else (values[0] if values else None)


@pytest.mark.parametrize("split", SPLITS)
def test_protobuf_tensorflow_and_our_decoder_agree(version, split):
    directory, manifest = version
    specs = manifest.schema.features
    payloads = records(directory, manifest, split)
    assert len(payloads) == manifest.split(split).rows
    expected = by_protobuf(payloads, specs)
    # A parser of ragged features cannot tell an absent list from an empty one.
    parsed = by_parse_example(payloads, specs)
    assert parsed == [
        {s.name: [] if s.is_list and row[s.name] is None else row[s.name] for s in specs}
        for row in expected
    ]
    wire = [WireFeature(spec.name, spec.dtype, spec.is_list) for spec in specs]
    decoded = [
        row
        for shard in manifest.split(split).shards
        for row in read_file(directory / shard.path, wire).to_pylist()
    ]
    assert decoded == expected


def test_trainer_sees_what_stands_in_the_records(version):
    directory, manifest = version
    expected = by_protobuf(records(directory, manifest, "test"), manifest.schema.features)
    batches = build_eval_dataset(directory, manifest, "test", batch_size=10, ragged=("seen",))
    batch = next(iter(batches))
    order = {tuple(row["seen"]): i for i, row in enumerate(expected)}
    rows = [order[tuple(seen)] for seen in batch["seen"].to_list()]
    assert sorted(rows) == list(range(len(expected)))
    for position, i in enumerate(rows):
        assert batch["user"].numpy()[position] == expected[i]["user"]
        history = expected[i]["history"]
        padded = history + [0] * (3 - len(history))
        np.testing.assert_array_equal(batch["history"].numpy()[position], padded)


def test_each_epoch_sees_every_train_record_once_in_another_order(version):
    directory, manifest = version
    expected = by_protobuf(records(directory, manifest, "train"), manifest.schema.features)
    config = InputConfig(batch_size=1, shuffle_buffer=10)
    orders = []
    for epoch in (0, 1, 0):
        batches = build_train_dataset(directory, manifest, config, epoch=epoch, seed=3)
        orders.append([(int(b["user"][0]), int(b["item"][0])) for b in batches])
    assert sorted(orders[0]) == sorted((row["user"], row["item"]) for row in expected)
    assert orders[0] == orders[2]
    assert sorted(orders[1]) == sorted(orders[0])


PROGRAM = """
import sys
from pyspark.sql import SparkSession

spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
spark.range(5).write.format("tfrecord").mode("overwrite").save(sys.argv[1])
print(spark.read.format("sluice").load(sys.argv[1]).agg({"id": "sum"}).first()[0])
try:
    spark.range(5).write.partitionBy("id").format("tfrecord").mode("append").save(sys.argv[1])
except Exception as error:
    print("refused" if "partitioning" in str(error) else error)
"""


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_stock_session_writes_and_reads_without_a_line_of_ours(tmp_path):
    """As in an environment that is active: Spark starts the `python3` of the path."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    for name in ("PYTHONPATH", "PYSPARK_PYTHON"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "out")],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["10", "refused"], done.stderr[-3000:]


NOT_ACTIVE = """
import sys
from pyspark.sql import SparkSession
from etl.tfrecord import read_tfrecords, register_tfrecord, write_tfrecords

spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
frame, (one, two) = spark.range(5), sys.argv[1:]
print(write_tfrecords(frame, one).shards[0].rows)
try:
    frame.write.format("tfrecord").mode("append").save(two)
except Exception as error:
    print("DATA_SOURCE_NOT_FOUND" in str(error))
register_tfrecord(spark)
frame.write.format("tfrecord").mode("append").save(two)
print(spark.read.format("tfrecord").load(two).count(), read_tfrecords(spark, one).count())
"""


@pytest.mark.slow
def test_an_environment_that_is_not_active_writes_and_reads_once_the_format_is_registered(tmp_path):
    """Where the `python3` of the path is another one."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "bin" / "python3").chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "JAVA_HOME": str(ensure_java()),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    environment.pop("PYSPARK_PYTHON", None)
    done = subprocess.run(
        [sys.executable, "-c", NOT_ACTIVE, str(tmp_path / "one"), str(tmp_path / "two")],
        env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["5", "True", "5", "5"], done.stderr[-3000:]

"""A build in the packed layout holds the records of the other layout, for every reader."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from pydantic import ValidationError

from conf.dataset import read_manifest
from conf.errors import ConfigError
from conf.etl.output import OutputConfig
from etl.build import build_dataset
from etl.conversion.convert import convert_files
from etl.conversion.formats import ConvertOptions
from etl.partition_reuse import check_reusable
from etl.tfrecord.framing import read_records
from jobs.inspect_dataset import inspect
from jobs.inspection.listing import list_summary, render_plain
from jobs.inspection.target import find_target
from jobs.skew import Logged, Recomputed, compare
from tests.etl.logs import build_config, write_logs
from tests.etl.reading import read_split


@pytest.fixture(scope="module")
def packed(spark, tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed")
    config = build_config(write_logs(folder / "logs"), folder / "datasets")
    changes = {"layout": "packed", "parquet": True, "compression": "gzip"}
    output = config.output.model_copy(update=changes)
    return build_dataset(spark, config.model_copy(update={"output": output}))


def test_the_records_are_those_of_the_other_layout(built, packed):
    manifest = read_manifest(packed.version)
    assert manifest.layout == "packed"
    for split in manifest.splits:
        expected = read_split(built[0].version, built[0].manifest, split.name)
        assert read_split(packed.version, manifest, split.name) == expected
    assert manifest.statistics == built[0].manifest.statistics
    assert manifest.label_rate == built[0].manifest.label_rate
    assert manifest.counts == built[0].manifest.counts


def test_one_fixed_length_feature_holds_the_scalars_of_a_type(packed):
    manifest = packed.manifest
    shard = packed.version / manifest.split("train").shards[0].path
    records = [bytes(record) for record in read_records(shard)]
    numbers = [s for s in manifest.slots if s.packed == "packed.int64"]
    assert {s.feature for s in numbers} == {"user", "gender", "item", "rating"}
    spec = {"packed.int64": tf.io.FixedLenFeature([len(numbers)], tf.int64),
            "packed.float": tf.io.FixedLenFeature([1], tf.float32)}  # fmt: skip
    parsed = tf.io.parse_example(records, spec)
    ratings = next(s.offset for s in numbers if s.feature == "rating")
    assert set(parsed["packed.int64"][:, ratings].numpy().tolist()) <= {3, 4, 5}
    features = tf.train.Example.FromString(records[0]).features.feature
    assert set(features) == {"packed.int64", "packed.float", "history", "tags"}


def test_values_that_a_record_lacks_are_marked(packed):
    manifest = packed.manifest
    shard = packed.version / manifest.split("catalog").shards[0].path
    record = bytes(next(iter(read_records(shard))))
    marked = tf.train.Example.FromString(record).features.feature["packed.absent"]
    names = {manifest.slots[number].feature for number in marked.int64_list.value}
    assert "rating" in names
    assert "item" not in names


def test_parquet_holds_the_features_by_name(packed):
    manifest = packed.manifest
    files = [file.path for file in manifest.exports if "/train/" in file.path]
    table = pq.read_table(packed.version / files[0])
    assert table.schema.names == list(manifest.schema.names)
    assert set(table["rating"].to_pylist()) <= {3, 4, 5}


def test_inspect_shows_features_by_name(packed):
    summary = inspect(find_target(str(packed.version)), verify=True, head=1)
    assert summary["layout"] == "packed"
    assert summary["verification"]["ok"]
    assert summary["head"][0]["rating"] in (3, 4, 5)
    shard = packed.version / packed.manifest.split("train").shards[0].path
    assert inspect(find_target(str(shard)), head=1)["head"] == summary["head"]
    text = "".join(render_plain(listing) for listing in list_summary(summary))
    assert "Example, gzip, packed" in text
    assert "packed.int64" in text


def test_shards_convert_to_columns_by_name(built, packed, tmp_path):
    shard = packed.version / packed.manifest.split("train").shards[0].path
    target = tmp_path / "out.parquet"
    rows = convert_files([shard], "tfrecord", target, "parquet", ConvertOptions())
    table = pq.read_table(target)
    assert len(table) == rows
    assert set(table.schema.names) == set(packed.manifest.schema.names) - {"seen"}
    other = built[0].version / built[0].manifest.split("train").shards[0].path
    with pytest.raises(ConfigError, match="different layouts"):
        convert_files([shard, other], "tfrecord", target, "parquet", ConvertOptions())


def test_the_skew_check_reads_either_layout(spark, built, packed):
    recomputed = Recomputed(packed.version, packed.manifest, "train")
    for version in (packed.version, built[0].version):
        report = compare(spark, recomputed, Logged(str(version / "train"), encoded=True))
        assert report.compared == 6
        assert all(skew.mismatched == 0 for skew in report.features)


def test_sequence_examples_keep_their_lists(spark, built, tmp_path):
    config = build_config(write_logs(tmp_path / "logs"), tmp_path / "datasets")
    changes = {"layout": "packed", "record_type": "SequenceExample"}
    output = config.output.model_copy(update=changes)
    result = build_dataset(spark, config.model_copy(update={"output": output}))
    shard = result.version / result.manifest.split("train").shards[0].path
    record = tf.train.SequenceExample.FromString(bytes(next(iter(read_records(shard)))))
    assert set(record.context.feature) == {"packed.int64", "packed.float"}
    assert "history" in record.feature_lists.feature_list
    assert result.manifest.statistics == built[0].manifest.statistics


def test_days_of_another_layout_are_not_kept(built):
    config = built[1]
    output = config.output.model_copy(update={"layout": "packed"})
    with pytest.raises(ConfigError, match="config has changed") as error:
        check_reusable(config.model_copy(update={"output": output}), built[0].manifest)
    assert "output.layout" in str(error.value)


def test_the_connector_writes_columns_alone():
    with pytest.raises(ValidationError, match="layout: packed"):
        OutputConfig(layout="packed", writer="connector")


def test_manifests_of_earlier_releases_have_no_slots(built):
    data = json.loads(built[0].manifest.dumps())
    del data["slots"]
    assert type(built[0].manifest).loads(json.dumps(data)).layout == "columns"

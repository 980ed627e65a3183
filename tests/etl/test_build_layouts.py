"""Whole builds in the packed layout, and of logs without users, without items, with negatives."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from pydantic import ValidationError

from conf.artefacts.dataset import read_manifest
from conf.errors import ConfigError
from conf.etl.output import OutputConfig
from etl.build import build_dataset
from etl.convert import ConvertOptions, convert_files
from etl.versions.base_version import check_reusable
from etl.versions.run_fingerprint import RunRequest
from jobs.inspection.inspect_dataset import inspect
from jobs.inspection.skew import Logged, Recomputed, compare
from jobs.inspection.summary import find_target
from jobs.inspection.summary_tables import list_summary, render_plain
from tests.etl.built_versions import read_split, shard_digests
from tests.etl.logs import IDENTITY, build_config, ctr_config, write_logs
from tests.tfrecord_files import read_records


@pytest.fixture(scope="module")
def packed(spark, tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed")
    config = build_config(write_logs(folder / "logs"), folder / "datasets")
    changes = {"layout": "packed", "parquet": True, "compression": "gzip"}
    output = config.output.model_copy(update=changes)
    return build_dataset(spark, config.model_copy(update={"output": output}))


@pytest.mark.exhaustive
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
    facts = dict(line.split() for line in text.splitlines() if len(line.split()) == 2)
    assert (facts["compression"], facts["layout"]) == ("gzip", "packed")
    assert "packed.int64" in text


def test_shards_convert_to_columns_by_name(built, packed, tmp_path):
    shard = packed.version / packed.manifest.split("train").shards[0].path
    target = tmp_path / "out.parquet"
    rows, _ = convert_files([shard], "tfrecord", target, "parquet", ConvertOptions())
    table = pq.read_table(target)
    assert len(table) == rows
    assert set(table.schema.names) == set(packed.manifest.schema.names) - {"seen"}
    other = built[0].version / built[0].manifest.split("train").shards[0].path
    with pytest.raises(ConfigError, match="different layouts"):
        convert_files([shard, other], "tfrecord", target, "parquet", ConvertOptions())


@pytest.mark.exhaustive
def test_the_skew_check_reads_either_layout(spark, built, packed):
    recomputed = Recomputed(packed.version, packed.manifest, "train")
    for version in (packed.version, built[0].version):
        report = compare(spark, recomputed, Logged(str(version / "train"), encoded=True))
        assert report.compared == 6
        assert all(skew.mismatched == 0 for skew in report.features)


@pytest.mark.exhaustive
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


def write_clicks(folder) -> None:
    lines = [
        f"{i % 3 == 0:d}\t{'' if i % 4 == 0 else i % 6}\t{'' if i % 5 == 0 else f's{i % 7}'}\t"
        f"{'' if i % 2 else f'd{i % 3}'}"
        for i in range(600)
    ]
    (folder / "log.tsv").write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def clicks(spark, tmp_path_factory):
    folder = tmp_path_factory.mktemp("clicks")
    write_clicks(folder)
    config = ctr_config(folder)
    return build_dataset(spark, config), config


def test_rows_without_user_item_or_time_are_samples(clicks):
    result = clicks[0]
    manifest = result.manifest
    assert [split.name for split in manifest.splits] == ["train", "validation", "test"]
    assert sum(manifest.counts.kept.values()) == 600
    keys = manifest.keys
    assert (keys.user, keys.item, keys.history, keys.seen, keys.label) == (*[None] * 4, "label")
    rows = {
        split: read_split(result.version, manifest, split)
        for split in ("train", "validation", "test")
    }
    clicks = sum(row["label"] for split in rows.values() for row in split)
    assert clicks == 200
    with pytest.raises(ConfigError, match="has no item"):
        manifest.require_key("item")


@pytest.mark.exhaustive
def test_samples_are_the_same_however_the_log_is_read(spark, clicks):
    result, config = clicks
    spark.conf.set("spark.sql.files.maxPartitionBytes", "1500")
    try:
        again = build_dataset(spark, config, request=RunRequest(force=True))
    finally:
        spark.conf.unset("spark.sql.files.maxPartitionBytes")
    assert again.is_new
    assert shard_digests(again.version, again.manifest) == shard_digests(
        result.version, result.manifest
    )


@pytest.mark.exhaustive
def test_sessions_with_their_history_have_a_catalogue_and_given_splits(spark, tmp_path):
    (tmp_path / "train.tsv").write_text("".join(f"1 2 {i}\t{3 + i % 4}\n" for i in range(40)))
    (tmp_path / "test.tsv").write_text("2 1\t5\n5\t6\n")
    (tmp_path / "items.tsv").write_text("".join(f"{i}\tc{i % 2}\n" for i in range(50)))
    columns = [
        {"name": "clicks", "type": "list<int64>", "separator": " "},
        {"name": "next", "type": "int64"},
    ]
    category = [{"name": "item", "type": "int64"}, {"name": "category", "type": "string"}]
    config = ctr_config(
        tmp_path,
        sources={
            "train": {"path": "train.tsv", "columns": columns},
            "test": {"path": "test.tsv", "columns": columns},
            "items": {"path": "items.tsv", "key": "item", "columns": category},
        },
        events={"source": "train", "item": "next", "history": "clicks"},
        joins=[{"source": "items", "column": "next"}],
        label=None,
        negatives={"strategy": "uniform", "per_positive": 2, "category": "category"},
        split={"strategy": "given", "test_source": "test", "validation_fraction": 0.3},
        features=[
            {"name": "next", "column": "next", "role": "item"},
            {
                "name": "clicks",
                "column": "clicks",
                "role": "user",
                "max_len": 2,
                "encoding": {"kind": "vocabulary", "name": "next"},
            },
            {"name": "category", "column": "category", "role": "item"},
        ],
    )
    result = build_dataset(spark, config)
    manifest = result.manifest
    assert (manifest.keys.item, manifest.keys.history) == ("next", "clicks")
    kept = manifest.counts.kept
    assert kept["test"] == 2
    assert kept["train"] == 3 * (40 - kept["validation"])
    assert manifest.counts.drawn == {"train": 2 * (40 - kept["validation"])}
    # The log holds the oldest click first, the records the latest.
    tests = {row["next"]: row["clicks"] for row in read_split(result.version, manifest, "test")}
    assert tests == {5: [1, 2], 6: [5]}
    catalog = read_split(result.version, manifest, "catalog")
    assert {row["next"]: row["category"] for row in catalog}[4] == "c0"
    train = read_split(result.version, manifest, "train")
    assert {row["category"] for row in train if row["next"] in (3, 5)} == {"c1"}
    assert sum(row["label"] for row in train) == kept["train"] / 3


@pytest.mark.exhaustive
def test_drawn_negatives_are_records_with_the_features_of_their_item(spark, tmp_path):
    base = build_config(tmp_path, tmp_path).model_dump()
    columns = base["sources"]["ratings"]["columns"]
    for column in columns:
        column["nullable"] = column["name"] == "rating"
    config = build_config(
        write_logs(tmp_path / "logs"),
        tmp_path / "datasets",
        sources=base["sources"],
        label={"column": "rating", "at_least": 1},
        negatives={"strategy": "uniform", "per_positive": 3, "not_seen": "all"},
        weights={"negative": 0.5},
        features=[
            *base["features"],
            {"name": "ts", "column": "ts", "role": "id", "encoding": IDENTITY},
        ],
    )
    result = build_dataset(spark, config)
    manifest = result.manifest
    rows = read_split(result.version, manifest, "train")
    negatives = [row for row in rows if row["label"] == 0]
    # Of the train items 10, 11 and 12, user 1 has met all, 2 not 11, 3 not 12.
    assert {(row["user"], row["item"]) for row in negatives} == {(2, 11), (3, 12)}
    assert manifest.counts.drawn["train"] == len(negatives) == 9
    assert len(rows) == manifest.counts.kept["train"] == 6 + 9
    tags = {11: ["x"], 12: ["y", "z"]}
    for row in negatives:
        assert (row["tags"], row["rating"]) == (tags[row["item"]], None)
        assert (row["weight"], row["sampling_probability"]) == (0.5, 1.0)
    assert {row["weight"] for row in rows if row["label"] == 1} == {1.0}
    assert (manifest.keys.weight, manifest.keys.sampling_probability) == (
        "weight",
        "sampling_probability",
    )
    assert manifest.schema["weight"].role == "weight"

"""The skew check on a built dataset: serving logs of raw columns, and of encoded ones."""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conf.errors import ConfigError
from etl.build import BuildResult, build_dataset
from etl.quality.skew import read_logged, read_split
from jobs.inspection.skew import Logged, app, compare
from jobs.support.run_app import run_app
from tests.etl.logs import build_config, write_logs

# Events of the train split of tests/etl/logs.py, as a server would have logged them.
SERVED = [
    {"user": 1, "gender": "F", "history": [], "item": 10, "tags": ["x", "y"]},
    {"user": 1, "gender": "F", "history": [10], "item": 11, "tags": ["x"]},
    {"user": 3, "gender": "F", "history": [10], "item": 11, "tags": ["x"]},
    {"user": 2, "gender": "F", "history": [], "item": 10, "tags": ["x", "y"]},  # was M
]


def test_raw_columns_are_encoded_as_the_build_did(built, tmp_path):
    result = built[0]
    file = tmp_path / "served.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in SERVED) + "\n")
    report = compare(result.version, "train", Logged(str(file)))
    found = {skew["name"]: skew["mismatched"] for skew in report["features"]}
    assert report["compared"] == 4
    assert found == {"gender": 1, "history": 0, "tags": 0}


def test_encoded_features_are_compared_as_they_are(built):
    result = built[0]
    shards = str(result.version / "train")
    report = compare(result.version, "train", Logged(shards, encoded=True))
    assert report["compared"] == 6
    assert all(skew["mismatched"] == 0 for skew in report["features"])
    with pytest.raises(ConfigError, match="a key must be"):
        compare(result.version, "train", Logged(shards, encoded=True, keys=("history",)))


def test_a_shard_that_the_manifest_does_not_list_is_not_compared(built, tmp_path):
    manifest, version = built[0].manifest, tmp_path / "version"
    shutil.copytree(built[0].version, version)
    train = manifest.split("train")
    shard = version / train.shards[0].path
    shutil.copy(shard, shard.with_name(f"part-9{''.join(shard.suffixes)}"))
    shards = read_split(version, manifest, "train", ("item",))
    assert sum(shard.num_rows for shard in shards) == train.rows


@pytest.fixture(scope="module")
def encoded_by_label(spark, tmp_path_factory) -> BuildResult:
    """A dataset with a target encoding, which train records hold out of fold, and a cross."""
    folder = tmp_path_factory.mktemp("encoded_by_label")
    features = [
        {"name": "user", "column": "user", "role": "user"},
        {"name": "item", "column": "item", "role": "item"},
        {"name": "rate", "column": "item", "role": "item",
         "encoding": {"kind": "target", "name": "item"}},
        {"name": "gender_x_group", "column": "gender", "role": "user",
         "encoding": {"kind": "cross", "crossed_with": ["group"], "buckets": 99}},
    ]  # fmt: skip
    logs = write_logs(folder / "logs")
    config = build_config(logs, folder / "out", features=features, histories=[])
    return build_dataset(spark, config)


def log(folder: Path, *rows: dict) -> str:
    file = folder / "served.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return str(file)


@pytest.mark.exhaustive
def test_what_train_rows_hold_out_of_fold_is_compared_with_another_split(
    encoded_by_label, tmp_path, capsys
):
    result = encoded_by_label
    served = [{"user": 1, "item": 14, "gender": "F", "group": "a"}]
    served += [{"user": 2, "item": 15, "gender": "F", "group": "b"}]  # was M
    logged = Logged(log(tmp_path, *served), keys=("user",))
    report = compare(result.version, "test", logged)
    assert report["compared"] == 2
    found = {skew["name"]: skew["mismatched"] for skew in report["features"]}
    assert found == {"rate": 0, "item": 0, "gender_x_group": 1}
    assert capsys.readouterr().err == ""
    report = compare(result.version, "train", logged)
    assert "rate" not in {skew["name"] for skew in report["features"]}
    assert "rate is not compared: out of fold" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_a_feature_of_which_the_log_has_a_part_is_named_and_left_out(
    encoded_by_label, tmp_path, capsys
):
    result = encoded_by_label
    logged = Logged(log(tmp_path, {"user": 1, "item": 14, "gender": "F"}), keys=("user",))
    report = compare(result.version, "test", logged)
    assert {skew["name"] for skew in report["features"]} == {"item", "rate"}
    assert "gender_x_group is not compared: the log lacks group" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_a_value_that_no_encoder_takes_ends_in_3(encoded_by_label, tmp_path, capsys):
    file = log(tmp_path, {"user": 1, "item": "fourteen"}, {"user": 2, "item": "x"})
    dataset = str(encoded_by_label.version)
    assert run_app(app, ["--dataset", dataset, "--logged", file, "--split", "test"]) == 3
    err = capsys.readouterr().err
    assert "error: " in err
    assert "Traceback" not in err


def test_what_cannot_be_read_is_refused(tmp_path, capsys):
    unknown = tmp_path / "served.xyz"
    unknown.write_text("x")
    with pytest.raises(ConfigError, match="format of the serving log"):
        read_logged(str(unknown), None, {})
    with pytest.raises(ConfigError, match="no such serving log"):
        read_logged(str(tmp_path / "nowhere"), None, {})
    arguments = ["--dataset", str(tmp_path), "--logged", str(unknown), "--format", "csv"]
    assert run_app(app, arguments) == 2
    assert "parquet, json, tfrecord" in capsys.readouterr().err


def test_times_of_parquet_are_milliseconds(tmp_path):
    when = datetime(2020, 1, 1, 0, 0, 0, 500_000, UTC)
    rows = pa.table({"at": [when], "day": [when.date()], "other": ["x"]})
    pq.write_table(rows, tmp_path / "log.parquet")
    found = read_logged(str(tmp_path), None, {"at": pa.null(), "day": pa.null()})
    assert found.to_pylist() == [{"at": 1_577_836_800_500, "day": 1_577_836_800_000}]

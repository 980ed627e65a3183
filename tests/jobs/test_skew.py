"""The skew check on a built dataset: serving logs of raw columns, and of encoded ones."""

from __future__ import annotations

import json

import pytest

from conf.errors import ConfigError
from etl.quality.logged import read_logged
from jobs.cli import run_app
from jobs.skew import Logged, Recomputed, app, compare

# Events of the train split of tests/etl/logs.py, as a server would have logged them.
SERVED = [
    {"user": 1, "gender": "F", "history": [], "item": 10, "tags": ["x", "y"]},
    {"user": 1, "gender": "F", "history": [10], "item": 11, "tags": ["x"]},
    {"user": 3, "gender": "F", "history": [10], "item": 11, "tags": ["x"]},
    {"user": 2, "gender": "F", "history": [], "item": 10, "tags": ["x", "y"]},  # was M
]


def test_raw_columns_are_encoded_as_the_build_did(spark, built, tmp_path):
    result = built[0]
    file = tmp_path / "served.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in SERVED) + "\n")
    recomputed = Recomputed(result.version, result.manifest, "train")
    report = compare(spark, recomputed, Logged(str(file)))
    found = {skew.name: skew.mismatched for skew in report.features}
    assert report.compared == 4
    assert found == {"gender": 1, "history": 0, "tags": 0}


def test_encoded_features_are_compared_as_they_are(spark, built):
    result = built[0]
    recomputed = Recomputed(result.version, result.manifest, "train")
    shards = str(result.version / "train")
    report = compare(spark, recomputed, Logged(shards, encoded=True))
    assert report.compared == 6
    assert all(skew.mismatched == 0 for skew in report.features)
    with pytest.raises(ConfigError, match="a key must be"):
        compare(spark, recomputed, Logged(shards, encoded=True, keys=("history",)))


def test_what_cannot_be_read_is_refused(spark, tmp_path, capsys):
    unknown = tmp_path / "served.xyz"
    unknown.write_text("x")
    with pytest.raises(ConfigError, match="format of the serving log"):
        read_logged(spark, str(unknown))
    with pytest.raises(ConfigError, match="no such serving log"):
        read_logged(spark, str(tmp_path / "nowhere"))
    arguments = ["--dataset", str(tmp_path), "--logged", str(unknown), "--format", "csv"]
    assert run_app(app, arguments) == 2
    assert "parquet, json, tfrecord" in capsys.readouterr().err

"""The whole build on small logs: what is written, what is dropped, what is published."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import tensorflow as tf

from conf.artefacts.dataset import DatasetPaths, read_manifest, resolve_version
from conf.errors import InputDataError, UpstreamNotReadyError
from conf.load import override_config
from etl.build import build_dataset
from etl.versions.publish import hold_lock
from etl.versions.run_fingerprint import RunRequest
from tests.etl.built_versions import read_split, shard_digests
from tests.etl.logs import RATINGS, build_config, write_logs

PARTITIONS = "spark.sql.shuffle.partitions"


def test_every_event_is_accounted_for(built):
    counts = built[0].manifest.counts
    assert counts.read == {"ratings": 14, "users": 4, "items": 7}
    assert counts.dropped == {"duplicate": 1, "unmatched:items": 1, "unmatched:users": 2}
    assert counts.joined == 10
    assert counts.kept == {"train": 6, "validation": 2, "test": 2, "catalog": 3, "users": 3}


def test_events_that_are_given_twice_may_stay(spark, tmp_path):
    config = build_config(write_logs(tmp_path / "logs"), tmp_path / "datasets")
    config = override_config(config, {"events.deduplicate": False}, "of the test")
    counts = build_dataset(spark, config).manifest.counts
    assert counts.dropped == {"unmatched:items": 1, "unmatched:users": 2}
    assert counts.joined == 11


def test_leave_one_out_takes_the_last_events_and_ties_follow_the_file(built):
    version, manifest = built[0].version, built[0].manifest
    test = {row["user"]: row for row in read_split(version, manifest, "test")}
    validation = {row["user"]: row for row in read_split(version, manifest, "validation")}
    # 14 and 15 stand in no train event: out of the vocabulary, since only train is fitted.
    assert {user: row["item"] for user, row in test.items()} == {1: "OOV", 2: "OOV"}
    assert {user: row["item"] for user, row in validation.items()} == {1: "OOV", 2: 12}
    assert test[1]["history"] == ["OOV", 12, 11]
    assert test[1]["seen"] == [10, 11, 12, "OOV"]
    assert validation[1]["history"] == [12, 11, 10]


def test_history_is_strictly_before_the_event_latest_first(built):
    rows = read_split(built[0].version, built[0].manifest, "train")
    by_event = {(row["user"], row["item"]): row for row in rows}
    assert by_event[1, 10]["history"] == []
    assert by_event[1, 11]["history"] == [10]
    assert by_event[1, 12]["history"] == [11, 10]
    assert by_event[3, 11]["history"] == [10]
    assert by_event[1, 10]["tags"] == ["x", "y"]
    assert by_event[1, 12]["label"] == 1.0
    assert by_event[1, 10]["label"] == 0.0
    assert by_event[1, 10]["rating"] == 3
    assert all(row["seen"] is None for row in rows)


def test_vocabularies_hold_train_tokens_by_falling_count(built):
    version = built[0].version
    table = pq.read_table(version / "encoders" / "item.parquet").to_pydict()
    assert table == {"token": [10, 11, 12], "id": [2, 3, 4], "count": [3, 2, 1]}


def test_catalog_and_users_serve_everyone_with_the_latest_history(built):
    version, manifest = built[0].version, built[0].manifest
    catalog = {row["item"]: row["tags"] for row in read_split(version, manifest, "catalog")}
    assert catalog == {10: ["x", "y"], 11: ["x"], 12: ["y", "z"]}
    users = {row["user"]: row for row in read_split(version, manifest, "users")}
    assert set(users) == {1, 2, 3}
    assert users[1]["history"] == ["OOV", "OOV", 12]
    assert users[2]["seen"] == [10, 12, "OOV"]
    assert users[3]["gender"] == "F"


def test_label_rate_and_statistics_are_those_of_the_records(built):
    version, manifest = built[0].version, built[0].manifest
    labels = [row["label"] for row in read_split(version, manifest, "train")]
    assert manifest.label_rate["train"] == pytest.approx(sum(labels) / len(labels))
    assert manifest.statistics["test"]["item"]["oov"] == 2
    assert manifest.statistics["train"]["history"]["rows"] == 6


def test_second_build_gives_the_same_bytes_however_spark_partitions(spark, built):
    result, config = built
    spark.conf.set(PARTITIONS, "3")
    spark.conf.set("spark.sql.files.maxPartitionBytes", "40")
    try:
        again = build_dataset(spark, config, request=RunRequest(force=True))
    finally:
        spark.conf.set(PARTITIONS, "4")
        spark.conf.unset("spark.sql.files.maxPartitionBytes")
    assert again.version != result.version
    assert shard_digests(again.version, again.manifest) == shard_digests(
        result.version, result.manifest
    )
    assert again.manifest.encoders_fingerprint == result.manifest.encoders_fingerprint
    assert resolve_version(Path(config.output.root) / config.name) == again.version


def test_a_session_that_sets_nothing_has_few_partitions_while_a_build_runs(spark, built):
    """And the same bytes as with others."""
    result, config = built
    session = spark.newSession()
    session.conf.unset(PARTITIONS)
    before = session.conf.get(PARTITIONS)
    seen = []
    again = build_dataset(
        session,
        config,
        lambda: seen.append(session.conf.get(PARTITIONS)) or {},
        request=RunRequest(force=True),
    )
    assert {*seen} == {"8"} != {before}
    assert session.conf.get(PARTITIONS) == before
    assert shard_digests(again.version, again.manifest) == shard_digests(
        result.version, result.manifest
    )


def test_refused_build_leaves_the_last_version_current(spark, built, tmp_path):
    _, config = built
    before = resolve_version(Path(config.output.root) / config.name)
    broken = write_logs(tmp_path / "broken", ["1;11;5;200"] * 20)
    changed = config.model_copy(update={"data_dir": str(broken)})
    with pytest.raises(InputDataError, match="20 bad rows of 20"):
        build_dataset(spark, changed)
    base = Path(config.output.root) / config.name
    assert resolve_version(base) == before
    read_manifest(before)
    assert not [p for p in (base / "versions").iterdir() if p.name.startswith(".staging")]


@pytest.mark.exhaustive
def test_empty_split_is_refused(spark, tmp_path):
    config = build_config(write_logs(tmp_path / "logs", RATINGS[:2]), tmp_path / "datasets")
    with pytest.raises(InputDataError, match="split would be empty"):
        build_dataset(spark, config)


def test_repeated_dictionary_key_is_refused(spark, tmp_path):
    logs = write_logs(tmp_path / "logs")
    with (logs / "items.dat").open("a") as handle:
        handle.write("10::z\n")
    config = build_config(logs, tmp_path / "datasets")
    with pytest.raises(InputDataError, match=r"not unique by its key") as refused:
        build_dataset(spark, config)
    assert "10 (2 rows)" in str(refused.value)


def test_second_build_at_the_same_time_is_refused(spark, built):
    config = built[1]
    with (
        hold_lock(DatasetPaths(Path(config.output.root), config.name)),
        pytest.raises(UpstreamNotReadyError, match="another build") as refused,
    ):
        build_dataset(spark, config)
    assert refused.value.exit_code == 4


@pytest.mark.exhaustive
def test_temporal_split_cuts_by_time(spark, tmp_path):
    config = build_config(
        write_logs(tmp_path / "logs"),
        tmp_path / "datasets",
        split={"strategy": "temporal", "validation": 200, "test": 300},
    )
    manifest = build_dataset(spark, config).manifest
    assert manifest.counts.kept["train"] == 4
    assert manifest.counts.kept["validation"] == 2
    assert manifest.counts.kept["test"] == 4


def test_times_are_utc_whatever_the_zone_of_the_session(spark, tmp_path, monkeypatch):
    write_logs(tmp_path, [line.rsplit("::", 1)[0] + "::2026-01-31T00:30:00" for line in RATINGS])
    sources = build_config(tmp_path, tmp_path).model_dump(mode="json")["sources"]
    sources["ratings"]["columns"][3]["type"] = "timestamp"
    events = {"source": "ratings", "user": "user", "item": "item", "time": "ts"}
    config = build_config(tmp_path, tmp_path / "datasets", sources=sources, events=events)
    zone = "spark.sql.session.timeZone"
    spark.conf.set(zone, "Asia/Tokyo")
    try:
        manifest = build_dataset(spark, config).manifest
        assert spark.conf.get(zone) == "Asia/Tokyo"
    finally:
        spark.conf.set(zone, "UTC")
    half_past_midnight = 1_769_819_400_000
    assert manifest.source.event_ts_ms_range == (half_past_midnight, half_past_midnight)


def test_given_split_ranks_the_given_candidates(spark, tmp_path):
    logs = write_logs(tmp_path / "logs")
    (logs / "test.dat").write_text("(1,10)\t12\t13\n(2,11)\t10\t13\n")
    base = build_config(logs, tmp_path / "datasets")
    test_source = {
        "path": "test.dat",
        "format": "pattern",
        "pattern": r"\((\d+),(\d+)\)\t(.*)",
        "columns": [
            {"name": "user", "type": "int64"},
            {"name": "item", "type": "int64"},
            {"name": "negatives", "type": "list<int64>", "separator": "\t"},
        ],
    }
    sources = {**base.model_dump()["sources"], "test": test_source}
    config = build_config(
        logs,
        tmp_path / "datasets",
        sources=sources,
        label=None,
        split={"strategy": "given", "test": "test", "candidates": "negatives"},
        features=[f for f in base.model_dump()["features"] if f["name"] != "rating"],
    )
    result = build_dataset(spark, config)
    rows = {r["user"]: r for r in read_split(result.version, result.manifest, "test")}
    assert rows[1]["item"] == 10
    assert rows[1]["candidates"] == [12, 13]
    assert rows[1]["history"] == ["OOV", 13, 12]
    assert rows[2]["item"] == 11
    # The log has user 1 and item 10 too, and neither has times that would tell which is later.
    assert result.manifest.counts.test_in_log == 1
    (check,) = [c for c in result.manifest.contract if c["rule"].startswith("test events")]
    assert check["received"].startswith("1 of 2 events of 'test' are in 'ratings' too")
    assert result.manifest.keys.candidates == "candidates"


def given_test_source(with_time: bool) -> dict[str, Any]:
    names = ["user", "item", "ts"] if with_time else ["user", "item"]
    columns = [{"name": name, "type": "int64"} for name in names]
    return {"path": "test.dat", "separator": "::", "columns": columns}


@pytest.mark.exhaustive
def test_log_events_from_the_given_test_event_on_are_left_out(spark, tmp_path):
    logs = write_logs(
        tmp_path / "logs", ["1::10::5::100", "1::11::5::200", "1::12::5::900", "1::13::5::150"]
    )
    (logs / "test.dat").write_text("1::13::150\n")
    base = build_config(logs, tmp_path / "datasets").model_dump()
    config = build_config(
        logs,
        tmp_path / "datasets",
        label=None,
        sources={**base["sources"], "test": given_test_source(with_time=True)},
        split={"strategy": "given", "test": "test", "validation": False},
        features=[f for f in base["features"] if f["name"] != "rating"],
    )
    result = build_dataset(spark, config)
    # 11 and 12 come later; the log's own copy of the test event is no train sample either.
    assert result.manifest.counts.dropped == {"after_test": 3}
    (row,) = read_split(result.version, result.manifest, "test")
    assert row["history"] == row["seen"] == [10]


@pytest.mark.exhaustive
def test_without_times_repeats_are_events_and_the_file_is_the_order(spark, tmp_path):
    logs = write_logs(tmp_path / "logs", [f"1::{item}::5::0" for item in (10, 11, 12, 10)])
    base = build_config(logs, tmp_path / "datasets").model_dump()
    config = build_config(logs, tmp_path / "datasets", events={**base["events"], "time": None})
    result = build_dataset(spark, config)
    (row,) = read_split(result.version, result.manifest, "test")
    assert (row["item"], row["history"]) == (10, ["OOV", 11, 10])
    assert result.manifest.counts.dropped == {}


@pytest.mark.exhaustive
def test_label_bound_has_the_precision_of_its_column(spark, tmp_path):
    logs = write_logs(tmp_path / "logs", [f"1::{10 + i}::4.1::{i}" for i in range(5)])
    base = build_config(logs, tmp_path / "datasets").model_dump()
    base["sources"]["ratings"]["columns"][2]["type"] = "float32"
    base["sources"]["ratings"]["columns"][2]["nullable"] = True
    with (logs / "ratings.dat").open("a") as handle:
        handle.write("1::15::::9\n")
    config = build_config(
        logs,
        tmp_path / "data sets",
        sources=base["sources"],
        label=[
            {"column": "rating", "at_least": 4.1},
            {"name": "stars", "column": "rating"},
            {"name": "late", "column": "ts", "at_least": 2},
        ],
    )
    result = build_dataset(spark, config)
    assert set(result.manifest.label_rate.values()) == {1.0}
    labels = [spec.name for spec in result.manifest.schema.by_role("label")]
    assert labels == ["label", "stars", "late"]
    # Times 0 to 3 are train and validation; a label of grades has no rate.
    late = {"train": pytest.approx(1 / 2), "validation": 1.0, "test": 1.0}
    assert result.manifest.label_rates == {"late": late}
    # The row without a rating has one of three labels: the other two are absent features.
    (shard,) = result.manifest.split("test").shards
    (record,) = tf.data.TFRecordDataset(str(result.version / shard.path)).as_numpy_iterator()
    written = tf.train.Example.FromString(record).features.feature
    assert {name for name in labels if name in written} == {"late"}
    assert result.manifest.counts.labelled == {
        "label": {"train": 4, "validation": 1, "test": 0},
        "stars": {"train": 4, "validation": 1, "test": 0},
        "late": {"train": 4, "validation": 1, "test": 1},
    }
    assert result.manifest.counts.dropped == {}


def test_quarantine_stays_inside_the_version(spark, tmp_path):
    root = tmp_path / "data sets %20 é"
    logs = write_logs(tmp_path / "logs", [*RATINGS, "broken"])
    base = build_config(logs, root).model_dump()
    base["sources"]["ratings"]["max_bad_rows"] = 0.5
    built = build_dataset(spark, build_config(logs, root, sources=base["sources"]))
    (file,) = (built.version / "quarantine" / "ratings").glob("part-*")
    row = json.loads(file.read_text())
    assert (row["line"], row["reason"]) == ("broken", "wrong_field_count")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["data sets %20 é", "logs"]


@pytest.mark.exhaustive
def test_nothing_to_train_on_is_refused_and_not_published(spark, tmp_path):
    logs = write_logs(tmp_path / "logs")
    features = build_config(logs, tmp_path).model_dump()["features"]
    encoding = {"kind": "vocabulary", "name": "item", "min_count": 100}
    features[3]["encoding"] = features[2]["encoding"] = encoding
    with pytest.raises(InputDataError, match="vocabulary of the items is empty"):
        build_dataset(spark, build_config(logs, tmp_path / "datasets", features=features))
    assert not (tmp_path / "datasets" / "small" / "CURRENT").exists()


def test_truncated_shard_is_named(built, tmp_path):
    version = tmp_path / "copy"
    shutil.copytree(built[0].version, version)
    shard = built[0].manifest.split("train").shards[0]
    with (version / shard.path).open("r+b") as handle:
        handle.truncate(shard.bytes - 3)
    with pytest.raises(InputDataError, match="truncated") as refused:
        read_manifest(version)
    assert shard.path in str(refused.value)

"""Samples and what serving knows of users and items; and records that a connector writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conf.errors import ConfigError
from conf.etl.build import BuildConfig
from etl.build import build_dataset, check_config
from etl.events.columns import kept
from etl.events.event_log import prepare_events
from etl.records import jvm_connector
from etl.records.samples import build_samples, build_users, served_columns
from etl.versions.run_fingerprint import RunRequest
from tests.etl.built_versions import read_split, without_raw
from tests.etl.logs import (
    behaviour_config,
    build_config,
    change_keys,
    feature,
    memory_source,
    write_logs,
)

ROLLING = [
    {"name": "user_n", "keys": ["user"]},
    {"name": "item_n", "keys": ["item"]},
    {"name": "group_n", "keys": ["group"]},
]


def make(tmp_path, *more: dict[str, Any]) -> BuildConfig:
    config = build_config(tmp_path, tmp_path, rolling=ROLLING)
    features = [one.model_dump() for one in config.features]
    return change_keys(config, {"features": [*features, *more]})


@pytest.mark.parametrize(
    ("column", "role"),
    [
        ("rating", "user"),
        ("ts", "item"),
        ("group_n", "user"),
        ("user_n", "item"),
        ("group", "item"),
        ("history", "item"),
    ],
)
def test_what_only_an_event_knows_is_refused_before_anything_is_read(tmp_path, column, role):
    other = feature("x", column, role, kind="identity")
    with pytest.raises(ConfigError, match="serving has no event") as refused:
        check_config(make(tmp_path, other), RunRequest())
    assert refused.value.received == column


def test_dictionaries_histories_and_counts_by_the_key_alone_are_known(tmp_path):
    config = make(
        tmp_path,
        feature("user_n", "user_n", "user", kind="identity"),
        feature("group", "group", "user", kind="identity"),
        feature("item_n", "item_n", "item", kind="identity"),
        feature("group_n", "group_n", "context", kind="identity"),
    )
    plan = check_config(config, RunRequest())
    assert served_columns(config, plan, "user") == {"gender", "group"}
    assert served_columns(config, plan, "item") == {"tags"}


def test_the_time_of_a_user_is_the_end_of_the_log(spark):
    features = [one.model_dump() for one in behaviour_config().features]
    config = behaviour_config(features=[*features, feature("ts", "ts", "user", kind="identity")])
    plan = check_config(config, RunRequest())
    log = [(1, 5, "view", 0.5, 10), (1, 6, "view", 0.5, 30), (2, 5, "view", 0.5, 20)]
    prepared = prepare_events(config, {"log": memory_source(spark, config, "log", log)}).frame
    rows = build_samples(kept(prepared), config).collect()
    assert sorted((row["user"], row["item"], row["ts"]) for row in rows) == [
        (user, item, at) for user, item, _, _, at in log
    ]
    users = build_users(prepared, config, plan, {}).collect()
    assert {row["user"]: row["ts"] for row in users} == {1: 30, 2: 30}


def connector_config(folder: Path, compression: str | None = None) -> Any:
    output = {"root": str(folder / "datasets"), "shards": 2, "eval_shards": 1,
              "writer": "connector", "compression": compression}  # fmt: skip
    return build_config(write_logs(folder / "logs"), folder / "datasets", output=output)


def test_a_build_without_the_connector_is_refused_before_anything_is_touched(spark, tmp_path):
    with pytest.raises(ConfigError, match="class path") as error:
        build_dataset(spark, connector_config(tmp_path))
    assert jvm_connector.CONNECTOR_PACKAGE in str(error.value)
    assert not (tmp_path / "datasets").exists()


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_its_files_are_placed_counted_and_described(
    spark, built, tmp_path, monkeypatch, compression
):
    monkeypatch.setattr("etl.build.check_connector", lambda _: None)
    monkeypatch.setattr(jvm_connector, "CONNECTOR_CLASS", "sluice")
    monkeypatch.setattr(jvm_connector, "_OPTIONS", {"recordType": "Example"})
    result = build_dataset(spark, connector_config(tmp_path, compression))
    version, theirs = result.version, result.manifest
    ours = built[0].manifest
    assert theirs.statistics == without_raw(ours.statistics)
    for name in ("schema", "label_rate", "counts", "train_counts"):
        assert getattr(theirs, name) == getattr(ours, name), name
    for split, native in zip(theirs.splits, ours.splits, strict=True):
        paths = [shard.path.removesuffix(".gz") for shard in split.shards]
        assert paths == [shard.path for shard in native.shards]
        assert read_split(version, theirs, split.name) == read_split(
            built[0].version, ours, split.name
        )
        for shard, other in zip(split.shards, native.shards, strict=True):
            assert shard.rows == other.rows
            assert compression or shard == other
            assert shard.bytes == (version / shard.path).stat().st_size
    assert not (version / "records").exists()

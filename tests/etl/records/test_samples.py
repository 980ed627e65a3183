"""What serving knows of users and items; what it cannot know is refused beforehand."""

from __future__ import annotations

from typing import Any

import pytest

from conf.errors import ConfigError
from conf.etl.build import BuildConfig
from etl.build import check_config
from etl.events.columns import kept
from etl.events.event_log import prepare_events
from etl.records.samples import build_samples, build_users, served_columns
from etl.versions.run_fingerprint import RunRequest
from tests.etl.logs import behaviour_config, build_config, change_keys, feature, memory_source

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

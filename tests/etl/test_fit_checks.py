"""Columns that encoders are fitted on beside the own one are checked before anything is read."""

from __future__ import annotations

from typing import Any

import pytest

from conf.errors import ConfigError
from etl.features import plan_features
from tests.etl.logs import build_config

ROLLING = [{"name": "item_n", "keys": ["item"]}]
EVENTS = {"source": "ratings", "user": "user", "item": "item"}


def check(tmp_path, encoding: dict[str, Any], column: str = "gender", **changes: Any) -> None:
    feature = {"name": "x", "column": column, "role": "context", "encoding": encoding}
    config = build_config(tmp_path, tmp_path, rolling=ROLLING, history=None)
    data = config.model_dump() | changes
    data["features"] = [*data["features"], feature]
    data["features"] = [f for f in data["features"] if f["name"] != "history"]
    plan_features(type(config).model_validate(data))


@pytest.mark.parametrize(
    "encoding",
    [
        {"kind": "target"},
        {"kind": "target", "label": "rating"},
        {"kind": "target", "label": "item_n"},
        {"kind": "vocabulary", "top_per_group": {"column": "group", "k": 2}},
        {"kind": "vocabulary", "incremental": True, "expire_after_days": 3},
    ],
)
def test_columns_of_the_events_are_there(tmp_path, encoding):
    check(tmp_path, encoding)


@pytest.mark.parametrize(
    ("encoding", "message", "fix"),
    [
        ({"kind": "target", "label": "ratin"}, "`label`", "did you mean 'rating'"),
        ({"kind": "target", "label": "group"}, "`label`", "rating"),
        ({"kind": "target", "label": "tags"}, "`label`", "rating"),
        (
            {"kind": "vocabulary", "top_per_group": {"column": "grup", "k": 2}},
            "`top_per_group.column`",
            "did you mean 'group'",
        ),
        (
            {"kind": "count", "top_per_group": {"column": "tags", "k": 2}},
            "`top_per_group.column`",
            "group",
        ),
    ],
)
def test_others_are_refused_with_the_nearest(tmp_path, encoding, message, fix):
    with pytest.raises(ConfigError, match=message) as refused:
        check(tmp_path, encoding)
    assert fix in refused.value.render()


def test_a_target_needs_a_label_and_an_age_a_time(tmp_path):
    with pytest.raises(ConfigError, match="no label"):
        check(tmp_path, {"kind": "target"}, label=None)
    check(tmp_path, {"kind": "target", "label": "rating"}, label=None)
    ageing = {"kind": "vocabulary", "incremental": True, "expire_after_days": 3}
    with pytest.raises(ConfigError, match="cannot expire"):
        check(tmp_path, ageing, events=EVENTS, rolling=[])


def test_feature_lists_are_features(tmp_path):
    output = {"root": str(tmp_path), "record_type": "SequenceExample"}
    check(tmp_path, {"kind": "hash", "buckets": 9}, output=output | {"feature_lists": ["tags"]})
    with pytest.raises(ConfigError, match="feature_lists") as refused:
        check(tmp_path, {"kind": "hash", "buckets": 9}, output=output | {"feature_lists": ["tag"]})
    assert "did you mean 'tags'" in refused.value.render()

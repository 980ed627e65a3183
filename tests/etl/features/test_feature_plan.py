"""The feature plan and its checks: what a config means before data is read."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from conf.encoders import VocabularySpec
from conf.encoders.bags import Length
from conf.errors import ConfigError
from etl.encoders.fit import build_plan
from etl.events.conditions import condition_columns
from etl.features.plan import made_history_columns, plan_features
from tests.etl.events.test_histories import CONFIG
from tests.etl.logs import behaviour_config, build_config


def feature(name: str, column: str, role: str = "context", /, **encoding: object) -> dict:
    extra = {"encoding": encoding} if encoding else {}
    return {"name": name, "column": column, "role": role, **extra}


BASE = [feature("user", "user", "user"), feature("item", "item", "item")]


def plan(tmp_path, features):
    return plan_features(build_config(tmp_path, tmp_path, features=features))


def test_keys_seen_and_label_follow_from_the_config(tmp_path):
    keys = plan_features(build_config(tmp_path, tmp_path)).keys
    assert (keys.user, keys.item, keys.history) == ("user", "item", "history")
    assert (keys.seen, keys.label, keys.candidates) == ("seen", "label", None)


def test_the_user_is_named_by_what_tells_users_apart(tmp_path):
    hashed = feature("user_hash", "user", "user", kind="hash", buckets=100)
    features = [hashed, feature("own", "user", "user"), feature("item", "item", "item")]
    assert plan(tmp_path, features).keys.user == "own"
    assert plan(tmp_path, [hashed, features[2]]).keys.user == "user_hash"


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ([{"name": "history", "columns": ["ts"]}], "history"),
        ([{"name": "liked", "where": {"column": "rating", "at_least": 4}}], None),
        ([{"name": "late", "window_days": 1}, {"name": "history"}, {"name": "other"}], "history"),
    ],
)
def test_the_history_is_the_first_one_that_leaves_nothing_out(tmp_path, listed, expected):
    lists = [{**feature(history["name"], history["name"], "user", kind="vocabulary", name="item"),
              "max_len": 5} for history in listed]  # fmt: skip
    config = build_config(tmp_path, tmp_path, histories=listed,
                          features=[*BASE, *lists])  # fmt: skip
    assert plan_features(config).keys.history == expected


def test_lists_share_the_vocabulary_of_their_items(tmp_path):
    config = build_config(tmp_path, tmp_path)
    features = plan_features(config)
    names = {v.name: v.columns for v in features.vocabularies}
    assert names == {"user": ("user",), "gender": ("gender",), "item": ("item",), "tags": ("tags",)}
    specs = [VocabularySpec(n, "int64", f"{n}.parquet", 9, "0") for n in names]
    schema = build_plan(features, specs, {}).schema
    assert schema["history"].shared_embedding == schema["item"].shared_embedding == "item"
    assert schema["history"].shape == (None,)
    assert schema["seen"].role == "id"
    assert schema["seen"].vocabulary_size == 9
    assert schema["rating"].vocabulary_size is None
    assert schema["label"].dtype == "float32"


def test_a_length_counts_what_a_list_feature_keeps(tmp_path):
    length = {"role": "context", "encoding": {"kind": "length", "of": "kept"}}
    features = [
        *BASE,
        {**feature("kept", "tags"), "max_len": 3},
        {"name": "own", **length},
        {"name": "more", **length, "max_len": 7},
        {"name": "all", **length, "encoding": {"kind": "length", "of": "tags"}},
    ]
    found = plan(tmp_path, features)
    lengths = [found.feature(name) for name in ("own", "more", "all")]
    assert [(f.column, f.max_len) for f in lengths] == [("tags", 3), ("tags", 7), ("tags", None)]
    specs = [VocabularySpec(v.name, "int64", "f", 9, "0") for v in found.vocabularies]
    schema = build_plan(found, specs, {f.name: Length(f.max_len) for f in lengths}).schema
    for name in ("own", "more", "all"):
        spec = schema[name]
        assert (spec.dtype, spec.shape, spec.vocabulary_size) == ("int64", (), None)


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ([*BASE, feature("x", "gendr")], "did you mean 'gender'"),
        ([*BASE, feature("x", "gender", kind="length", of="gender")], "received: gender: string"),
        ([*BASE, {**feature("x", "tags", kind="length", of="tags"), "length": 2}], "`max_len`"),
        ([*BASE, feature("user", "gender")], "declared twice"),
        ([*BASE, feature("User", "gender")], "received: User, user"),
        ([*BASE, feature("label", "rating", kind="identity")], "the build itself makes"),
        ([*BASE, feature("x", "label")], "cannot have a vocabulary"),
        ([*BASE, feature("x", "gender", kind="vocabulary", name="item")], "two types"),
        ([*BASE, feature("x", "history", kind="vocabulary", name="none")], "no other feature"),
        ([BASE[0], feature("item", "item", "item", kind="identity")], "the item's id"),
    ],
)
def test_contradictions_are_config_errors(tmp_path, features, message):
    with pytest.raises(ConfigError) as refused:
        plan(tmp_path, features)
    assert message in str(refused.value)


def test_vocabulary_has_one_pair_of_limits(tmp_path):
    item = feature("item", "item", "item", kind="vocabulary", min_count=3)
    shared = feature("other", "rating", kind="vocabulary", name="item")
    (found,) = [v for v in plan(tmp_path, [BASE[0], item, shared]).vocabularies if v.name == "item"]
    assert (found.min_count, found.max_size) == (3, None)
    shared["encoding"]["min_count"] = 5
    with pytest.raises(ConfigError, match="different limits"):
        plan(tmp_path, [BASE[0], item, shared])


def test_user_and_item_must_be_features(tmp_path):
    with pytest.raises(ValidationError, match="must encode the event's item column 'item'"):
        build_config(tmp_path, tmp_path, features=[BASE[0]])


ROLLING = [{"name": "item_n", "keys": ["item"]}]
EVENTS = {"source": "ratings", "user": "user", "item": "item"}


def check(tmp_path, encoding: dict[str, Any], column: str = "gender", **changes: Any) -> None:
    feature = {"name": "x", "column": column, "role": "context", "encoding": encoding}
    config = build_config(tmp_path, tmp_path, rolling=ROLLING, histories=[])
    data = config.model_dump() | changes
    data["features"] = [*data["features"], feature]
    data["features"] = [f for f in data["features"] if f["name"] != "history"]
    plan_features(type(config).model_validate(data))


@pytest.mark.parametrize(
    ("encoding", "fix"),
    [
        ({"kind": "target"}, None),
        ({"kind": "vocabulary", "top_per_group": {"grup": 2}}, "mean 'group'"),
    ],
)
def test_columns_of_the_events_are_there_or_the_nearest_is_named(tmp_path, encoding, fix):
    if fix is None:
        check(tmp_path, encoding)
        return
    with pytest.raises(ConfigError, match="no such column of the events") as refused:
        check(tmp_path, encoding)
    assert fix in refused.value.render()


def test_a_target_needs_a_label_and_an_age_a_time(tmp_path):
    with pytest.raises(ConfigError, match="no label"):
        check(tmp_path, {"kind": "target"}, label=None)
    ageing = {"kind": "vocabulary", "incremental": True, "expire_after_days": 3}
    with pytest.raises(ConfigError, match="cannot expire"):
        check(tmp_path, ageing, events=EVENTS, rolling=[])


def test_feature_lists_are_features(tmp_path):
    output = {"root": str(tmp_path), "record_type": "SequenceExample"}
    check(tmp_path, {"kind": "hash", "buckets": 9}, output=output | {"feature_lists": ["tags"]})
    with pytest.raises(ConfigError, match="feature_lists") as refused:
        check(tmp_path, {"kind": "hash", "buckets": 9}, output=output | {"feature_lists": ["tag"]})
    assert "did you mean 'tags'" in refused.value.render()


VOCABULARY = {"kind": "vocabulary"}


def test_each_made_column_has_its_type():
    made = made_history_columns(CONFIG)
    assert made["history"] == made["items"] == "list<int64>"
    assert made["all_action"] == "list<string>"
    assert made["all_price"] == made["clicks_age"] == "list<float32>"
    assert (made["session_id"], made["session_position"]) == ("string", "int64")


def test_what_is_carried_shares_its_columns_vocabulary_or_is_fitted_on_it():
    base = behaviour_config().model_dump()["features"]
    shared = [
        {"name": "all_action", "column": "all_action", "role": "user"},
        {"name": "all", "column": "all", "role": "user", "encoding": VOCABULARY | {"name": "item"}},
    ]
    history = {"name": "all", "columns": ["action"]}
    plan = plan_features(behaviour_config(histories=[history], features=[*base, *shared]))
    found = {v.name: v.columns for v in plan.vocabularies}
    assert found == {"user": ("user",), "item": ("item",), "all_action": ("action",)}
    own = {"name": "action", "column": "action", "role": "context"}
    shared[0]["encoding"] = VOCABULARY | {"name": "action"}
    plan = plan_features(behaviour_config(histories=[history], features=[*base, *shared, own]))
    assert {v.name: v.columns for v in plan.vocabularies}["action"] == ("action",)


def test_behaviours_tell_duplicates_apart():
    assert condition_columns(CONFIG) == ["action"]
    assert condition_columns(behaviour_config()) == []

"""The feature plan: what a config means before any data is read."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from conf.encoders import VocabularySpec
from conf.errors import ConfigError
from etl.encoders.plan import build_plan
from etl.features import plan_features
from tests.etl.logs import build_config


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


def test_lists_share_the_vocabulary_of_their_items(tmp_path):
    config = build_config(tmp_path, tmp_path)
    features = plan_features(config)
    names = {v.name: v.columns for v in features.vocabularies}
    assert names == {"user": ("user",), "gender": ("gender",), "item": ("item",), "tags": ("tags",)}
    specs = [VocabularySpec(n, "int64", f"{n}.parquet", 9, "0") for n in names]
    schema = build_plan(features, specs).schema
    assert schema["history"].shared_embedding == schema["item"].shared_embedding == "item"
    assert schema["history"].shape == (None,)
    assert schema["seen"].role == "id"
    assert schema["seen"].vocabulary_size == 9
    assert schema["rating"].vocabulary_size is None
    assert schema["label"].dtype == "float32"


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ([*BASE, feature("x", "gendr")], "did you mean 'gender'"),
        ([*BASE, feature("user", "gender")], "declared twice"),
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


def test_raw_item_may_stand_before_the_encoded_one(tmp_path):
    raw = feature("raw", "item", "id", kind="identity")
    assert plan(tmp_path, [BASE[0], raw, BASE[1]]).keys.item == "item"


def test_user_and_item_must_be_features(tmp_path):
    with pytest.raises(ValidationError, match="must encode the event's item column 'item'"):
        build_config(tmp_path, tmp_path, features=[BASE[0]])

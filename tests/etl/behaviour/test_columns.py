"""The columns that are made: their types, and the vocabularies that their tokens come from."""

from __future__ import annotations

from etl.behaviour.columns import made_columns
from etl.behaviour.where import behaviour_columns
from etl.features import plan_features
from tests.etl.behaviour.test_histories import CONFIG
from tests.etl.frames import behaviour_config

VOCABULARY = {"kind": "vocabulary"}


def test_each_made_column_has_its_type():
    made = made_columns(CONFIG)
    assert made["history"] == made["items"] == "list<int64>"
    assert made["all_action"] == "list<string>"
    assert made["all_price"] == made["clicks_age"] == "list<float32>"
    assert (made["visit_id"], made["visit_position"]) == ("string", "int64")


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
    assert behaviour_columns(CONFIG) == ["action"]
    assert behaviour_columns(behaviour_config()) == []

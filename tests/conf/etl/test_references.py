"""What one part of a build config says of another is checked before anything is read."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from pydantic import ValidationError

from conf.etl import BuildConfig
from tests.etl.logs import build_config


def change(data: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(data)
    node: Any = changed
    *parents, last = path.split(".")
    for part in parents:
        node = node[int(part)] if isinstance(node, list) else node[part]
    node[int(last) if isinstance(node, list) else last] = value
    return changed


@pytest.fixture
def data(tmp_path) -> dict[str, Any]:
    return build_config(tmp_path, tmp_path).model_dump(mode="json")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("events.time", "tss", "has no column 'tss'"),
        ("events.user", "usr", "has no column 'usr'"),
        ("events.source", "nope", "not declared under `sources`"),
        ("sources.ratings.columns.3.type", "timestamp", "events.time_unit: ms"),
        ("sources.ratings.columns.3.nullable", True, "must not be nullable"),
        ("sources.ratings.columns.0.nullable", True, "must not be nullable"),
        ("sources.ratings.columns.3.type", "string", "must be int64"),
        ("sources.ratings.columns.3.type", "float32", "must be int64"),
        ("joins.0.column", "usr", "not declared"),
        ("joins.0.source", "ratings", "need a `key`"),
        ("sources.users.columns.0.type", "string", "the key 'user' is string"),
        ("sources.users.columns.1.name", "Rating", "already has: rating"),
        ("sources.users.columns.1.name", "seen", "are there already: seen"),
        ("history.name", "rating", "are there already: rating"),
        ("history.name", "label", "are there already"),
        ("label.column", "ratng", "not declared"),
        ("label.column", "user", None),
        ("history.min_len", 99, "drops every sample"),
        ("sources.users.columns.1.minimum", 3, "cannot have bounds"),
        ("sources.users.columns.1.name", "../up", "pattern"),
        ("sources.users.columns.1.name", "a.b", "pattern"),
        ("features.0.name", "my feature", "pattern"),
        ("split.test_fraction", 0.95, "nothing to train on"),
        ("sources.ratings.separator", "", "at least 1"),
    ],
)
def test_each_contradiction_is_named(data, path, value, message):
    changed = change(data, path, value)
    if message is None:
        BuildConfig.model_validate(changed)
        return
    with pytest.raises(ValidationError) as refused:
        BuildConfig.model_validate(changed)
    assert message in str(refused.value)


@pytest.mark.parametrize("name", ["../../up", "a/b", "users.v1", "__x", ""])
def test_source_names_are_plain(data, name):
    data["sources"][name] = data["sources"]["users"]
    with pytest.raises(ValidationError):
        BuildConfig.model_validate(data)


def test_candidates_must_be_lists_of_items(data):
    data["sources"]["test"] = {
        "path": "t",
        "columns": [
            {"name": "user", "type": "int64"},
            {"name": "item", "type": "int64"},
            {"name": "others", "type": "list<string>", "separator": ","},
        ],
    }
    data["split"] = {"strategy": "given", "test_source": "test", "candidates": "others"}
    with pytest.raises(ValidationError, match="it must be list<int64>"):
        BuildConfig.model_validate(data)
    data["sources"]["test"]["columns"][2]["type"] = "list<int64>"
    BuildConfig.model_validate(data)
    data["sources"]["test"]["columns"][0]["name"] = "usr"
    with pytest.raises(ValidationError, match="'test' has no column 'user'"):
        BuildConfig.model_validate(data)

"""What one part of a build config says of another is checked before anything is read."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from pydantic import ValidationError

from conf.etl.build import BuildConfig
from tests.etl.logs import behaviour_config, build_config, columns, ctr_config, log_config


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
        ("events.time", "tss", "'tss' is not declared in 'ratings'; did you mean 'ts'"),
        ("events.source", "nope", "not declared under `sources`"),
        ("split.test", "ratings", "`test` of `strategy: leave_one_out` is left out"),
        ("label", {"column": "rating", "one_of": [5, True]}, "must be a number, not a truth value"),
        ("sources.ratings.columns.3.maximum", float("nan"), "finite"),
        ("sources.ratings.columns.3.nullable", True, "must not be nullable"),
        ("sources.ratings.columns.3.type", "string", "must be int64"),
        ("joins.0.source", "ratings", "need a `key`"),
        ("sources.users.columns.0.type", "string", "the key 'user' is string"),
        ("sources.users.columns.1.name", "Rating", "already has: rating"),
        ("histories.0.name", "rating", "are there already: rating"),
        ("sources.users.columns.1.minimum", 3, "cannot have bounds"),
        ("sources.users.columns.1.name", "../up", "pattern"),
        ("split", {"strategy": "hash", "test": 0.95}, "nothing to train on"),
    ],
)
def test_each_contradiction_is_named(data, path, value, message):
    with pytest.raises(ValidationError) as refused:
        BuildConfig.model_validate(change(data, path, value))
    assert message in str(refused.value)


@pytest.mark.parametrize("name", ["../../up", "a/b", "users.v1", "__x", ""])
def test_source_names_are_plain(data, name):
    data["sources"][name] = data["sources"]["users"]
    with pytest.raises(ValidationError):
        BuildConfig.model_validate(data)


def test_candidates_must_be_lists_of_items(data):
    others = {"name": "others", "type": "list<string>", "separator": ","}
    keys = columns(user="int64", item="int64")
    data["sources"]["test"] = {"path": "t", "columns": [*keys, others]}
    data["split"] = {"strategy": "given", "test": "test", "candidates": "others"}
    with pytest.raises(ValidationError, match="it must be list<int64>"):
        BuildConfig.model_validate(data)
    data["sources"]["test"]["columns"][2]["type"] = "list<int64>"
    BuildConfig.model_validate(data)
    data["sources"]["test"]["columns"][0]["name"] = "usr"
    with pytest.raises(ValidationError, match="'user' is not declared in 'test'"):
        BuildConfig.model_validate(data)


@pytest.mark.parametrize("given", ["test", "validation"])
def test_given_events_have_the_types_of_the_log(data, given):
    log = data["sources"]["ratings"]
    data["sources"]["held_out"] = {**log, "path": "held_out"}
    data["split"] = {"strategy": "given", "test": "held_out", given: "held_out"}
    BuildConfig.model_validate(data)
    for column in ({"name": "rating", "type": "string"}, {"name": "Rating", "type": "float64"}):
        columns = [column if c["name"] == "rating" else c for c in log["columns"]]
        data["sources"]["held_out"]["columns"] = columns
        with pytest.raises(ValidationError) as refused:
            BuildConfig.model_validate(data)
        assert f"{column['name']!r} is {column['type']}, in the log int64" in str(refused.value)
    # What only one of them has is null in the other.
    data["sources"]["held_out"]["columns"].append({"name": "channel", "type": "string"})
    columns[columns.index(column)] = {**column, "name": "stars"}
    BuildConfig.model_validate(data)


SOURCES: dict[str, Any] = {
    **behaviour_config().model_dump()["sources"],
    "state": {
        "path": "state",
        "key": "product",
        "columns": columns(product="int64", since="int64", until="int64?", weight="float32?"),
    },
}
WHERE = {"column": "action", "one_of": ["click"]}
AS_OF = {"source": "state", "column": "item", "valid_from": "since"}
BETWEEN = {**AS_OF, "valid_to": "until"}
RATE = {"name": "r", "keys": ["item"]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"histories": [{"name": "h", "columns": ["pricee"]}]}, "did you mean 'price'"),
        ({"histories": [{"name": "h"}, {"name": "h"}]}, "are there already: h; rename"),
        ({"histories": [{"name": "h", "gaps": "h", "columns": ["age"]}]}, "two columns of"),
        ({"histories": [{"name": "h", "where": {"column": "action"}}]}, "either `one_of`"),
        ({"histories": [{"name": "h", "where": {"column": "action", "one_of": [1]}}]},
         "1 is no value of 'action', which is string"),
        ({"histories": [{"name": "h", "where": {"column": "action", "at_least": 1}}]},
         "'action' is string"),
        ({"histories": [{"name": "h", "within_session": True}]}, "needs `session_gap_minutes`"),
        ({"histories": [{"name": "h", "columns": ["weight"]}], "joins": [AS_OF]}, "may be null"),
        ({"histories": [{"name": "h", "columns": ["until"]}], "joins": [BETWEEN]},
         "'until' is not declared in the log and its dictionaries"),
        ({"rolling": [{**RATE, "keys": ["price"]}]}, "keys are int64 or string"),
        ({"rolling": [{**RATE, "rate": [1, 1]}]}, "needs `where`"),
        ({"rolling": [{**RATE, "rate": [0, 1], "where": WHERE}]}, "greater than 0"),
        ({"rolling": [{**RATE, "window_days": 1, "delay_s": 86400}]}, "leaves nothing"),
        ({"joins": [{**AS_OF, "valid_from": "sinc"}]},
         "'sinc' is not declared in 'state'; did you mean 'since'"),
        ({"joins": [{**AS_OF, "valid_from": "until"}]}, "must not be nullable"),
    ],
)  # fmt: skip
def test_behaviour_references_each_contradiction_is_named(changes, message):
    with pytest.raises(ValidationError) as refused:
        behaviour_config(sources=SOURCES, **changes)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"session_gap_minutes": 30}, "session_gap_minutes"),
        ({"rolling": [RATE]}, "rolling.r"),
        ({"histories": [{"name": "h", "window_days": 1}]}, "histories.h"),
        ({"joins": [AS_OF]}, "joins.state.valid_from"),
    ],
)  # fmt: skip
def test_what_is_measured_in_time_needs_times(changes, part):
    events = {"source": "log", "user": "user", "item": "item"}
    with pytest.raises(ValidationError, match=f"{part} needs event times"):
        behaviour_config(sources=SOURCES, events=events, **changes)
    behaviour_config(sources=SOURCES, events=events, histories=[{"name": "h", "where": WHERE}])


ORDERS = {"source": "orders", "keys": {"user": "buyer"}, "time": "at", "within_hours": 1}
DWELL = {"label": {"column": "dwell", "at_least": 1}}
EXPOSED = {"negatives": {"strategy": "exposure", "per_positive": 1}}
GIVEN = {"strategy": "given", "test": "log", "validation": "log"}
UNIFORM = {"strategy": "uniform", "per_positive": 1}
ITEMS = {"source": "log", "item": "item"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"label": {"column": "dwell", "at_least": 1, "one_of": [2]}}, "received both"),
        ({"label": {"at_least": 1}}, "`column` goes with"),
        ({"label": {"column": "action", "one_of": [1]}}, "received 1"),
        ({"label": {"column": "dwell", "one_of": ["long"]}}, "received 'long'"),
        ({"label": {"conversion": {**ORDERS, "keys": {"user": "by"}}}}, "'by' is not declared"),
        ({"label": {"conversion": {**ORDERS, "keys": {"action": "buyer"}}}},
         "'buyer' is int64 in 'orders'; it must be string"),
        ({"split": {"strategy": "hash", "key": "usr"}}, "split.key: 'usr' is not declared"),
        ({"split": {"key": "user"}}, "`key` goes with"),
        ({"split": {"strategy": "sliding", "train": "3 days"}}, "needs `test`"),
        ({"split": {"train": "3 days"}}, "`train` goes with `strategy: sliding`"),
        ({"split": {"candidates": "others"}}, "`candidates` goes with `strategy: given`"),
        ({"split": {"strategy": "given"}}, "`strategy: given` needs `test`"),
        ({"negatives": {**UNIFORM, "per_positive": 0}}, "greater than or equal to 1"),
        ({"negatives": {**UNIFORM, "alpha": 1}}, "`alpha` goes with"),
        ({"negatives": {**UNIFORM, "within": "action"}}, "in the dictionaries joined on 'item'"),
        (EXPOSED, "needs a label of 0 and 1"),
        ({"down_sampling": 0.5}, "needs a label of 0 and 1"),
        ({"train_samples": "first"}, "'all' or 'last'"),
        ({"train_samples": "last", **DWELL, "down_sampling": 0.5}, "both choose"),
        ({"train_samples": 50, **DWELL, **EXPOSED}, "both choose the rows of train"),
        ({"train_samples": 9, "events": {**ITEMS, "user": "user", "where": "item > 1"}},
         "both choose the rows of train"),
        ({"train_samples": "last", "events": ITEMS, "split": {"strategy": "hash"}},
         "needs events.user"),
        ({"weights": {"by_class": [1, 2]}}, "needs a label"),
        ({"weights": {}}, "weights need"),
        ({"label": {"column": "dwell", "name": "genre"}}, "are there already"),
        ({"events": {"source": "log", "item": "item", "history": "user"}}, "must be list<int64>"),
        ({"most_frequent": [{"name": "actions", "column": "acton"}]},
         "most_frequent.actions.column: 'acton' is not declared"),
        ({"most_frequent": [{"name": "own", "column": "item"}]}, "column is the item itself"),
        ({"events": {"source": "log"}, "most_frequent": [{"name": "a", "column": "action"}]},
         "most_frequent.a is a list for each item: it needs events.item"),
    ],
)  # fmt: skip
def test_sample_references_each_contradiction_is_named(changes, message):
    with pytest.raises(ValidationError) as refused:
        log_config(**changes)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"histories": [{}]}, "need events.user and events.item"),
        ({"seen": True}, "`seen` needs events.user and events.item"),
        ({"split": {}}, "leave_one_out needs events.user; without users use hash"),
        ({"split": {"strategy": "temporal"}}, "split.strategy temporal needs event times"),
        ({"split": {"strategy": "hash", "key": "site"}},
         "split.key: 'site' of 'log' must not be nullable"),
        ({"negatives": {"strategy": "uniform", "per_positive": 1}}, "needs events.item"),
        ({"negatives": {"strategy": "exposure", "per_positive": 1}}, "what was shown together"),
        ({"weights": {"half_life_days": 1}}, "weights.half_life_days needs event times"),
    ],
)  # fmt: skip
def test_rows_without_users_refuse_what_needs_them(tmp_path, changes, message):
    with pytest.raises(ValidationError) as refused:
        ctr_config(tmp_path, **changes)
    assert message in str(refused.value)


def test_rows_without_users_have_no_history_unless_asked(tmp_path):
    config = ctr_config(tmp_path)
    assert (config.histories, config.seen) == ((), False)
    # What was resolved reads back as the same config.
    assert type(config).model_validate(config.resolved()).resolved() == config.resolved()
    log: Any = log_config()
    assert (log.histories[0].name, log.seen) == ("history", True)


def contract(tmp_path, *rules, **settings):
    return build_config(tmp_path, tmp_path, contract={"rules": rules, **settings}).contract


WRONG = [
    ({"kind": "range", "source": "ratings", "column": "ratin", "maximum": 5}, "mean 'rating'"),
    ({"kind": "range", "source": "rating", "column": "rating", "maximum": 5}, "mean 'ratings'"),
    ({"kind": "range", "source": "users", "column": "gender", "maximum": 5}, "not a number"),
    ({"kind": "range", "source": "ratings", "column": "rating"}, "minimum"),
    ({"kind": "range", "feature": "rating", "maximum": 5, "max_rate": 0.1}, "max_rate"),
    ({"kind": "range", "feature": "item", "maximum": 5}, "ids of a vocabulary"),
    ({"kind": "range", "source": "ratings", "maximum": 5}, "`column` and `source`"),
    ({"kind": "domain", "source": "ratings", "column": "rating", "one_of": ["x"]}, "'x'"),
    ({"kind": "domain", "source": "users", "column": "gender", "one_of": ["F", 1]}, "holds 1"),
    ({"kind": "type", "source": "ratings", "column": "rating", "type": "string"}, "int64"),
    ({"kind": "drift", "feature": "item", "metric": "ks"}, "no order"),
    ({"kind": "drift", "feature": "iten"}, "mean 'item'"),
    ({"kind": "drift", "feature": "rating", "split": "trian"}, "mean 'train'"),
    ({"kind": "volume", "minimum": 1}, "`source` or `split`"),
    ({"kind": "volume", "source": "ratings"}, "needs minimum or"),
    ({"kind": "unique", "source": "items", "column": "tags"}, "is a list"),
    ({"kind": "references", "source": "ratings", "column": "item", "dictionary": "ratings"}, "key"),
    ({"kind": "freshness", "source": "users", "column": "group", "maximum": 1}, "number"),
    ({"kind": "unique", "source": "users", "column": "group", "minimum": 1}, "does not read"),
    ({"kind": "domain", "feature": "item"}, "needs one_of"),
    ({"kind": "fresh"}, "freshness"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "message"), WRONG, ids=range(len(WRONG)))
def test_what_does_not_fit_is_refused_before_anything_is_read(tmp_path, rule, message):
    with pytest.raises(ValidationError, match=message):
        contract(tmp_path, rule)


def test_slices_are_features_beside_a_label(tmp_path):
    assert contract(tmp_path, slices=["gender"]).slices == ("gender",)
    with pytest.raises(ValidationError, match="no such feature"):
        contract(tmp_path, slices=["sex"])
    with pytest.raises(ValidationError, match="no label"):
        build_config(tmp_path, tmp_path, label=None, contract={"slices": ["gender"]})

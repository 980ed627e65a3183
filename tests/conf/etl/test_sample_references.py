"""Labels, splits, negatives and weights are checked against the columns before anything is read."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tests.etl.samples_log import ctr_config, log_config

ORDERS = {"source": "orders", "keys": {"user": "buyer"}, "time": "at", "within_hours": 1}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"label": {"column": "dwell"}}, "received none"),
        ({"label": {"column": "dwell", "at_least": 1, "equals": 2}}, "at_least, equals"),
        ({"label": {"at_least": 1}}, "`column` goes with"),
        ({"label": {"column": "action", "at_least": 1}}, "'action' is string"),
        ({"label": {"column": "action", "one_of": [1]}}, "received 1"),
        ({"label": {"column": "dwell", "equals": "long"}}, "received 'long'"),
        ({"label": {"conversion": {**ORDERS, "keys": {"user": "by"}}}}, "'by' is not declared"),
        ({"label": {"conversion": {**ORDERS, "keys": {"action": "buyer"}}}}, "of one type"),
        ({"label": {"conversion": {**ORDERS, "time": "when"}}}, "'when' is not declared"),
        ({"label": {"conversion": {**ORDERS, "source": "sales"}}}, "under `sources`: sales"),
        ({"split": {"strategy": "hash", "key": "usr"}}, "split.key: 'usr' is not declared"),
        ({"split": {"key": "user"}}, "`key` goes with"),
        ({"split": {"strategy": "sliding", "train_days": 3}}, "both"),
        ({"split": {"train_days": 3}}, "both"),
        ({"split": {"strategy": "hash", "leave_out": 2}}, "`leave_out` goes with"),
        ({"split": {"validation_source": "log"}}, "`validation_source` goes with"),
        ({"negatives": {"strategy": "uniform", "per_positive": 0}}, "greater than or equal to 1"),
        (
            {"negatives": {"strategy": "uniform", "per_positive": 1, "alpha": 1}},
            "`alpha` goes with",
        ),
        (
            {"negatives": {"strategy": "uniform", "per_positive": 1, "category": "action"}},
            "'action' is not there; it must be a scalar column",
        ),
        ({"negatives": {"strategy": "exposure", "per_positive": 1}}, "needs a label of 0 and 1"),
        ({"down_sampling": {"rate": 0.5}}, "needs a label of 0 and 1"),
        ({"weights": {"positive": 2}}, "need a label"),
        ({"weights": {"column": "action"}}, "'action' is string"),
        ({"weights": {}}, "weights need"),
        ({"label": {"column": "dwell", "graded": True, "name": "genre"}}, "are there already"),
        ({"events": {"source": "log", "item": "item", "history": "user"}}, "must be list<int64>"),
    ],
)
def test_each_contradiction_is_named(changes, message):
    with pytest.raises(ValidationError) as refused:
        log_config(**changes)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"history": {}}, "`history` needs events.user and events.item"),
        ({"seen": True}, "`seen` needs events.user and events.item"),
        ({"split": {}}, "leave_one_out needs events.user; without users use hash"),
        ({"split": {"strategy": "temporal"}}, "needs events.time"),
        ({"split": {"strategy": "hash", "key": "site"}}, "neither nullable nor a list"),
        ({"negatives": {"strategy": "uniform", "per_positive": 1}}, "needs events.item"),
        ({"negatives": {"strategy": "exposure", "per_positive": 1}}, "what was shown together"),
        ({"weights": {"half_life_days": 1}}, "needs events.time"),
    ],
)
def test_rows_without_users_refuse_what_needs_them(tmp_path, changes, message):
    with pytest.raises(ValidationError) as refused:
        ctr_config(tmp_path, **changes)
    assert message in str(refused.value)


def test_rows_without_users_have_no_history_unless_asked(tmp_path):
    config = ctr_config(tmp_path)
    assert (config.history, config.seen) == (None, False)
    # What was resolved reads back as the same config.
    assert type(config).model_validate(config.resolved()) == config
    log: Any = log_config()
    assert (log.history.name, log.seen) == ("history", True)


def test_drawn_negatives_bring_a_label():
    config = log_config(negatives={"strategy": "uniform", "per_positive": 1})
    assert (config.label_name, config.weight_name) == ("label", None)
    named = log_config(
        label={"column": "dwell", "at_least": 3, "name": "long"}, down_sampling={"rate": 0.5}
    )
    assert (named.label_name, named.weight_name) == ("long", "weight")

"""Histories, sessions, rolling features and as-of joins that cannot be are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tests.etl.frames import behaviour_config, columns

SOURCES: dict[str, Any] = {
    **behaviour_config().model_dump()["sources"],
    "state": {
        "path": "state",
        "key": "product",
        "columns": columns(
            product="int64", since="int64", until="int64?", state="string", weight="float32?"
        ),
    },
}
WHERE = {"column": "action", "one_of": ["click"]}
AS_OF = {"source": "state", "column": "item", "as_of": {"valid_from": "since"}}
RATE = {"name": "r", "keys": ["item"]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"histories": [{"name": "h", "columns": ["pricee"]}]}, "did you mean 'price'"),
        ({"histories": [{"name": "price"}]}, "are there already: price"),
        ({"histories": [{"name": "h"}, {"name": "h"}]}, "are there already: h, h"),
        ({"histories": [{"name": "h", "gaps": {"name": "h"}}]}, "two columns of one name"),
        ({"histories": [{"name": "h", "max_len": 9, "lookback": 8}]}, "below `max_len`"),
        ({"histories": [{"name": "h", "where": {"column": "action"}}]}, "either `one_of`"),
        (
            {"histories": [{"name": "h", "where": {"column": "action", "one_of": [1]}}]},
            "1 is no value of 'action', which is string",
        ),
        (
            {"histories": [{"name": "h", "where": {"column": "action", "at_least": 1}}]},
            "'action' is string",
        ),
        ({"histories": [{"name": "h", "within_session": True}]}, "declares no `sessions`"),
        ({"histories": [{"name": "h", "columns": ["weight"]}], "joins": [AS_OF]}, "may be null"),
        (
            {
                "histories": [{"name": "h", "columns": ["until"]}],
                "joins": [{**AS_OF, "as_of": {"valid_from": "since", "valid_to": "until"}}],
            },
            "has a column 'until'",
        ),
        ({"rolling": [{**RATE, "keys": ["price"]}]}, "keys are int64 or string"),
        ({"rolling": [{**RATE, "rate": {"a": 1, "b": 1}}]}, "needs `where`"),
        ({"rolling": [{**RATE, "rate": {"a": 0, "b": 1}, "where": WHERE}]}, "greater than 0"),
        ({"rolling": [{**RATE, "window_days": 1, "delay_s": 86400}]}, "leaves nothing"),
        ({"joins": [{**AS_OF, "as_of": {"valid_from": "sinc"}}]}, "'sinc'; it is not declared"),
        ({"joins": [{**AS_OF, "as_of": {"valid_from": "until"}}]}, "must not be nullable"),
        ({"joins": [{**AS_OF, "strategy": "salted"}]}, "takes no"),
        ({"joins": [{"source": "state", "column": "item", "salts": 3}]}, "goes with"),
    ],
)
def test_each_contradiction_is_named(changes, message):
    with pytest.raises(ValidationError) as refused:
        behaviour_config(sources=SOURCES, **changes)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"sessions": {}}, "sessions"),
        ({"rolling": [RATE]}, "rolling.r"),
        ({"histories": [{"name": "h", "window_days": 1}]}, "histories.h"),
        ({"joins": [AS_OF]}, "joins.state.as_of"),
    ],
)
def test_what_is_measured_in_time_needs_times(changes, part):
    events = {"source": "log", "user": "user", "item": "item"}
    with pytest.raises(ValidationError, match=f"{part} needs event times"):
        behaviour_config(sources=SOURCES, events=events, **changes)
    behaviour_config(sources=SOURCES, events=events, histories=[{"name": "h", "where": WHERE}])

"""Conditions on events: what would fail at the values of a row is refused by its type."""

from __future__ import annotations

import pytest

from conf.errors import ConfigError
from etl.events.conditions import check_where
from tests.etl.logs import behaviour_config


def check(text: str) -> None:
    events = {"source": "log", "user": "user", "item": "item", "time": "ts"}
    check_where(behaviour_config(events={**events, "where": text}))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("price / item > 0.5", "price / item fails at a divisor of 0; write try_divide"),
        ("abs(user / (item + 1)) > 1 or action = 'buy'", "try_divide"),
        ("user div item = 2", "try_divide"),
        ("user % 10 < 3", "try_mod"),
        ("pmod(user, item) = 1", "try_mod"),
        ("'yes'", "its type is "),
        ("item + 1", "its type is BIGINT"),
        ("itm is not null", "did you mean 'item'"),
        ("item > (", "is no condition"),
        ("count(*) > 1", "take COUNT"),
        ("row_number() over (order by ts) > 1", "take ROW_NUMBER"),
        ("rand() < 0.5", "take RAND"),
        ("action > 5", "action > 5 compares text with a number"),
        ("upper(action) = item", "try_cast"),
        ("item = '5'", "try_cast"),
        ("'2024-01-01' < ts", "try_cast"),
        ("action in ('view', 3)", "try_cast"),
        ("action between 1 and 3", "try_cast"),
        ("price > 1 and nullif(action, 0) is null", "try_cast"),
        ("case action when 1 then true else false end", "try_cast"),
        ("action rlike '('", "do not allow '('"),
        ("not regexp_like(action, '(?P<a>x)')", "a named group is (?<name>…)"),
        ("regexp_extract(action, r'[a', 1) = 'x' and item > 1", "do not allow '[a'"),
        ("split(action, '*')[0] = 'x'", "do not allow '*'"),
    ],
)
def test_what_is_no_condition_or_fails_at_some_values_is_refused_with_what_does_not(text, says):
    with pytest.raises(ConfigError) as refused:
        check(text)
    assert says in refused.value.render()


@pytest.mark.parametrize(
    "text",
    [
        "action = 'buy' or action in ('view', 'click')",
        "action <> 'buy' and price >= 0.7F and item in (1, 2) and user between 1 and 9",
        "try_divide(price, item) > 0.5 and try_mod(user, 10) = 1",
        "try_cast(action as int) > 3 and cast(item as string) = '5'",
        "length(action) > 3 and action like '%a/b%' and action is not null",
        "case when item > 3 then action = 'buy' else false end",
        "coalesce(action, 'x') = 'x' and nullif(item, 0) is null and 'a' < action",
        r"action rlike '^\\(\\d+\\)$' or action regexp r'\[x' or action rlike concat('(', action)",
        "split(action, '[|]')[0] = 'x' and regexp_replace(action, '(?i)a', 'b') = 'b'",
    ],
)
def test_other_conditions_pass(text):
    check(text)

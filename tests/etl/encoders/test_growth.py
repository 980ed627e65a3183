"""Growing vocabularies: a run of days of any content never moves an id."""

from __future__ import annotations

import datetime

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.errors import ConfigError
from etl.encoders.growth import Growth, diff_vocabularies, grow_vocabulary
from etl.encoders.vocabulary import vocabulary_schema

START = datetime.date(2024, 1, 1)


def grow(previous, tokens, day, expire=None, max_size=None, first_id=2):
    growth = Growth(previous, "ts", expire)
    known = growth.known_tokens("string", first_id)
    names = set(known["token"].to_pylist())
    found = pa.table(
        {
            "token": pa.array(tokens, pa.string()),
            "count": pa.array(tokens.values(), pa.int64()),
            "last_seen": pa.array([START + datetime.timedelta(day)] * len(tokens), pa.date32()),
            "is_known": pa.array([token in names for token in tokens], pa.bool_()),
        }
    )
    return grow_vocabulary(found, known, growth, max_size, first_id)


def ids(table):
    return dict(zip(table["token"].to_pylist(), table["id"].to_pylist(), strict=True))


def retired(table):
    return table.filter(table["is_retired"])["token"].to_pylist()


DAYS = st.lists(
    st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 9), min_size=1), max_size=6
)


@settings(deadline=None)
@given(DAYS, st.none() | st.integers(1, 3), st.none() | st.integers(1, 4))
def test_ids_are_never_renumbered_or_reused(days, expire, max_size):
    table, known = None, {}
    for day, tokens in enumerate(days):
        table = grow(table, tokens, day, expire, max_size)
        assert table.schema.equals(vocabulary_schema("string", incremental=True))
        found = ids(table)
        assert found.items() >= known.items()
        assert sorted(found.values()) == list(range(2, 2 + len(found)))
        known = found


def test_new_tokens_come_behind_by_falling_count():
    first = grow(None, {"a": 1, "b": 2}, 0)
    second = grow(first, {"a": 9, "z": 3, "c": 3, "d": 4}, 1)
    assert ids(first) == {"b": 2, "a": 3}
    assert ids(second) == {"b": 2, "a": 3, "d": 4, "c": 5, "z": 6}
    assert second["count"].to_pylist() == [0, 9, 4, 3, 3]


def test_tokens_retire_by_age_and_come_back_to_their_id():
    first = grow(None, {"a": 1, "b": 1}, 0, expire=2)
    second = grow(first, {"b": 1}, 2, expire=2)
    third = grow(second, {"b": 1}, 3, expire=2)
    fourth = grow(third, {"a": 1}, 4, expire=2)
    assert [retired(table) for table in (second, third, fourth)] == [[], ["a"], []]
    assert ids(fourth) == ids(first)
    report = diff_vocabularies("v", third, fourth, 4, "00")
    assert (report.kept, report.added, report.retired, report.revived) == (1, 0, 0, 1)
    assert report.to_json()["examples"]["revived"] == ["a"]


def test_retired_tokens_make_room():
    first = grow(None, {"a": 2, "b": 1}, 0, expire=1, max_size=2)
    assert set(ids(first)) == {"a", "b"}
    assert set(ids(grow(first, {"c": 5, "b": 1}, 1, expire=1, max_size=2))) == {"a", "b"}
    later = grow(first, {"c": 5, "d": 4, "b": 1}, 5, expire=1, max_size=2)
    assert retired(later) == ["a"]
    assert set(ids(later)) == {"a", "b", "c"}


def test_a_plain_vocabulary_may_begin_to_grow():
    plain = pa.table({"token": ["x"], "id": [2], "count": [4]})
    table = grow(plain, {"y": 1}, 3, expire=1)
    assert ids(table) == {"x": 2, "y": 3}
    assert retired(table) == []  # ages from the day it began


def test_what_would_move_ids_is_refused():
    first = grow(None, {"a": 1}, 0)
    with pytest.raises(ConfigError, match="cannot grow"):
        grow(first, {"a": 1}, 1, first_id=12)
    with pytest.raises(ConfigError, match="cannot grow"):
        Growth(first).known_tokens("int64", 2)
    with pytest.raises(ConfigError, match="no time column"):
        Growth(first, None, 5)

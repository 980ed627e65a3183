"""Patterns of Java's are told from others without a Java; what passes, Java and Spark compile."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from pyspark.sql import functions as F

from conf.etl.java_patterns import check_time_pattern, count_groups
from conf.etl.sources import SourceConfig

TIMES = [
    "yyyy-MM-dd", "yyyy-MM-dd'T'HH:mm:ss.SSSXXX", "dd.MM.yyyy", "yyyyMMddHHmmssSSS", "yy/M/d H:m",
    "dd/MMM/yyyy:HH:mm:ss Z", "MMMM d, y G", "h:mm a", "D yyyy", "[yyyy-MM-dd][ HH:mm:ss.SSS]",
    "'o''clock'", "yyyy''MM", "[yyyy/MM/dd][dd.MM.yyyy]", "yyyy年MM月dd日", "HH:mm VV",
    "HH:mm zzzz", "kk:mm OOOO",
]  # fmt: skip
NO_TIMES = [
    "YYYY-MM-dd", "EEE MMM dd HH:mm:ss yyyy", "%Y-%m-%d", "%d/%m/%y %H:%M", "yyyy-MM-ddTHH:mm:ss",
    "yyyy-ww", "uuuu-MM-dd", "e", "F", "Q", "MMMMM", "yyyyyyy", "ddd", "aa", "V", "SSSSSSSSSS",
    "'open", "yyyy]", "yyyy{", "yyyy#", "epoch", "epoch_seconds", "seconds", "A", "n", "B", "p",
]  # fmt: skip
EXPRESSIONS = {
    r"(\d+)::(\d+)": 2, r"(?<user>\w+) \k<user>(?:,(.*))?": 2, r"(\p{L}+|[\p{IsHan}_-]*+)": 1,
    r"[a-z&&[^aeiou]]++": 0, r"\Q[a|b]\E(x)": 1, r"(?i-s:a)(?x) b # of x": None, r"(?x) b #c": None,
    "(?x) b # of x\n (c)": 1, r"(a)(?=b)(?<!ab{1,3})(?>c)": 1, r"[]a][^]\]\x41-\x5a]": 0,
    r"\h\H\R\v\V\X\z\Z\G\b{g}": 0, r"(a{2})?{": None, "|(|)": 1, r"\x{1F600}\u00e9\07\cA": 0,
    "(?P<user>a)": None, "(?P=user)": None, "(?(1)a|b)": None, "(?#c)a": None, "(?a)b": None,
    "(?<user_id>a)": None, "(?<u>a)(?<u>b)": None, r"\k<u>": None, "a**": None, "*a": None,
    "a{,3}": None, "a{b}": None, "{": None, "a{2,1}": None, "a{99999999999}": None, "[]": None,
    "[z-a]": None, r"[a-\d]": None, "[[:alpha:]": None, "[[]": None, r"[\b]": None, r"\y": None,
    r"\N": None, r"\p{Foo}": None, r"\pQ": None, r"\Qa": None, "(a": None, "a)": None, "a)(b": None,
    "a\\": None, r"(?<=(a|b)*)c": None, r"(a)(?<=\1)b": None, r"\0": None, r"\x4": None,
}  # fmt: skip


@pytest.mark.parametrize("written", TIMES)
def test_patterns_of_times_that_spark_parses(written):
    check_time_pattern(written)


@pytest.mark.parametrize("written", NO_TIMES)
def test_others_are_refused_in_a_line(written):
    with pytest.raises(ValueError, match="Spark does not parse") as refused:
        check_time_pattern(written)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "written",
    ["yyyy-mm-dd", "dd/mm/yyyy", "yyyy-MM-dd HH:mm:SS", "yyyy-MM-dd HH:MM:ss", "yyyy-MM-dd hh:mm"],
)
def test_parts_that_make_another_time_are_refused(written):
    with pytest.raises(ValueError, match="timestamp_format"):
        check_time_pattern(written)


def count_or_none(pattern: str) -> int | None:
    try:
        return count_groups(pattern)
    except ValueError:
        return None


@pytest.mark.parametrize(("pattern", "groups"), EXPRESSIONS.items())
def test_groups_of_java_expressions_are_counted_and_others_refused(pattern, groups):
    assert count_or_none(pattern) == groups


PARTS = [
    "a", "z", "0", r"\d", "[", "]", "[^", "(", "(?:", ")", "|", "*", "+", "?", "{2}", "{1,3}", "-",
    "&&", "^", ".", "\\", r"\Q", r"\E", "(?=", "(?<=", "(?<n>", r"\k<n>", "#", r"\1", "(?x)", " ",
    "\n", r"\p{L}", r"\x41", r"\cA", r"\07", "]", ")", r"\R", ",",
]  # fmt: skip


def test_what_passes_compiles_in_java(spark):
    java = spark._jvm.java.util.regex.Pattern

    @settings(max_examples=300)
    @given(
        st.one_of(st.sampled_from([*EXPRESSIONS]), st.lists(st.sampled_from(PARTS)).map("".join))
    )
    def check(pattern: str) -> None:
        groups = count_or_none(pattern)
        if groups is not None:  # Both raise where Java does not compile it.
            assert java.compile(f"^(?:{pattern})$").matcher("").groupCount() == groups
            java.compile(pattern)

    check()


def test_what_passes_parses_times_in_spark(spark):
    formats = [F.try_to_timestamp(F.lit("2024-01-31"), F.lit(written)) for written in TIMES]
    (row,) = spark.range(1).select(*formats).collect()
    assert str(row[0]) == "2024-01-31 00:00:00"


def declare(**changes: Any) -> SourceConfig:
    data = {"path": "a", "columns": [{"name": name, "type": "string"} for name in "ab"]}
    return SourceConfig.model_validate(data | changes)


def test_a_config_is_refused_by_what_java_would_refuse():
    at = {"name": "at", "type": "timestamp"}
    for written in ("epoch_ms", "dd.MM.yyyy"):
        declare(columns=[{**at, "timestamp_format": written}])
    with pytest.raises(ValidationError, match="does not parse 'YYYY'"):
        declare(columns=[{**at, "timestamp_format": "YYYY-MM-dd"}])
    declare(format="pattern", pattern=r"(\w+) (\w+)( more)?")
    with pytest.raises(ValidationError, match=r"a named group is \(\?<name>"):
        declare(format="pattern", pattern=r"(?P<a>\w+) (?P<b>\w+)")
    with pytest.raises(ValidationError, match="1 group for 2 columns"):
        declare(format="pattern", pattern=r"(\w+) (?:\w+)")

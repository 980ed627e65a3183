"""YAML of users: what is too long, too deep, too much or said twice is refused unbuilt."""

from __future__ import annotations

import datetime

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from conf.errors import ConfigError
from conf.yaml_text import MOST_CHARACTERS, MOST_NESTING, MOST_VALUES, dump_yaml, parse_yaml


def build_bomb(levels: int = 30) -> str:
    """Each line stands for nine times the values of the line before."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "\n".join(lines)


MANY = "[" + "x," * MOST_VALUES + "]"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (build_bomb(), "an alias counts as all that it repeats"),
        ("a: &a [1, {b: *a}]", "a value that holds itself"),
        ("a: " + MANY, f"{MOST_VALUES:,} values"),
        ("[" * (MOST_NESTING + 1) + "]" * (MOST_NESTING + 1), f"{MOST_NESTING} levels"),
        ("{a: " * 5000, f"{MOST_NESTING} levels"),
        ("#" * (MOST_CHARACTERS + 1), f"{MOST_CHARACTERS:,} characters"),
        ("a: 1\nb: 2\na: 3", "'a' (line 1, column 1) and again (line 3, column 1)"),
        ("day: 2026-02-30", "cannot read"),
        ("a: " + "9" * 5000, "a number of 5,000 characters"),
        ("a: !!int 0b" + "1" * 500_000, "a number of 500,002 characters"),
        ("a: 1." + "1" * 500_000, "a number of 500,002 characters"),
        ("a: [1", "is not valid YAML"),
        ("!!python/object/apply:os.system [ls]", "is not valid YAML"),
    ],
)
def test_what_may_not_be_is_refused(text: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    load, built = yaml.load, []
    monkeypatch.setattr(yaml, "load", lambda *given, **named: built.append(load(*given, **named)))
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, "build.yaml")
    assert said in str(caught.value)
    assert "build.yaml" in str(caught.value)
    assert built == []


def test_numbers_to_base_60_are_text() -> None:
    many = ":".join(["1"] * (MOST_CHARACTERS // 2 - 10))
    for text in (many, f"!!int {many}", f"!!float {many}.5"):
        assert parse_yaml(f"a: {text}", "a file") == {"a": text.rpartition(" ")[2]}
    found = parse_yaml("[12:30:00, 1:30, 190:20.5, -1:1, 07, 1_000, 0x1F, 1.5, .inf, 2]", "a file")
    assert found == ["12:30:00", "1:30", "190:20.5", "-1:1", 7, 1000, 31, 1.5, float("inf"), 2]


NUMBERS = [
    ("010", 10), ("0o17", 15), ("0x1F", 31), ("-12", -12), ("+3", 3), ("1_000_000", 1_000_000),
    ("1e-5", 1e-5), ("1e5", 1e5), ("1.5E+3", 1500.0), (".5", 0.5), ("3.", 3.0), ("-.inf", -np.inf),
    ("12_3", "12_3"), ("1_00", "1_00"), ("0b11", "0b11"), ("1_000.5", "1_000.5"), ("1e", "1e"),
    ("-0x1F", "-0x1F"), ("+-3", "+-3"), ("e5", "e5"), ("yes", True), ("off", False), ("~", None),
    ("2026-01-31", datetime.date(2026, 1, 31)), ("'7'", "7"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "value"), NUMBERS)
def test_numbers_are_those_of_yaml_1_2_and_other_words_as_ever(text: str, value: object) -> None:
    found = parse_yaml(f"a: {text}", "a file")["a"]
    assert (found, type(found)) == (value, type(value))


def test_what_is_written_is_read_back_as_text_where_it_was_text() -> None:
    texts = [text for text, _ in NUMBERS] + ["08", "1e5\n", "12:30", "null", ""]
    value = {"texts": texts, "numbers": [1e-5, 1e300, 7, -0.0, float("inf")], "is_on": True}
    assert parse_yaml(dump_yaml(value), "a file") == value


def test_aliases_merges_and_equal_keys_of_other_mappings_may_be() -> None:
    text = "base: &b {a: 1, c: 2}\nx: {<<: *b, a: 3}\ny: [*b, {a: 1}, {a: 2}]\n? [a, b]\n: 1"
    with pytest.raises(ConfigError, match="is not valid YAML"):  # A list is no key in Python.
        parse_yaml(text, "a file")
    found = parse_yaml(text.partition("?")[0], "a file")
    base = {"a": 1, "c": 2}
    assert found == {"base": base, "x": {"a": 3, "c": 2}, "y": [base, {"a": 1}, {"a": 2}]}


TEXT = st.text("ab1 <&*:#-é'\n", max_size=6)
DRAWN = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner),
    max_leaves=20,
)


@given(DRAWN, st.sampled_from([True, False, None]))
def test_what_a_writer_of_yaml_has_written_is_read(value: object, flow: bool | None) -> None:
    text = yaml.safe_dump(value, default_flow_style=flow, allow_unicode=True)
    assert parse_yaml(text, "a file") == value

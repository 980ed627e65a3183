"""Keys of lists as people and programs write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.errors import InputDataError
from conf.key_lists import KeyList, clean_key, describe_unmatched


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("a", "a"), (" a\t", "a"), ("\ufeffa", "a"), ("\ufeff \"a\" ", "a"), ('"a b"', "a b"),
        ('" a "', " a "), ('"say ""hi"""', 'say "hi"'), ('"', '"'), ('""', ""), ("'a'", "'a'"),
        ('5" pipe', '5" pipe'), ("007", "007"), ("a,b", "a,b"), ("", ""),
    ],
)  # fmt: skip
def test_what_stands_around_a_key_is_no_part_of_it(text: str, key: str) -> None:
    assert clean_key(text) == key


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_line_is_what_editors_call_one(tmp_path: Path, end: str) -> None:
    file = tmp_path / "keys.txt"
    file.write_bytes(end.join(["\ufeffa", "", " ", "b\u2028c", "d"]).encode())
    assert KeyList.read(file).keys == ("a", "b\u2028c", "d")


def test_a_key_twice_names_both_lines(tmp_path: Path) -> None:
    file = tmp_path / "keys.txt"
    file.write_text('a\n\nb\n "a"\n')
    with pytest.raises(InputDataError) as caught:
        KeyList.read(file)
    assert str(caught.value.received).endswith("keys.txt, lines 1 and 4: 'a'")
    file.write_bytes("a".encode("utf-16"))
    with pytest.raises(InputDataError, match="cannot be read"):
        KeyList.read(file)


def test_what_matches_nothing_is_counted_and_shown() -> None:
    assert describe_unmatched("f", 3, ["x", "y"]) == "f: 2 of 3 keys match nothing, the first 'x'"

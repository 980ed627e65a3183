"""Lists of keys in files: blocked items, users, candidates, keys of a table.

A key is the text of a line, or of a field, without white space and quotes around it; inside quotes
white space stays, and `""` is a quote. A file may begin with a byte order mark.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.errors import InputDataError

BYTE_ORDER_MARK = "\ufeff"


def clean_key(text: str) -> str:
    """Returns the key that a line or field holds."""
    text = text.removeprefix(BYTE_ORDER_MARK).strip()
    if len(text) > 1 and text[0] == text[-1] == '"':
        return text[1:-1].replace('""', '"')
    return text


def read_key_lines(path: Path) -> dict[int, str]:
    """Returns the key of each line that holds one, by the line's number from 1.

    Raises:
        InputDataError: The file cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputDataError(
            "the file of keys cannot be read",
            received=f"{path}: {error}",
            allowed="UTF-8, one key a line",
        ) from error
    keys = {number: clean_key(line) for number, line in enumerate(lines, 1)}
    return {number: key for number, key in keys.items() if key}


def refuse_twice(path: Path, keys: Iterable[tuple[int, Any]], what: str = "line") -> None:
    """Refuses a key that stands twice.

    Args:
        path: The file.
        keys: Number of the line or row, and the key.
        what: `line` or `row`.

    Raises:
        InputDataError: There is one.
    """
    first: dict[Any, int] = {}
    for number, key in keys:
        if first.setdefault(key, number) != number:
            raise InputDataError(
                "a list of keys holds a key twice",
                received=f"{path}, {what}s {first[key]} and {number}: {key!r}"[:300],
                fix="leave one of them out",
            )


def describe_unmatched(place: object, given: int, unmatched: Sequence[Any]) -> str:
    """Says how many keys of a list match nothing, and which is the first."""
    return f"{place}: {len(unmatched)} of {given} keys match nothing, the first {unmatched[0]!r}"


@dataclass(frozen=True)
class KeyList:
    """Keys of a file, one a line, in its order.

    Attributes:
        path: The file.
        keys: Each once.
    """

    path: Path
    keys: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> KeyList:
        """Reads a file.

        Raises:
            InputDataError: It cannot be read, or a key stands twice.
        """
        found = read_key_lines(path)
        refuse_twice(path, found.items())
        return cls(path, tuple(found.values()))

"""Inputs as `export.json` describes them, in other forms: each is built once.

What `export.json` says is read once and never changed, and each request needs it in another form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, wraps
from typing import Any, TypeVar

from training.raw_inputs.input_columns import InputColumn
from training.raw_inputs.source_names import SourceNames

FoundT = TypeVar("FoundT")

KEPT = 4096
"""Objects of `export.json` of which something is kept."""


class _Same:
    """A key that is equal where it is of the same object."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value


def once_per_object(find: Callable[[Any], FoundT]) -> Callable[[Any], FoundT]:
    """Wraps a function of a part of `export.json`, whose answers are kept by the part itself.

    What `export.json` says is read once and never changed, and each request needs it in another
    form.
    """

    @lru_cache(KEPT)
    def find_once(key: _Same) -> FoundT:
        return find(key.value)

    @wraps(find)
    def found(value: Any) -> FoundT:
        return find_once(_Same(value))

    return found


@once_per_object
def read_column(item: Mapping[str, Any]) -> InputColumn:
    """Returns an input as `export.json` describes it."""
    return InputColumn.from_json(item)


@once_per_object
def find_source_names(about: Mapping[str, Mapping[str, Any]]) -> SourceNames:
    """Returns the columns that stand for inputs, by what `export.json` says of each."""
    return SourceNames.build(about.values())

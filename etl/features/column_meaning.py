"""What the values of a column mean, as a config says: numbers that were fitted go by it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

_OF_COLUMN = ("type", "field", "separator", "timestamp_format", "pair")
_OF_SOURCE = ("format", "separator", "quote", "escape", "null_values", "pattern", "encoding")
_OF_JOIN = ("source", "column", "as_of")
_OF_HISTORIES = ("events", "history", "histories", "sessions", "most_frequent")


def describe_meaning(config: Mapping[str, Any], columns: Collection[str]) -> dict[str, Any]:
    """Returns all of a config that says what some columns hold; equal where they mean the same.

    Args:
        config: A resolved config, as a manifest holds it.
        columns: Names of event columns.
    """
    meaning: dict[str, Any] = {}
    left = list(columns)
    while left:
        column = left.pop()
        if column in meaning:
            continue
        meaning[column] = list(_find_declared(config, column)) or _find_maker(config, column)
        left += [name for name in _list_words(meaning[column]) if _is_column(config, name)]
    return meaning


def _find_declared(config: Mapping[str, Any], column: str) -> Iterator[dict[str, Any]]:
    """The sources that hold a column: how it is written there, and the joins that bring it."""
    for name, source in sorted(config.get("sources", {}).items()):
        for place, declared in enumerate(source.get("columns", ())):
            if declared.get("name") != column:
                continue
            # Without names in the input a column is the value that stands at its place.
            has_names = declared.get("field") or source.get("header") == "by_name"
            yield {
                "column": {key: declared.get(key) for key in _OF_COLUMN},
                "source": {key: source.get(key) for key in _OF_SOURCE},
                "place": None if has_names else place,
                "joins": [
                    {key: join.get(key) for key in _OF_JOIN}
                    for join in config.get("joins", ())
                    if join.get("source") == name
                ],
            }


def _find_maker(config: Mapping[str, Any], column: str) -> Any:
    """What makes a column that no source holds: a window, or histories."""
    windows = [made for made in config.get("rolling", ()) if made.get("name") == column]
    return windows or {key: config.get(key) for key in _OF_HISTORIES}


def _list_words(found: Any) -> Iterator[str]:
    if isinstance(found, str):
        yield found
    elif isinstance(found, Mapping):
        for value in found.values():
            yield from _list_words(value)
    elif isinstance(found, list | tuple):
        for value in found:
            yield from _list_words(value)


def _is_column(config: Mapping[str, Any], name: str) -> bool:
    return any(
        declared.get("name") == name
        for source in config.get("sources", {}).values()
        for declared in source.get("columns", ())
    )

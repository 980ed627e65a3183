"""YAML of users: read by the safe loader, after what it holds has been measured.

A text of a few hundred bytes may stand for billions of values, as an alias repeats all that its
anchor holds, and may nest lists so deep that Python gives up. A key that stands twice in a mapping
would win over the first one without a word. Numbers are those of YAML 1.2: 010 is ten, 0o17 octal,
1e-5 a number, and 12:30 text, where 1.1 reads minutes to base 60. Beyond it, whole numbers may have
`_` between groups of three digits: 1_000.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import yaml

from conf.errors import ConfigError

MOST_CHARACTERS = 1 << 20
MOST_VALUES = 100_000
"""Keys, values, lists and mappings, each counted as often as aliases repeat it."""
MOST_NESTING = 50
MOST_DIGITS = 1000
"""Characters of a number. Python refuses to write whole numbers of more than 4,300 digits."""


def parse_yaml(text: str, what: str) -> Any:
    """Returns what a YAML text holds.

    Args:
        text: One document.
        what: Names the text in messages.

    Raises:
        ConfigError: It is not valid YAML, is too long or too deep, stands for too many values, or
            a mapping has a key twice.
    """
    if len(text) > MOST_CHARACTERS:
        _refuse(what, f"{len(text):,} characters", f"{MOST_CHARACTERS:,} characters")
    try:
        _measure(text, what)
        return yaml.load(text, Loader=_Loader)  # noqa: S506 (a SafeLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{what} is not valid YAML", received=str(error)) from error
    except (ValueError, OverflowError) as error:  # A date such as 2026-02-30.
        raise ConfigError(f"{what} holds a value that YAML cannot read", received=error) from error


_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_NUMBERS = (
    (_INT, r"[-+]?[0-9]+|[-+]?[0-9]{1,3}(_[0-9]{3})+|0o[0-7]+|0x[0-9a-fA-F]+"),
    (
        _FLOAT,
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
    ),
)


def _list_resolvers() -> dict[str | None, list[tuple[str, re.Pattern[str]]]]:
    """What text without quotes is, by its first character: dates and words as ever, and numbers."""
    found = {
        first: [(tag, pattern) for tag, pattern in pairs if tag not in (_INT, _FLOAT)]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    numbers = [(tag, re.compile(rf"(?:{pattern})\Z")) for tag, pattern in _NUMBERS]
    for first in "-+.0123456789":
        found[first] = [*found.get(first, ()), *numbers]
    return found


_RESOLVERS = _list_resolvers()
_BASES = {"0o": 8, "0x": 16}


class _Loader(yaml.SafeLoader):
    """Builds what YAML's safe loader builds, but for numbers; see above."""

    yaml_implicit_resolvers = _RESOLVERS


class _Dumper(yaml.SafeDumper):
    """Writes what `_Loader` reads: text that it would take for a number is quoted."""

    yaml_implicit_resolvers = _RESOLVERS


def _build_int(text: str) -> int:
    return int(text[2:], _BASES[text[:2]]) if text[:2] in _BASES else int(text)


def _build_float(text: str) -> float:
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


def _read_number(
    build: Callable[[str], int | float],
) -> Callable[[_Loader, yaml.ScalarNode], int | float | str]:
    def read(loader: _Loader, node: yaml.ScalarNode) -> int | float | str:
        text = str(loader.construct_scalar(node))
        if ":" in text:
            return text
        if len(text) > MOST_DIGITS:
            problem = f"a number of {len(text):,} characters; at most {MOST_DIGITS:,} are read"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return build(text.lower())

    return read


_Loader.add_constructor(_INT, _read_number(_build_int))
_Loader.add_constructor(_FLOAT, _read_number(_build_float))


def dump_yaml(value: Any) -> str:
    """Returns a value as a YAML text that `parse_yaml` reads as the same value."""
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False))


@dataclass
class _Node:
    """A mapping or list whose end has not been seen.

    Attributes:
        anchor: Its name for aliases.
        is_mapping: Whether it is a mapping.
        values: Values so far, itself among them.
        children: Keys and values that stand directly in it.
        keys: Of a mapping, those that are plain, and where they stand.
    """

    anchor: str | None = None
    is_mapping: bool = False
    values: int = 1
    children: int = 0
    keys: dict[str, str] = field(default_factory=dict)


def _measure(text: str, what: str) -> None:
    """Refuses a text that would be too much, by its events, of which none builds anything."""
    sizes: dict[str, int] = {}
    open_nodes = [_Node()]
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append(_Node(event.anchor, isinstance(event, yaml.MappingStartEvent)))
            if len(open_nodes) > MOST_NESTING + 1:
                _refuse(what, f"deeper nesting{_find_place(event)}", f"{MOST_NESTING} levels")
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            closed = open_nodes.pop()
            anchor, size = closed.anchor, closed.values
        elif isinstance(event, yaml.ScalarEvent):
            anchor, size = event.anchor, 1
            _check_key(open_nodes[-1], event, what)
        elif isinstance(event, yaml.AliasEvent):
            if any(node.anchor == event.anchor for node in open_nodes):
                _refuse(what, f"a value that holds itself{_find_place(event)}", "its parts")
            anchor, size = None, sizes.get(str(event.anchor), 1)
        else:
            continue
        parent = open_nodes[-1]
        parent.children += 1
        parent.values += size
        if anchor is not None:
            sizes[anchor] = size
        if parent.values > MOST_VALUES:
            _refuse(what, f"more values{_find_place(event)}", f"{MOST_VALUES:,} values")


def _check_key(parent: _Node, event: yaml.ScalarEvent, what: str) -> None:
    """Refuses a key that stands twice; `<<`, which merges mappings, may."""
    is_key = parent.is_mapping and parent.children % 2 == 0
    if not is_key or event.value == "<<":
        return
    place = _find_place(event)
    if event.value in parent.keys:
        raise ConfigError(
            f"{what} has a key twice in one mapping",
            received=f"{event.value[:100]!r}{parent.keys[event.value]} and again{place}",
            allowed="each key once: YAML would keep the last and drop the others without a word",
            fix="delete one of them, or put both contents below one key",
        )
    parent.keys[event.value] = place


def _find_place(event: yaml.Event) -> str:
    mark = event.start_mark
    return "" if mark is None else f" (line {mark.line + 1}, column {mark.column + 1})"


def _refuse(what: str, received: str, allowed: str) -> None:
    raise ConfigError(
        f"{what} holds more than a config may",
        received=received,
        allowed=f"at most {allowed}; an alias counts as all that it repeats",
    )

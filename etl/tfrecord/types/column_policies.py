"""Policies per column: what becomes of values and types that an Example has no place for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args, get_type_hints

from conf.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class ColumnPolicy:
    """Policies of one column.

    Attributes:
        float64: `error`: the nearest float32, refusing a finite value beyond its range, a value
            that would become zero, and a whole number that would become another; `exact`: refuse
            any change; `cast`: nearest, infinite beyond the range; `clip`: nearest, the largest
            float32 beyond the range.
        integers: Unsigned 64-bit values beyond int64: refused, or the largest int64.
        nulls: A null row: feature absent, `default` instead (a list of no fixed size becomes an
            empty one), or refused.
        null_elements: A null inside a list: refused, left out, or `default` instead. A list in a
            list counts as an element, whose default is an empty list.
        default: What stands for a null; None for 0, 0.0 or "".
        dates: `days` since 1970-01-01 as int64, or ISO 8601 text.
        timestamps: Seconds, milliseconds or microseconds since 1970 UTC as int64, rounded down,
            or ISO 8601 text.
        maps: `entries`: two lists, `<name>.keys` and `<name>.values`; `keys`: a feature
            `<name>.<key>` for each of `map_keys`.
        map_keys: Keys that become features.
        vectors: `dense`: a float list; `sparse`: `<name>.indices`, `<name>.values`, `<name>.size`;
            `bytes`: all values as little-endian float64, as numpy's `tobytes` writes them.
    """

    float64: Literal["error", "exact", "cast", "clip"] = "error"
    integers: Literal["error", "clip"] = "error"
    nulls: Literal["absent", "default", "error"] = "absent"
    null_elements: Literal["error", "drop", "default"] = "error"
    default: int | float | str | None = None
    dates: Literal["error", "days", "iso"] = "error"
    timestamps: Literal["error", "s", "ms", "us", "iso"] = "error"
    maps: Literal["error", "entries", "keys"] = "error"
    map_keys: tuple[str, ...] = ()
    vectors: Literal["dense", "sparse", "bytes"] = "dense"


@dataclass(frozen=True)
class TypeOptions:
    """How columns become features.

    Attributes:
        default: Policies of columns that are not named.
        columns: Policies by column name; `struct.field` names a field. What is not named goes
            by the struct that holds it, then by `default`.
        struct_separator: Between a struct's name and its field's.
        name_collisions: Two columns that end up under one name: refused, or numbered.
    """

    default: ColumnPolicy = ColumnPolicy()
    columns: Mapping[str, ColumnPolicy] = field(default_factory=dict, hash=False)
    struct_separator: str = "."
    name_collisions: Literal["error", "rename"] = "error"

    def policy(self, path: str) -> ColumnPolicy:
        """Policy of a column or field: its own, or that of the nearest struct around it."""
        return self.columns.get(self.policy_name(path) or "", self.default)

    def policy_name(self, path: str) -> str | None:
        """Name in `columns` that a column or field goes by, or None for the default."""
        while path not in self.columns:
            path, separator, _ = path.rpartition(self.struct_separator)
            if not separator:
                return None
        return path

    def join(self, path: str, name: str) -> str:
        """Name of a part of a column."""
        return f"{path}{self.struct_separator}{name}"


_COLUMNS_EXAMPLE = 'JSON such as {"price": {"float64": "cast"}}'
# Option names by field, as users write them.
_POLICY_OPTIONS: Mapping[str, str] = {
    "float64": "float64",
    "integers": "integers",
    "nulls": "nulls",
    "nullElements": "null_elements",
    "default": "default",
    "dates": "dates",
    "timestamps": "timestamps",
    "maps": "maps",
    "mapKeys": "map_keys",
    "vectors": "vectors",
}
_NAMING_OPTIONS: Mapping[str, str] = {
    "structSeparator": "struct_separator",
    "nameCollisions": "name_collisions",
}
TYPE_OPTIONS: tuple[str, ...] = (*_POLICY_OPTIONS, *_NAMING_OPTIONS, "columns")


def option_name(policy_field: str) -> str:
    """Name under which users give a field of `ColumnPolicy`."""
    return {field: option for option, field in _POLICY_OPTIONS.items()}[policy_field]


def parse_type_options(given: Mapping[str, str]) -> TypeOptions:
    """Parses the options of a write or a read that say how columns become features.

    A column's policies start from those given for all columns.

    Args:
        given: Option values by lower-case name; others than `TYPE_OPTIONS` are ignored.

    Raises:
        ConfigError: A value that is not allowed, malformed JSON, or an unknown policy name.
    """
    policies: dict[str, Any] = {
        option: given[option.lower()] for option in _POLICY_OPTIONS if option.lower() in given
    }
    if "mapKeys" in policies:
        policies["mapKeys"] = parse_json_option(
            "mapKeys", policies["mapKeys"], 'a JSON list of keys, such as ["clicks", "views"]'
        )
    default = _parse_policy(policies, ColumnPolicy(), "")
    naming = {
        field: _parse_choice(option, given[option.lower()], field, TypeOptions)
        for option, field in _NAMING_OPTIONS.items()
        if option.lower() in given
    }
    columns = parse_json_option("columns", given.get("columns", "{}"), _COLUMNS_EXAMPLE)
    if not isinstance(columns, dict) or not all(isinstance(v, dict) for v in columns.values()):
        raise ConfigError(
            "TFRecord option 'columns' is not an object of objects",
            received=given["columns"],
            allowed=_COLUMNS_EXAMPLE,
        )
    return TypeOptions(
        default=default,
        columns={
            name: _parse_policy(policy, default, f" of column {name!r}")
            for name, policy in columns.items()
        },
        **naming,
    )


def parse_json_option(option: str, text: str, allowed: str) -> Any:
    """Parses the value of an option that is JSON.

    Args:
        option: Its name.
        text: Its value.
        allowed: What it should look like.

    Raises:
        ConfigError: It is not JSON; says where that ends.
    """
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"TFRecord option {option!r} is not JSON: {error}", received=text, allowed=allowed
        ) from error


def _parse_policy(given: Mapping[str, Any], base: ColumnPolicy, where: str) -> ColumnPolicy:
    """Policy with the given options in place of the base's."""
    names = {option.lower(): option for option in _POLICY_OPTIONS}
    values: dict[str, Any] = {}
    for name, value in given.items():
        option = names.get(name.lower())
        if option is None:
            raise ConfigError(
                f"unknown policy {name!r}{where}",
                received=name,
                allowed=", ".join(_POLICY_OPTIONS),
                fix=did_you_mean(name, _POLICY_OPTIONS),
            )
        field = _POLICY_OPTIONS[option]
        if field == "map_keys":
            values[field] = _parse_map_keys(value, where)
        elif field == "default":
            values[field] = _parse_default(value, where)
        else:
            values[field] = _parse_choice(option + where, value, field, ColumnPolicy)
    return replace(base, **values)


def _parse_map_keys(value: Any, where: str) -> tuple[str, ...]:
    if (
        not isinstance(value, list)
        or not all(isinstance(key, str) for key in value)
        or len(set(value)) != len(value)
    ):
        raise ConfigError(
            f"bad value of TFRecord option 'mapKeys'{where}",
            received=json.dumps(value),
            allowed='a JSON list of different keys, such as ["clicks", "views"]',
        )
    return tuple(value)


def _parse_default(value: Any, where: str) -> int | float | str | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str | None):
        raise ConfigError(
            f"bad value of TFRecord option 'default'{where}",
            received=json.dumps(value),
            allowed="a number or text",
        )
    return value


def _parse_choice(option: str, value: Any, field: str, holder: type) -> Any:
    """Value of an option with a fixed set of values, or of one that takes any text but none."""
    choices = get_args(get_type_hints(holder)[field])
    if not choices and isinstance(value, str) and value:
        return value
    for choice in choices:
        if isinstance(value, str) and value.lower() == choice:
            return choice
    raise ConfigError(
        f"bad value of TFRecord option {option}",
        received=repr(value),
        allowed=", ".join(choices) or "any text that is not empty",
        fix=did_you_mean(str(value), choices) if choices else None,
    )

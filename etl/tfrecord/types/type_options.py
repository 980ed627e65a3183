"""Options: how they are parsed, and those that say how columns of a type become features.

Needs the standard library alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from conf.errors import ConfigError, InputDataError, did_you_mean


@dataclass(frozen=True)
class Option:
    """One option of a read or a write; the reference of options is made of these.

    Attributes:
        name: As users write it; upper and lower case do not matter.
        values: What it may be: meaning by value, or a description of the values.
        about: What it is for, in Markdown.
        parse: Parses a value of no fixed set; raises ValueError.
        field: What the value is called in the parsed options; None: the name in snake case.
    """

    name: str
    values: str | Mapping[str, Any]
    about: str
    parse: Callable[[str], Any] = str
    field: str | None = None

    @property
    def key(self) -> str:
        """Name of the parsed value."""
        return self.field or re.sub("([A-Z])", lambda m: f"_{m[1].lower()}", self.name)

    @property
    def shown_values(self) -> str:
        """What it may be, for the reference."""
        if isinstance(self.values, str):
            return self.values
        return ", ".join(f"`{value}`" for value in self.values if value)

    def read(self, text: str) -> Any:
        """Parses a value; refuses one that is not allowed."""
        if isinstance(self.values, str):
            try:
                return self.parse(text)
            except ValueError as error:
                raise self._refuse(text, self.values) from error
        known = {value.lower(): meaning for value, meaning in self.values.items()}
        if text.lower() not in known:
            shown = [value for value in self.values if value]
            raise self._refuse(text, ", ".join(shown), did_you_mean(text, shown))
        return known[text.lower()]

    def _refuse(self, text: str, allowed: str, fix: str | None = None) -> ConfigError:
        what = f"bad value of TFRecord option {self.name!r}"
        return ConfigError(what, received=repr(text), allowed=allowed, fix=fix)


def names_of(*values: str) -> dict[str, str]:
    """Values of an option that mean what they say."""
    return dict(zip(values, values, strict=True))


def parse_options(table: Iterable[Option], given: Mapping[str, str]) -> dict[str, Any]:
    """Parsed values of the options of a table that are given by lower-case name, by their key."""
    chosen = [option for option in table if option.name.lower() in given]
    return {option.key: option.read(given[option.name.lower()]) for option in chosen}


def lower_names(given: Mapping[str, str], allowed: Iterable[str]) -> dict[str, str]:
    """Options by lower-case name, which is how Spark hands them over; refuses unknown ones."""
    allowed = list(allowed)
    known = {name.lower() for name in allowed}
    unknown = [name for name in given if name.lower() not in known]
    if unknown:
        raise ConfigError(
            f"unknown TFRecord option {unknown[0]!r}",
            received=", ".join(sorted(unknown)),
            allowed=", ".join(name for name in allowed if name != "path"),
            fix=did_you_mean(unknown[0], allowed),
        )
    return {name.lower(): value for name, value in given.items()}


TYPE_OPTIONS = (
    Option(
        "float64",
        names_of("error", "cast"),
        "doubles and decimals are written as the nearest float32. `error` refuses a finite value "
        "beyond its range, one that would become 0, and a whole number that would become another "
        "(an id or an epoch in a double); `cast` takes them all",
    ),
    Option(
        "dates",
        names_of("error", "days", "iso"),
        "days since 1970-01-01 as int64, or text such as `2026-01-02`",
    ),
    Option(
        "timestamps",
        names_of("error", "s", "ms", "us", "iso"),
        "since 1970 UTC as int64, rounded down to the unit, or ISO 8601 text",
    ),
    Option("maps", names_of("error", "entries"), "two lists, `<name>.keys` and `<name>.values`"),
    Option(
        "vectors",
        names_of("dense", "sparse", "bytes"),
        "ML vectors: a float list; `<name>.indices`, `<name>.values` and `<name>.size`; or all "
        "values as float64 in one bytes value, as numpy's `tobytes` writes them",
    ),
)


@dataclass(frozen=True)
class TypeOptions:
    """How columns of a type become features, in all of a job; what each means: `TYPE_OPTIONS`.

    A column that is to become something else is cast before the write. `error` refuses the type,
    or the values that would be lost.
    """

    float64: Literal["error", "cast"] = "error"
    dates: Literal["error", "days", "iso"] = "error"
    timestamps: Literal["error", "s", "ms", "us", "iso"] = "error"
    maps: Literal["error", "entries"] = "error"
    vectors: Literal["dense", "sparse", "bytes"] = "dense"

    def chosen(self) -> dict[str, str]:
        """What is not as by default, by option; `read_manifest` reads it."""
        default = TypeOptions()
        return {n: v for n, v in asdict(self).items() if v != getattr(default, n)}

    @classmethod
    def read_manifest(cls, described: Mapping[str, Any]) -> TypeOptions:
        """Reads what a manifest says of a write's types; nothing said is the default.

        Raises:
            InputDataError: It is damaged.
        """
        try:
            given = {n: v for n, v in described.items() if n != "binary"}
            return parse_type_options(lower_names(given, [option.name for option in TYPE_OPTIONS]))
        except (AttributeError, ConfigError) as error:
            raise InputDataError(
                "the manifest's account of the columns is damaged",
                received=repr(error),
                fix="write the directory again, or read it with a schema and options of your own",
            ) from error


def parse_type_options(given: Mapping[str, str]) -> TypeOptions:
    """Parses those of the given options, by lower-case name, that are `TYPE_OPTIONS`."""
    return TypeOptions(**parse_options(TYPE_OPTIONS, given))

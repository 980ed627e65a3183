"""Declared columns of a source: type, bounds, and how the input writes them."""

from __future__ import annotations

import datetime
from typing import Literal

from pydantic import Field, model_validator

from conf.etl.base import Name, Strict

ColumnType = Literal[
    "int64",
    "float32",
    "float64",
    "string",
    "timestamp",
    "list<int64>",
    "list<float32>",
    "list<string>",
]
# Spark type of a column once it is read; a timestamp becomes milliseconds since 1970, UTC.
SPARK_TYPES = {
    "int64": "bigint",
    "float32": "float",
    "float64": "double",
    "string": "string",
    "timestamp": "bigint",
    "list<int64>": "array<bigint>",
    "list<float32>": "array<float>",
    "list<string>": "array<string>",
}
EPOCH_UNITS = {"epoch_s": "s", "epoch_ms": "ms", "epoch_us": "us"}
_FLOATS = ("float32", "float64", "list<float32>")
_NUMBERS = ("int64", "list<int64>", *_FLOATS)


def is_list_type(column_type: str) -> bool:
    """Whether a column of that type holds lists."""
    return column_type.startswith("list<")


class PairConfig(Strict):
    """The second column that entries `<value>` or `<value><separator><second>` give."""

    name: Name
    type: Literal["int64", "string"] = "int64"
    separator: str = Field("_", min_length=1)
    default: int | str | None = Field(
        None, description="Second value of an entry that is written without one."
    )

    @model_validator(mode="after")
    def _default_has_type(self) -> PairConfig:
        wanted = int if self.type == "int64" else str
        if not isinstance(self.default, wanted):
            raise ValueError(
                f"pair {self.name!r} needs a `default` of type {self.type} for entries without "
                "a second value"
            )
        if isinstance(self.default, int) and not -(2**63) <= self.default < 2**63:
            raise ValueError(f"pair {self.name!r}: the default is beyond int64")
        return self

    def as_column(self, first: ColumnConfig) -> ColumnConfig:
        """This column as if it had been declared beside the one that it stands in."""
        kind = f"list<{self.type}>" if first.is_list else self.type
        return ColumnConfig.model_validate(
            {"name": self.name, "type": kind, "nullable": first.nullable}
        )


class ColumnConfig(Strict):
    """One declared column of a source.

    A value that does not parse as its type, is null although `nullable` is false, or lies
    outside `minimum`/`maximum`/`one_of`/`not_after` makes the row a bad row; the bounds of a list
    hold for each of its values.
    """

    name: Name
    type: ColumnType
    field: str | None = Field(
        None,
        min_length=1,
        description="Its name in the input, where it is another: a column, a name in the header, "
        "a JSON key or path (`user.id`), or a part of a libsvm line.",
    )
    nullable: bool = False
    minimum: float | None = None
    maximum: float | None = None
    one_of: tuple[str, ...] | None = None
    separator: str | None = Field(None, min_length=1, description="Separator inside a list column.")
    timestamp_format: str | None = Field(
        None,
        min_length=1,
        description="How timestamps are written: epoch_s, epoch_ms, epoch_us or a Java pattern; "
        "None: ISO 8601, and UTC where no zone is written.",
    )
    not_after: datetime.date | Literal["run_date", "now"] | None = Field(
        None,
        description="Last day of timestamps: a date, the run's last day, or the clock's day "
        "(then a rerun may differ).",
    )
    pair: PairConfig | None = Field(
        None, description="Entries `<value>_<second>`: the name of the column of second values."
    )

    @model_validator(mode="after")
    def _options_fit_the_type(self) -> ColumnConfig:
        where = f"column {self.name!r} of type {self.type}"
        if self.minimum is not None or self.maximum is not None:
            self._require(_NUMBERS, f"{where} cannot have bounds")
        if self.one_of is not None and self.is_list:
            raise ValueError(f"list column {self.name!r} cannot have `one_of`")
        if self.timestamp_format is not None or self.not_after is not None:
            self._require(("timestamp",), f"{where} cannot have `timestamp_format` or `not_after`")
        if self.pair is not None:
            self._require(
                ("int64", "string", "list<int64>", "list<string>"), f"{where} cannot have a `pair`"
            )
            if self.one_of is not None or self.pair.separator == self.separator:
                raise ValueError(f"{where}: a `pair` needs a separator of its own, and no `one_of`")
        return self

    def _require(self, types: tuple[str, ...], message: str) -> None:
        if self.type not in types:
            raise ValueError(f"{message}; {', '.join(types)} can")

    @property
    def is_list(self) -> bool:
        """Whether a value is a list."""
        return is_list_type(self.type)

    @property
    def is_float(self) -> bool:
        """Whether a value, or each in a list, is a floating-point number."""
        return self.type in _FLOATS

    @property
    def element_type(self) -> str:
        """Type of a value, or of each in a list."""
        return self.type.removeprefix("list<").removesuffix(">")

    @property
    def read_type(self) -> str:
        """Type of the column once it is read: a timestamp is int64, in ms since 1970, UTC."""
        return "int64" if self.type == "timestamp" else self.type

    @property
    def field_name(self) -> str:
        """Name of the column in the input."""
        return self.field or self.name

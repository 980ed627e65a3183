"""Inputs: files, their declared columns, and what happens to rows that do not fit."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from conf.etl.base import Name, Strict


class ColumnConfig(Strict):
    """One declared column of a source.

    A value that does not parse as its type, is null although `nullable` is false, or lies
    outside `minimum`/`maximum`/`one_of` makes the row a bad row.
    """

    name: Name
    type: Literal["int64", "float32", "string", "list<int64>", "list<string>"]
    nullable: bool = False
    minimum: float | None = None
    maximum: float | None = None
    one_of: tuple[str, ...] | None = None
    separator: str | None = Field(None, description="Separator inside a list column.")

    @model_validator(mode="after")
    def _list_has_separator(self) -> ColumnConfig:
        if self.type.startswith("list<") and not self.separator:
            raise ValueError(f"list column {self.name!r} needs a separator")
        bounded = self.minimum is not None or self.maximum is not None
        if bounded and self.type not in ("int64", "float32"):
            raise ValueError(f"column {self.name!r} of type {self.type} cannot have bounds")
        if self.one_of is not None and self.type.startswith("list<"):
            raise ValueError(f"list column {self.name!r} cannot have `one_of`")
        return self


class BadRowsConfig(Strict):
    """What happens to rows that do not fit the declared schema."""

    policy: Literal["fail", "quarantine", "drop"] = "quarantine"
    max_fraction: float = Field(0.01, ge=0, le=1, description="More bad rows stop the build.")


class SourceConfig(Strict):
    """One input: delimited text with a declared schema, or lines matched by a pattern."""

    path: str = Field(description="File, directory or glob; relative to `data_dir`.")
    format: Literal["delimited", "pattern"] = "delimited"
    separator: str = Field("\t", min_length=1)
    pattern: str | None = Field(
        None, description="Java regular expression with one group per column (format: pattern)."
    )
    encoding: Literal["utf-8", "latin-1"] = "utf-8"
    header: bool = Field(
        False, description="The first line of each file names its columns; it is not a row."
    )
    columns: tuple[ColumnConfig, ...] = Field(min_length=1)
    key: str | None = Field(None, description="Unique key of a dictionary; checked.")
    bad_rows: BadRowsConfig = BadRowsConfig()

    @model_validator(mode="after")
    def _consistent(self) -> SourceConfig:
        # Spark tells names apart by more than their case only if it is told to.
        names = [column.name.lower() for column in self.columns]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"columns declared twice: {', '.join(repeated)}")
        if self.key is not None and self.key not in self.column_types:
            raise ValueError(f"key column {self.key!r} is not declared")
        if (self.format == "pattern") != (self.pattern is not None):
            raise ValueError("`pattern` goes with `format: pattern`, and only with it")
        return self

    @property
    def column_types(self) -> dict[str, str]:
        """Declared type by column name."""
        return {column.name: column.type for column in self.columns}

    def column(self, name: str) -> ColumnConfig | None:
        """Returns a declared column, or None."""
        return next((column for column in self.columns if column.name == name), None)

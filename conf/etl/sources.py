"""Inputs: files, tables and databases, their columns, and what happens to rows that do not fit."""

from __future__ import annotations

import datetime
from typing import Any, Literal

from pydantic import Field, model_validator

from conf.etl.base import Strict
from conf.etl.columns import ColumnConfig
from conf.etl.days import DaysConfig
from conf.etl.jdbc import JdbcConfig

SourceFormat = Literal[
    "delimited",
    "csv",
    "pattern",
    "json",
    "libsvm",
    "libfm",
    "libffm",
    "parquet",
    "orc",
    "avro",
    "table",
    "jdbc",
]
# All are ASCII in their lower half, so that a line feed is a line feed in each of them.
Encoding = Literal[
    "utf-8",
    "latin-1",
    "us-ascii",
    "iso-8859-2",
    "iso-8859-5",
    "iso-8859-7",
    "iso-8859-9",
    "iso-8859-15",
    "windows-1250",
    "windows-1251",
    "windows-1252",
    "koi8-r",
    "gbk",
    "gb18030",
    "big5",
    "shift_jis",
    "euc-jp",
    "euc-kr",
]
DATE_FIELD = "{date}"
SPARSE_FORMATS = ("libsvm", "libfm", "libffm")
_SEPARATED = ("delimited", "csv")
_TEXT = (*_SEPARATED, "pattern", "json", *SPARSE_FORMATS)
_SPARSE_TYPES = {
    "label": ("float32", "float64", "int64"),
    "indices": ("list<int64>",),
    "values": ("list<float32>",),
    "fields": ("list<int64>",),
    "qid": ("int64",),
}


class BadRowsConfig(Strict):
    """What happens to rows that do not fit the declared schema."""

    policy: Literal["fail", "quarantine", "drop"] = "quarantine"
    max_fraction: float = Field(0.01, ge=0, le=1, description="More bad rows stop the build.")


class SourceConfig(Strict):
    """One input with a declared schema: text lines, files that have columns, a table, a query."""

    format: SourceFormat = "delimited"
    path: str | None = Field(
        None,
        min_length=1,
        description="File, directory or glob; relative to `data_dir`. `{date}` in it stands for a "
        "day of the run.",
    )
    table: str | None = Field(None, min_length=1, description="Name in a catalogue of the session.")
    jdbc: JdbcConfig | None = None
    separator: str | None = Field(
        None, min_length=1, description="Between fields; None: a comma for csv, else a tab."
    )
    quote: str | None = Field(
        None, min_length=1, max_length=1, description='Around a field; None: `"` for csv, else off.'
    )
    escape: str | None = Field(
        None,
        min_length=1,
        max_length=1,
        description="Before a quote inside quotes; None: the quote itself, doubled.",
    )
    null_values: tuple[str, ...] = Field((), description="Texts that mean null, such as `\\N`.")
    pattern: str | None = Field(
        None, description="Java regular expression with one group per column (format: pattern)."
    )
    encoding: Encoding = "utf-8"
    header: bool | Literal["by_name"] = Field(
        False,
        description="The first line of each file names its columns; it is not a row. `by_name`: "
        "columns are found by these names, not by position.",
    )
    columns: tuple[ColumnConfig, ...] = Field(min_length=1)
    key: str | None = Field(None, description="Unique key of a dictionary; checked.")
    days: DaysConfig | None = Field(None, description="The input is cut by calendar day.")
    new_columns: Literal["ignore", "warn", "fail"] = Field(
        "warn", description="The input has columns that are not declared."
    )
    all_null_columns: Literal["ignore", "warn", "fail"] = Field(
        "warn", description="A nullable column that is null in every good row."
    )
    change_check: Literal["checksum"] | None = Field(
        "checksum",
        description="How a run notices that a query, or a table without versions, has changed: "
        "its declared columns are read for a checksum when the run begins and when it ends. "
        "None: not at all; each run builds anew.",
    )
    bad_rows: BadRowsConfig = BadRowsConfig()

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_format(cls, data: Any) -> Any:
        """A sparse text has its columns by itself; a path with a day is cut by day."""
        if not isinstance(data, dict):
            return data
        kind = data.get("format")
        if kind in SPARSE_FORMATS and data.get("columns") is None:
            data = {**data, "columns": _sparse_columns(kind)}
        if data.get("days") is None and DATE_FIELD in str(data.get("path")):
            data = {**data, "days": {}}
        return data

    @model_validator(mode="after")
    def _consistent(self) -> SourceConfig:
        # Spark tells names apart by more than their case only if it is told to.
        names = [column.name.lower() for column in self.outputs]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"columns declared twice: {', '.join(repeated)}")
        if self.key is not None and self.key not in self.column_types:
            raise ValueError(f"key column {self.key!r} is not declared")
        if (self.format == "pattern") != (self.pattern is not None):
            raise ValueError("`pattern` goes with `format: pattern`, and only with it")
        self._check_place()
        self._check_text_options()
        self._check_columns()
        self._check_days()
        return self

    def _check_place(self) -> None:
        places = {"table": self.table, "jdbc": self.jdbc}
        wanted = self.format if self.format in places else "path"
        given = [k for k, v in {"path": self.path, **places}.items() if v is not None]
        if given != [wanted]:
            raise ValueError(
                f"format {self.format} is read from `{wanted}`, and from nothing else; "
                f"given: {', '.join(given) or 'nothing'}"
            )

    def _check_text_options(self) -> None:
        separated = self.format in _SEPARATED
        only = {
            "separator": (separated or self.format == "pattern", self.separator is not None),
            "quote": (separated, self.quote is not None),
            "escape": (separated, self.escape is not None),
            "null_values": (separated or self.format == "pattern", bool(self.null_values)),
            "header": (separated or self.format == "pattern", self.header is not False),
            "encoding": (self.format in _TEXT, self.encoding != "utf-8"),
            "change_check": (self.path is None, self.change_check is None),
        }
        wrong = [name for name, (allowed, given) in only.items() if given and not allowed]
        if self.header == "by_name" and not separated:
            wrong.append("header: by_name")
        if wrong:
            raise ValueError(f"format {self.format} has no {', '.join(wrong)}")
        if self.escape is not None and self.quote_mark is None:
            raise ValueError("`escape` needs a `quote`")
        if self.quote_mark is not None and self.quote_mark in self.field_separator:
            raise ValueError("`quote` and `separator` must be different")

    def _check_columns(self) -> None:
        for column in self.columns:
            if self.format in SPARSE_FORMATS:
                self._check_sparse_column(column)
            elif self.format in (*_SEPARATED, "pattern"):
                if column.is_list and column.separator is None:
                    raise ValueError(f"list column {column.name!r} needs a separator")
                if column.field is not None and self.header != "by_name":
                    raise ValueError(
                        f"column {column.name!r}: `field` names a column of a header; set "
                        "`header: by_name`"
                    )

    def _check_sparse_column(self, column: ColumnConfig) -> None:
        parts = {k: v for k, v in _SPARSE_TYPES.items() if self._has_part(k)}
        if column.type not in parts.get(column.field_name, ()):
            raise ValueError(
                f"column {column.name!r}: {self.format} has "
                + ", ".join(f"{k} ({'|'.join(v)})" for k, v in parts.items())
            )
        if column.pair is not None or column.separator is not None:
            raise ValueError(f"column {column.name!r}: {self.format} has its own separators")

    def _has_part(self, part: str) -> bool:
        return part != "fields" or self.format == "libffm"

    def _check_days(self) -> None:
        in_path = DATE_FIELD in (self.path or "")
        if (self.path or "").count(DATE_FIELD) > 1:
            raise ValueError("`path` has {date} more than once; give the day one place")
        if self.days is None:
            return
        name = self.days.column
        column = next((c for c in self.columns if c.name == name), None)
        if not in_path and column is None:
            raise ValueError(
                "`days` needs {date} in `path`, or `days.column`, the name of a declared column"
            )
        if column is not None and column.type not in ("timestamp", "string", "int64"):
            raise ValueError(f"days.column: {name!r} must be a timestamp, a string or an int64")
        day = datetime.date(2001, 2, 3)
        try:
            same = datetime.datetime.strptime(day.strftime(self.days.format), self.days.format)
        except ValueError:
            same = None
        if same is None or same.date() != day:
            raise ValueError(
                f"days.format: {self.days.format!r} does not tell year, month and day, such as "
                "%Y-%m-%d or %Y%m%d"
            )

    @property
    def field_separator(self) -> str:
        """What stands between fields."""
        return self.separator or ("," if self.format == "csv" else "\t")

    @property
    def quote_mark(self) -> str | None:
        """What a field may be enclosed in; None: nothing, every separator separates."""
        return self.quote or ('"' if self.format == "csv" else None)

    @property
    def day_in_path(self) -> bool:
        """Whether files are found by the day in their path."""
        return DATE_FIELD in (self.path or "")

    @property
    def made_day_column(self) -> str | None:
        """The column that is made of the day in the path, or None."""
        name = self.days.column if self.days and self.day_in_path else None
        return None if name in {column.name for column in self.columns} else name

    @property
    def has_order(self) -> bool:
        """Whether rows have a place in the input: in a file they do, in a table they do not."""
        return self.path is not None

    @property
    def outputs(self) -> tuple[ColumnConfig, ...]:
        """Every column that the source gives: declared, or made of one or of the path."""
        made = [c.pair.as_column(c) for c in self.columns if c.pair is not None]
        if self.made_day_column:
            made.append(ColumnConfig(name=self.made_day_column, type="string"))
        return (*self.columns, *made)

    @property
    def column_types(self) -> dict[str, str]:
        """Type by column name, as read: a timestamp is int64."""
        return {column.name: column.read_type for column in self.outputs}

    def column(self, name: str) -> ColumnConfig | None:
        """Returns a column that the source gives, or None."""
        return next((column for column in self.outputs if column.name == name), None)


def _sparse_columns(kind: str) -> list[dict[str, Any]]:
    fields = [{"name": "fields", "type": "list<int64>", "minimum": 0}] if kind == "libffm" else []
    return [
        {"name": "label", "type": "float32"},
        *fields,
        {"name": "indices", "type": "list<int64>", "minimum": 0},
        {"name": "values", "type": "list<float32>"},
    ]

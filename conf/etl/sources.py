"""Declared sources: where rows are read from, their columns, days, and what counts as a bad row."""

from __future__ import annotations

import datetime
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from conf.config_base import Name, Named, Strict, StrictFinite
from conf.dates import UNITS_PER_SECOND
from conf.etl.java_patterns import check_time_pattern, count_groups
from conf.local_paths import check_below

ColumnType = Literal[
    "int64",
    "float32",
    "float64",
    "string",
    "bytes",
    "timestamp",
    "list<int64>",
    "list<float32>",
    "list<float64>",
    "list<string>",
]
# Spark type of a column once it is read; a timestamp becomes milliseconds since 1970, UTC.
SPARK_TYPES = {
    "int64": "bigint",
    "float32": "float",
    "float64": "double",
    "string": "string",
    "bytes": "binary",
    "timestamp": "bigint",
    "list<int64>": "array<bigint>",
    "list<float32>": "array<float>",
    "list<float64>": "array<double>",
    "list<string>": "array<string>",
}
EPOCH_UNITS = {"epoch_s": "s", "epoch_ms": "ms", "epoch_us": "us"}
NUMBER_TYPES = ("int64", "float32", "float64")
"""Types of columns of single numbers, as they are read: a timestamp is an int64."""
SCALAR_TYPES = (*NUMBER_TYPES, "string")
_FLOAT_TYPES = ("float32", "float64", "list<float32>", "list<float64>")
_TYPED_FORMATS = ("parquet", "orc", "avro", "table", "jdbc")
_BOUNDED_TYPES = ("int64", "list<int64>", *_FLOAT_TYPES)


def is_list_type(column_type: str) -> bool:
    """Whether a column of that type holds lists."""
    return column_type.startswith("list<")


PAIR_SEPARATOR = "_"


class ColumnConfig(Named, StrictFinite):
    """One declared column of a source.

    A value that does not parse as its type, is null although `nullable` is false, or lies
    outside `minimum`/`maximum`/`one_of`/`not_after` makes the row a bad row; the bounds of a list
    hold for each of its values.
    """

    type: ColumnType = Field(description="Its type.")
    field: str | None = Field(
        None,
        min_length=1,
        description="Its name in the input, where it is another: a column, a name in the header, "
        "a JSON key or path (`user.id`: the key of that name, else `id` in `user`), or a part of a "
        "libsvm line.",
    )
    nullable: bool = Field(False, description="Whether it may be null.")
    minimum: float | None = Field(None, description="Least value allowed; None: no bound.")
    maximum: float | None = Field(None, description="Greatest value allowed; None: no bound.")
    one_of: tuple[str, ...] | None = Field(
        None, description="The values that are allowed; None: all."
    )
    separator: str | None = Field(None, min_length=1, description="Separator inside a list column.")
    timestamp_format: str | None = Field(
        None,
        min_length=1,
        description="How timestamps are written: epoch_s, epoch_ms, epoch_us or a Java pattern; "
        "None: ISO 8601, and UTC where no zone is written. Fractions of a millisecond are dropped.",
    )
    unit: Literal["s", "ms"] | None = Field(
        None,
        description="Unit of the times in a column of whole numbers; None: seconds. A timestamp is "
        "in milliseconds once it is read.",
    )
    not_after: datetime.date | Literal["run_date", "now"] | None = Field(
        None,
        description="Last day of timestamps: a date, the run's last day, or the clock's day "
        "(then a rerun may differ).",
    )
    pair: Name | None = Field(
        None,
        description="Entries are `<value>` or `<value>_<second>`: the name of the column of second "
        "values, of the same type.",
    )
    pair_default: int | str | None = Field(
        None,
        description="Second value of an entry that is written without one; None: it has none. "
        "Lists, which hold no nulls, need one.",
    )

    @model_validator(mode="after")
    def _options_fit_the_type(self) -> ColumnConfig:
        where = f"column {self.name!r} of type {self.type}"
        if self.minimum is not None or self.maximum is not None:
            self._require(_BOUNDED_TYPES, f"{where} cannot have bounds")
        if self.one_of is not None and (self.is_list or self.type == "bytes"):
            raise ValueError(f"{where} cannot have `one_of`")
        if self.timestamp_format is not None or self.not_after is not None:
            self._require(("timestamp",), f"{where} cannot have `timestamp_format` or `not_after`")
        if self.unit is not None:
            self._require(("int64", "list<int64>"), f"{where} cannot have a `unit`")
        if self.timestamp_format is not None and self.timestamp_format not in EPOCH_UNITS:
            check_time_pattern(self.timestamp_format)
        if self.pair is not None:
            self._require(
                ("int64", "string", "list<int64>", "list<string>"), f"{where} cannot have a `pair`"
            )
            if self.one_of is not None or self.separator == PAIR_SEPARATOR:
                raise ValueError(f"{where}: a `pair` has the separator _, and no `one_of`")
            if self.is_list and self.pair_default is None:
                raise ValueError(
                    f"{where}: its pair {self.pair!r} needs a `pair_default` for entries without a "
                    "second value"
                )
            self._check_pair_default()
        elif self.pair_default is not None:
            raise ValueError(f"{where}: `pair_default` goes with `pair`")
        return self

    def _check_pair_default(self) -> None:
        default, expected = self.pair_default, int if self.element_type == "int64" else str
        if default is not None and not isinstance(default, expected):
            raise ValueError(f"column {self.name!r}: `pair_default` must be {self.element_type}")
        if isinstance(default, int) and not -(2**63) <= default < 2**63:
            raise ValueError(f"column {self.name!r}: `pair_default` is beyond int64")

    @property
    def second(self) -> ColumnConfig | None:
        """The column of second values, as if it had been declared beside this one."""
        if self.pair is None:
            return None
        nullable = self.nullable or self.pair_default is None
        return ColumnConfig(name=self.pair, type=self.type, nullable=nullable)

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
        return self.type in _FLOAT_TYPES

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


class DaysConfig(Strict):
    """The days of a source that belong to a run, and the checks of a day."""

    lookback_days: int = Field(
        0, ge=0, le=3660, description="Days read before the run's first: for histories."
    )
    format: str = Field("%Y-%m-%d", description="How a day is written, in strftime's terms.")
    column: Name | None = Field(
        None,
        description="A declared column: only rows of the run's days are read. Another name, "
        "where the path has {date}: a column that is made of it.",
    )
    allow_empty_days: bool = Field(False, description="Whether a day may have no row.")


_ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# `…//user:password@host`, `?password=…`, `;pwd=…`
_SECRET_IN_URL = re.compile(
    r"//[^/@]*:[^/@]*@|[?&;,(](user|password|passwd|pwd|secret|token)\w*=|:[^/@:]+/[^/@]+@",
    re.IGNORECASE,
)


def _check_jdbc(options: dict[str, str]) -> dict[str, str]:
    """Options of a database hold its place and its table, and no secret."""
    if not options.get("url", "").startswith("jdbc:") or not options.get("dbtable"):
        raise ValueError("`jdbc` needs `url`, jdbc:…, and `dbtable`, a table or (SELECT …) name")
    if _SECRET_IN_URL.search(options["url"]) or {"user", "password"} & {k.lower() for k in options}:
        raise ValueError("`jdbc` holds no credentials; name user_env and password_env")
    for name in ("user_env", "password_env"):
        if not _ENVIRONMENT_NAME.fullmatch(options.get(name, "X")):
            raise ValueError(f"{name} is no name of an environment variable")
    return options


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
TextEncoding = Literal[
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
SEPARATED_FORMATS = ("delimited", "csv")
_TEXT_FORMATS = (*SEPARATED_FORMATS, "pattern", "json", *SPARSE_FORMATS)
_SPARSE_TYPES = {
    "label": ("float32", "float64", "int64"),
    "indices": ("list<int64>",),
    "values": ("list<float32>",),
    "fields": ("list<int64>",),
    "qid": ("int64",),
}


class SourceConfig(Strict):
    """One input with a declared schema: text lines, files that have columns, a table."""

    format: SourceFormat = Field("delimited", description="How the input is written.")
    path: str | None = Field(
        None,
        min_length=1,
        description="File, directory or glob; relative to `data_dir`. `{date}` in it stands for a "
        "day of the run.",
    )
    table: str | None = Field(None, min_length=1, description="Name in a catalogue of the session.")
    jdbc: Annotated[dict[str, str], AfterValidator(_check_jdbc)] | None = Field(
        None,
        description="Options of Spark's JDBC source: `url`, `dbtable` (a table, or `(SELECT …) "
        "name`), `fetchsize` (10000 if left out), `partitionColumn` and others. `user_env` and "
        "`password_env` name environment variables that hold the credentials.",
    )
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
    encoding: TextEncoding = Field("utf-8", description="Encoding of text.")
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
    change_check: Literal["checksum"] | None = Field(
        "checksum",
        description="How a run notices that a table without versions has changed: "
        "its declared columns are read for a checksum when the run begins and when it ends. "
        "None: not at all; each run builds anew.",
    )
    max_bad_rows: float = Field(
        0.01,
        ge=0,
        le=1,
        description="Share of rows that may not fit the declared schema: these are quarantined, "
        "with their reason. More stop the build.",
    )

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
        # Spark compares names without their case unless a setting says otherwise.
        names = [column.name.lower() for column in self.outputs]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"columns declared twice: {', '.join(repeated)}")
        if self.key is not None and self.key not in self.column_types:
            raise ValueError(f"key column {self.key!r} is not declared")
        if (self.format == "pattern") != (self.pattern is not None):
            raise ValueError("`pattern` goes with `format: pattern`, and only with it")
        if self.pattern is not None and (groups := count_groups(self.pattern)) < len(self.columns):
            raise ValueError(
                f"pattern: {groups} group{'s' * (groups != 1)} for {len(self.columns)} columns; "
                "write a group (…) per column, (?:…) around what is none"
            )
        self._check_origin()
        self._check_text_options()
        self._check_columns()
        self._check_days()
        return self

    def _check_origin(self) -> None:
        others = {"table": self.table, "jdbc": self.jdbc}
        expected = self.format if self.format in others else "path"
        given = [k for k, v in {"path": self.path, **others}.items() if v is not None]
        if given != [expected]:
            raise ValueError(
                f"format {self.format} is read from `{expected}`, and from nothing else; "
                f"given: {', '.join(given) or 'nothing'}"
            )

    def _check_text_options(self) -> None:
        separated = self.format in SEPARATED_FORMATS
        only = {
            "separator": (separated or self.format == "pattern", self.separator is not None),
            "quote": (separated, self.quote is not None),
            "escape": (separated, self.escape is not None),
            "null_values": (separated or self.format == "pattern", bool(self.null_values)),
            "header": (separated or self.format == "pattern", self.header is not False),
            "encoding": (self.format in _TEXT_FORMATS, self.encoding != "utf-8"),
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
            if column.type == "bytes" and self.format not in _TYPED_FORMATS:
                raise ValueError(
                    f"column {column.name!r}: text has no bytes; {', '.join(_TYPED_FORMATS)} have"
                )
            if self.format in SPARSE_FORMATS:
                self._check_sparse_column(column)
            elif self.format in (*SEPARATED_FORMATS, "pattern"):
                if column.is_list and column.separator is None:
                    raise ValueError(f"list column {column.name!r} needs a separator")
                if column.field is not None and self.header != "by_name":
                    raise ValueError(
                        f"column {column.name!r}: `field` names a column of a header; set "
                        "`header: by_name`"
                    )

    def _check_sparse_column(self, column: ColumnConfig) -> None:
        names = ("label", *self.pair_parts, "qid")
        parts = {name: _SPARSE_TYPES[name] for name in names}
        if column.type not in parts.get(column.field_name, ()):
            raise ValueError(
                f"column {column.name!r}: {self.format} has "
                + ", ".join(f"{k} ({'|'.join(v)})" for k, v in parts.items())
            )
        if column.pair is not None or column.separator is not None:
            raise ValueError(f"column {column.name!r}: {self.format} has its own separators")

    def _check_days(self) -> None:
        in_path = DATE_FIELD in (self.path or "")
        day_format = "" if self.days is None else self.days.format
        check_below((self.path or "").replace(DATE_FIELD, day_format))
        if (self.path or "").count(DATE_FIELD) > 1:
            raise ValueError("`path` has {date} more than once; name the day once")
        if self.days is None:
            return
        name, column = self.days.column, self.day_column
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
        is_number = column is not None and column.type == "int64" and not in_path
        if is_number and not day.strftime(self.days.format).isdigit():
            raise ValueError(
                f"days.format: {self.days.format!r} gives no whole number, and {name!r} is int64; "
                "write %Y%m%d, or as the column has it in digits alone"
            )

    @property
    def field_separator(self) -> str:
        """Text between fields."""
        return self.separator or ("," if self.format == "csv" else "\t")

    @property
    def quote_mark(self) -> str | None:
        """Mark that a field may be enclosed in; None: every separator separates."""
        return self.quote or ('"' if self.format == "csv" else None)

    @property
    def pair_parts(self) -> tuple[str, ...]:
        """What the pairs of a sparse format hold, by the columns that they make."""
        return ("fields",) * (self.format == "libffm") + ("indices", "values")

    @property
    def day_column(self) -> ColumnConfig | None:
        """The declared column that holds the day of a row, or None."""
        name = self.days.column if self.days else None
        return next((column for column in self.columns if column.name == name), None)

    @property
    def day_in_path(self) -> bool:
        """Whether files are found by the day in their path."""
        return DATE_FIELD in (self.path or "")

    @property
    def made_day_column(self) -> str | None:
        """The column that is made of the day in the path, or None."""
        return self.days.column if self.days and self.day_in_path and not self.day_column else None

    @property
    def has_order(self) -> bool:
        """Whether rows have an order in the input: in a file they do, in a table they do not."""
        return self.path is not None

    @property
    def outputs(self) -> tuple[ColumnConfig, ...]:
        """Every column that the source gives: declared, or made of one or of the path."""
        made = [second for c in self.columns if (second := c.second) is not None]
        if self.made_day_column:
            made.append(ColumnConfig(name=self.made_day_column, type="string"))
        return (*self.columns, *made)

    @property
    def column_types(self) -> dict[str, str]:
        """Type by column name, as read: a timestamp is int64."""
        return {column.name: column.read_type for column in self.outputs}

    def find_field(self, name: str) -> str:
        """Returns the name in the input of what a column is read from."""
        fields = {c.name: c.field_name for c in self.columns}
        fields |= {c.pair: c.field_name for c in self.columns if c.pair is not None}
        return fields.get(name, name)

    def time_unit(self, name: str) -> str:
        """Returns the unit of the times in a column as it is read: `s` or `ms`."""
        column = self.column(name)
        is_timestamp = column is not None and column.element_type == "timestamp"
        return "ms" if is_timestamp else (column and column.unit) or "s"

    def ms_per_unit(self, name: str) -> int:
        """Returns the milliseconds of a unit of the times in a column."""
        return 1000 // UNITS_PER_SECOND[self.time_unit(name)]

    def column(self, name: str) -> ColumnConfig | None:
        """Returns a column that the source gives, or None."""
        return next((column for column in self.outputs if column.name == name), None)


def _sparse_columns(kind: str) -> list[dict[str, Any]]:
    fields = ["fields"] * (kind == "libffm")
    indices = [{"name": n, "type": "list<int64>", "minimum": 0} for n in (*fields, "indices")]
    label, values = (
        {"name": "label", "type": "float32"},
        {"name": "values", "type": "list<float32>"},
    )
    return [label, *indices, values]

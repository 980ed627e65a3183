"""A source as read, and the columns that keep its books."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as F

from conf.etl.sources import SourceConfig
from conf.manifest import InputFile

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from etl.sources.files import RowDays

ORDER_COLUMN = "__order"
REASON_COLUMN = "__reason"
LINE_COLUMN = "__line"
FILE_COLUMN = "__file"
NEW_COLUMN = "__new"
REPEATED_HEADER = "repeated_header"
COLUMN_FORMATS = ("parquet", "orc", "avro")
"""Formats of files that have columns, not lines."""

Fault = tuple["Column", str]
"""A condition that makes a row a bad row, and the reason that the row then has."""


@dataclass(frozen=True)
class Reading:
    """What is read of a source; a table has no files.

    `folders` are by field the texts of columns that folders give, such as `country=DE`; `days`
    those of the run, where a column tells them.
    """

    name: str
    config: SourceConfig
    days: RowDays | None
    files: tuple[InputFile, ...]
    folders: Mapping[str, Column]


@dataclass(frozen=True)
class Source:
    """A source as read: parsed rows, and why the others did not parse.

    `rows` are declared columns plus `__order` (position in the input), `__reason` (null for good
    rows), `__line` (the text, or the row as JSON), `__file` and, for JSON lines, `__new` (keys that
    are not declared). The `headers`, one per file or none, are among them. `nullable` columns
    should not be null in every row; `asked` are further aggregates over the good rows.
    """

    name: str
    rows: DataFrame
    files: tuple[InputFile, ...]
    headers: int = 0
    nullable: tuple[str, ...] = ()
    asked: Mapping[str, Column] = field(default_factory=dict)

    @property
    def good(self) -> DataFrame:
        """Rows that fit the declared schema, without the bookkeeping but `__order`."""
        return self.rows.where(F.col(REASON_COLUMN).isNull()).drop(
            REASON_COLUMN, LINE_COLUMN, FILE_COLUMN, NEW_COLUMN
        )

    @property
    def bad(self) -> DataFrame:
        """Rows that do not: file, line, reason."""
        bad = self.rows.where(F.col(REASON_COLUMN).isNotNull())
        if self.headers:
            # The first of its kind is the header. Only bad rows are sorted for that.
            same = Window.partitionBy(FILE_COLUMN, REASON_COLUMN).orderBy(ORDER_COLUMN)
            header = (F.col(REASON_COLUMN) == REPEATED_HEADER) & (F.col("__rank") == 1)
            bad = bad.withColumn("__rank", F.row_number().over(same)).where(~header)
        return bad.select(
            F.col(FILE_COLUMN).alias("file"),
            F.col(LINE_COLUMN).alias("line"),
            F.col(REASON_COLUMN).alias("reason"),
        )


@dataclass(frozen=True)
class ParsedColumn:
    """A declared column on its way in: null where there is no value, or it does not parse.

    `present` says whether the input holds something there; `one_of` is held against `text`.
    """

    value: Column
    present: Column
    text: Column
    faults: tuple[Fault, ...] = ()


@dataclass(frozen=True)
class ParsedRows:
    """The rows of an input, taken apart.

    `frame` has `__line`, `__file` and, where each row has keys of its own, `__new`. `faults` make a
    whole row a bad row, in the order of the checks.
    """

    frame: DataFrame
    columns: dict[str, ParsedColumn]
    faults: tuple[Fault, ...] = ()

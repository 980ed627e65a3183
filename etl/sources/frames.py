"""Frames with columns of their own taken apart by declared name, path and type."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pyspark.sql import functions as F
from pyspark.sql import types as T

from conf.dates import DateRange
from conf.errors import InputDataError, did_you_mean
from conf.etl import ColumnConfig, SourceConfig
from etl.sources.casts import cast_cells
from etl.sources.day_rows import rows_of_days
from etl.sources.source import FILE_COLUMN, LINE_COLUMN, Cell, Layout

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

Field = tuple["Column", T.DataType]
_OWN = (FILE_COLUMN, LINE_COLUMN, "_metadata")


def lay_out_frame(
    name: str,
    config: SourceConfig,
    frame: DataFrame,
    others: Iterable[DataFrame],
    dates: DateRange | None,
    order: Column | None,
) -> Layout:
    """Takes a frame apart into the declared columns.

    Args:
        name: The source's name.
        config: Its declaration.
        frame: Its rows, with `__file`.
        others: Further frames of the source: a column that one of them has is not missing here,
            its rows here are null.
        dates: The run's days, where the source has a column of days.
        order: Position in the input; None: by content, so that it is the same in every run.

    Raises:
        InputDataError: A declared column is not there, or has a type that cannot be read so.
    """
    cells: dict[str, Cell] = {}
    whole = F.struct(*[_column(field) for field in frame.schema.fieldNames() if field not in _OWN])
    for column in config.columns:
        field = find_field(frame.schema, column.field_name)
        if field is None:
            if not any(find_field(other.schema, column.field_name) for other in others):
                raise _missing(name, column, frame)
            field = F.lit(None).cast("string"), T.StringType()
        raw, found = field
        if dates is not None and config.days and config.days.column == column.name:
            frame = rows_of_days(frame, column, config.days, dates, raw, found)
        cells |= cast_cells(name, column, raw, found)
    if order is None:
        content = F.xxhash64(*[cell.value for cell in cells.values()])
        place = F.lit(0).cast("bigint").alias("block")
        order = F.struct(F.lit(name).alias("file"), place, content.alias("line"))
    return Layout(frame.withColumn(LINE_COLUMN, F.to_json(whole)), cells, (), order)


def undeclared_fields(config: SourceConfig, frames: Iterable[DataFrame]) -> list[str]:
    """Names of columns that the input has and the source does not declare."""
    asked = {column.field_name.lower() for column in config.columns}
    asked |= {name.split(".")[0] for name in asked}
    names = {name for frame in frames for name in frame.schema.fieldNames() if name not in _OWN}
    return sorted(name for name in names if name.lower() not in asked)


def find_field(schema: T.StructType, name: str) -> Field | None:
    """Finds a column by its name, whatever its case, or by a path into structs."""
    exact = [field for field in schema if field.name == name]
    near = exact or [field for field in schema if field.name.lower() == name.lower()]
    if len(near) == 1:
        return _column(near[0].name), near[0].dataType
    head, dot, rest = name.partition(".")
    struct = next((f for f in schema if f.name == head), None) if dot else None
    if struct is None or not isinstance(struct.dataType, T.StructType):
        return None
    inner = find_field(struct.dataType, rest)
    if inner is None:
        return None
    path = _column(head)
    for key in rest.split("."):
        path = path[key]
    return path, inner[1]


def _column(name: str) -> Column:
    return F.col("`" + name.replace("`", "``") + "`")


def _missing(name: str, column: ColumnConfig, frame: DataFrame) -> InputDataError:
    names = [field for field in frame.schema.fieldNames() if field not in _OWN]
    return InputDataError(
        f"source {name!r}: a declared column is missing",
        received=f"no column {column.field_name!r}",
        allowed=", ".join(names),
        fix=f"{did_you_mean(column.field_name, names)}; correct sources.{name}.columns "
        "(name or field), or mend the input",
    )

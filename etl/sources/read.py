"""Reads a source of any format lazily: each row with its values, or the reason why it is bad."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from conf.dates import DateRange
from conf.etl.sources import SPARK_TYPES, SPARSE_FORMATS, ColumnConfig, SourceConfig
from etl.sources.bad_rows import (
    check_columns,
    column_faults,
    find_last_day,
    first_reason,
    nan_as_missing,
)
from etl.sources.files import check_empty_days, check_files, find_row_days, list_files
from etl.sources.frames import lay_out_frames, read_column_files
from etl.sources.source import (
    COLUMN_FORMATS,
    FILE_COLUMN,
    LINE_COLUMN,
    NEW_COLUMN,
    ORDER_COLUMN,
    REASON_COLUMN,
    ParsedColumn,
    ParsedRows,
    Reading,
    Source,
)
from etl.sources.tables import read_table
from etl.sources.text_files import (
    TextLayout,
    file_order,
    find_layouts,
    line_faults,
    read_lines,
    value_of_path,
)
from etl.sources.text_formats import parse_json_lines, split_lines, split_sparse_lines

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


def read_source(
    spark: SparkSession,
    name: str,
    config: SourceConfig,
    data_dir: str,
    dates: DateRange | None = None,
    optional: Collection[str] = (),
) -> Source:
    """Reads a source; nothing is scanned but, where days are a column of the input, that.

    `optional` are declared columns that may be null in any row, or missing in the input or some of
    its files: they are null there.
    """
    nullable = tuple(c.name for c in config.columns if c.nullable and c.name not in optional)
    columns = tuple(_settle(column, dates, optional) for column in config.columns)
    config = config.model_copy(update={"columns": columns})
    listing = list_files(name, config, data_dir, dates)
    files, texts = check_files(listing, dates), listing.folder_texts()
    folders = {field: value_of_path(texts[field], F.col(FILE_COLUMN)) for field in texts}
    reading = Reading(name, config, find_row_days(config, dates), files, folders)
    order = file_order(name, files) if files else None
    parts = (_finish(reading, rows, order) for rows in _lay_out(spark, reading, optional))
    rows = reduce(lambda one, other: one.unionByName(other), parts)
    if reading.days is not None and not (config.day_in_path or reading.days.allow_empty):
        check_empty_days(name, config, reading.days.find_empty(rows))
    headers = sum(file.bytes > 0 for file in files) if config.header else 0
    return Source(name, rows, files, headers, nullable)


def _settle(
    column: ColumnConfig, dates: DateRange | None, optional: Collection[str]
) -> ColumnConfig:
    """The column as this run reads it."""
    last = None if column.not_after is None else find_last_day(column, dates)
    nullable = column.nullable or column.name in optional
    return column.model_copy(update={"nullable": nullable, "not_after": last})


def _lay_out(
    spark: SparkSession, reading: Reading, optional: Collection[str]
) -> Iterator[ParsedRows]:
    """The rows of an input, taken apart; those of files with other columns by themselves."""
    name, config = reading.name, reading.config
    if config.format in COLUMN_FORMATS:
        yield from lay_out_frames(reading, read_column_files(spark, reading), optional)
    elif config.path is None:
        yield from lay_out_frames(reading, [read_table(spark, name, config)], optional)
    else:
        layouts = find_layouts(spark, reading, optional)
        found = dict.fromkeys(field for layout in layouts for field in layout.fields)
        declared = {column.field_name for column in config.columns}
        check_columns(name, config, [field for field in found if field not in declared])
        for layout in layouts:
            yield _lay_out_lines(spark, reading, layout)


def _lay_out_lines(spark: SparkSession, reading: Reading, layout: TextLayout) -> ParsedRows:
    config = reading.config
    lines = read_lines(spark, config, layout.files)
    if config.format == "json":
        rows = parse_json_lines(lines, config, reading.folders)
    elif config.format in SPARSE_FORMATS:
        rows = split_sparse_lines(lines, config)
    else:
        rows = split_lines(lines, config, layout.fields, reading.folders)
    return replace(rows, faults=(*line_faults(config, layout.header), *rows.faults))


def _finish(reading: Reading, rows: ParsedRows, order: Column | None) -> DataFrame:
    """The declared columns, the reason and the books of each row of the run's days."""
    config, columns, frame = reading.config, dict(rows.columns), rows.frame
    if (made := config.made_day_column) is not None:
        day = reading.folders[made]
        columns[made] = ParsedColumn(day, day.isNotNull(), day)
    if (days := reading.days) is not None and not config.day_in_path:
        inside = days.is_inside(columns[days.column.name].value)
        frame = frame.where(F.coalesce(inside, F.lit(True)))
    faults = list(rows.faults)
    # A projection of their own: each value is parsed once, however many checks ask for it.
    frame = frame.withColumns({f"__value_{name}": part.value for name, part in columns.items()})
    values = []
    for column in config.outputs:
        parsed = replace(columns[column.name], value=F.col(f"__value_{column.name}"))
        parsed = nan_as_missing(column, parsed)
        faults += column_faults(column, parsed)
        values.append(parsed.value.cast(SPARK_TYPES[column.type]).alias(column.name))
    if order is None:  # By the content, so that the order is the same in every run.
        content = F.xxhash64(*[F.col(f"__value_{name}") for name in columns]).alias("line")
        place = F.lit(0).cast("bigint").alias("block")
        order = F.struct(F.lit(reading.name).alias("file"), place, content)
    return frame.select(
        *values,
        FILE_COLUMN,
        LINE_COLUMN,
        first_reason(faults).alias(REASON_COLUMN),
        *(name for name in frame.columns if name == NEW_COLUMN),
        order.alias(ORDER_COLUMN),
    )

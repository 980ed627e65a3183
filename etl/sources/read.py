"""Reads a source of any format lazily: each row with its values, or the reason why it is bad."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from conf.dates import DateRange
from conf.etl.sources import SPARK_TYPES, SPARSE_FORMATS, SourceConfig
from etl.sources.bad_rows import check_new_columns, column_faults, first_reason, nan_as_missing
from etl.sources.files import (
    Listing,
    check_days_of_rows,
    check_files,
    list_files,
    value_in_days,
)
from etl.sources.frames import (
    find_lackable,
    lay_out_frame,
    read_column_files,
    undeclared_fields,
)
from etl.sources.source import (
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

_COLUMN_FILES = ("parquet", "orc", "avro")


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

    Raises:
        InputDataError: No such file, nothing in it, a header, column or type that does not fit, or
            a day without a row.
        ConfigError: The session cannot read the format, or the run lacks a date.
        UpstreamNotReadyError: A database does not answer.
    """
    config = _make_nullable(config, optional)
    listing = list_files(name, config, data_dir, dates)
    folders = {
        field: value_of_path(texts, F.col(FILE_COLUMN))
        for field, texts in listing.folder_texts().items()
    }
    reading = Reading(name, config, dates, check_files(listing, dates), folders)
    made = _made_day(listing)
    parsed = reduce(
        lambda one, other: one.unionByName(other),
        (
            _finish(reading, replace(rows, columns=rows.columns | made))
            for rows in _lay_out(spark, reading, optional)
        ),
    )
    day = config.day_column
    if dates is not None and config.days and day is not None and not config.day_in_path:
        check_days_of_rows(name, config.days, day, parsed, dates)
    headers = sum(file.bytes > 0 for file in reading.files) if config.header else 0
    nullable = tuple(c.name for c in config.columns if c.nullable and c.name not in optional)
    return Source(name, parsed, reading.files, headers, nullable)


def _made_day(listing: Listing) -> dict[str, ParsedColumn]:
    """The column that is made of the day in the path, where there is one."""
    name = listing.config.made_day_column
    if name is None:
        return {}
    day = value_of_path(listing.day_texts(), F.col(FILE_COLUMN))
    return {name: ParsedColumn(day, day.isNotNull(), day)}


def _make_nullable(config: SourceConfig, optional: Collection[str]) -> SourceConfig:
    columns = tuple(
        column.model_copy(update={"nullable": True}) if column.name in optional else column
        for column in config.columns
    )
    return config.model_copy(update={"columns": columns}) if optional else config


def _lay_out(
    spark: SparkSession, reading: Reading, optional: Collection[str]
) -> Iterator[ParsedRows]:
    """The rows of an input, taken apart; those of files with other columns by themselves."""
    name, config = reading.name, reading.config
    order = file_order(name, reading.files) if reading.files else None
    if order is not None and config.format not in _COLUMN_FILES:
        layouts = find_layouts(spark, reading, optional)
        _check_new_fields(name, config, layouts)
        for layout in layouts:
            yield _lay_out_lines(spark, reading, layout, order)
        return
    if order is None:
        frames = [read_table(spark, name, config)]
    else:
        frames = read_column_files(spark, reading)
    check_new_columns(name, config, undeclared_fields(config, frames))
    lackable = find_lackable(config, frames, optional)
    for frame in frames:
        yield lay_out_frame(reading, frame, lackable, order)


def _check_new_fields(name: str, config: SourceConfig, layouts: Sequence[TextLayout]) -> None:
    declared = {column.field_name for column in config.columns}
    found = dict.fromkeys(field for layout in layouts for field in layout.fields)
    check_new_columns(name, config, [field for field in found if field not in declared])


def _lay_out_lines(
    spark: SparkSession, reading: Reading, layout: TextLayout, order: Column
) -> ParsedRows:
    config, new = reading.config, None
    lines = read_lines(spark, config, layout.files)
    if config.format == "json":
        frame, columns, shape, keys = parse_json_lines(lines, config, reading.folders)
        new = keys if config.new_columns != "ignore" else None
    elif config.format in SPARSE_FORMATS:
        frame, columns, shape = split_sparse_lines(lines, config)
    else:
        frame, columns, shape = split_lines(lines, config, layout.fields, reading.folders)
    return ParsedRows(frame, columns, (*line_faults(config, layout.header), *shape), order, new)


def _finish(reading: Reading, rows: ParsedRows) -> DataFrame:
    """The declared columns, the reason and the books of each row of the run's days."""
    config, dates = reading.config, reading.dates
    columns, frame, day = rows.columns, rows.frame, config.day_column
    if config.days and dates is not None and day is not None and not config.day_in_path:
        inside = value_in_days(day, config.days, dates, columns[day.name].value)
        frame = frame.where(F.coalesce(inside, F.lit(True)))
    faults = list(rows.faults)
    # A projection of their own: each value is parsed once, however many checks ask for it.
    values = {f"__value_{column.name}": columns[column.name].value for column in config.outputs}
    frame = frame.withColumns(values)
    made = []
    for column in config.outputs:
        parsed = replace(columns[column.name], value=F.col(f"__value_{column.name}"))
        parsed = nan_as_missing(column, parsed)
        faults += column_faults(column, parsed, dates)
        made.append(parsed.value.cast(SPARK_TYPES[column.type]).alias(column.name))
    return frame.select(
        *made,
        FILE_COLUMN,
        LINE_COLUMN,
        first_reason(faults).alias(REASON_COLUMN),
        *([] if rows.new is None else [rows.new.alias(NEW_COLUMN)]),
        rows.order.alias(ORDER_COLUMN),
    )

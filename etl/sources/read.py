"""Reads a source of any format lazily: each row with its values, or the reason why it is bad."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from conf.dates import DateRange
from conf.errors import InputDataError
from conf.etl.sources import SEPARATED_FORMATS, SPARK_TYPES, SPARSE_FORMATS, SourceConfig
from conf.manifest import InputFile
from etl.sources.bad_rows import (
    check_new_columns,
    column_faults,
    first_reason,
    nan_as_missing,
)
from etl.sources.days import check_days_of_rows, value_in_days
from etl.sources.files import find_files, find_files_by_day
from etl.sources.frames import fill_fields, lay_out_frame, read_column_files, undeclared_fields
from etl.sources.source import (
    FILE_COLUMN,
    LINE_COLUMN,
    NEW_COLUMN,
    ORDER_COLUMN,
    REASON_COLUMN,
    ParsedColumn,
    ParsedRows,
    Source,
)
from etl.sources.tables import read_catalogue_table, read_jdbc
from etl.sources.text_files import (
    are_named,
    file_order,
    header_names,
    line_faults,
    read_headers,
    read_lines,
    split_by_fields,
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
    """Reads a source lazily.

    Args:
        spark: Session.
        name: The source's name in the config.
        config: Its declaration.
        data_dir: Directory that a relative path starts from.
        dates: The run's days; None: a dated input is read whole.
        optional: Declared columns that may be null in any row, or missing in the input or some of
            its files: they are null there.

    Returns:
        The source; nothing has been scanned yet but, where days are a column of the input, that.

    Raises:
        InputDataError: No such file, nothing in it, a header, column or type that does not fit, or
            a day without a row.
        ConfigError: The session cannot read the format, or the run lacks a date.
        UpstreamNotReadyError: A database does not answer.
    """
    config = _make_nullable(config, optional)
    files = find_files(name, config, data_dir, dates)
    if config.format in _COLUMN_FILES:
        frames = read_column_files(spark, name, config, files)
        layouts = _lay_out_frames(name, config, frames, files, dates, optional)
    elif config.table is not None:
        table = read_catalogue_table(spark, name, config.table).withColumn(
            FILE_COLUMN, F.lit(config.table)
        )
        layouts = _lay_out_frames(name, config, (table,), files, dates, optional)
    elif config.jdbc is not None:
        rows = read_jdbc(spark, name, config.jdbc).withColumn(FILE_COLUMN, F.lit(config.jdbc.url))
        layouts = _lay_out_frames(name, config, (rows,), files, dates, optional)
    else:
        layouts = _lay_out_text(spark, name, config, files, optional)
    days = _made_days(name, config, data_dir, dates)
    parsed = reduce(
        lambda one, other: one.unionByName(other),
        (_finish(config, layout, dates, days) for layout in layouts),
    )
    column = config.column(config.days.column) if config.days and config.days.column else None
    if dates is not None and config.days and column is not None and not config.day_in_path:
        check_days_of_rows(name, config.days, column, parsed, dates)
    headers = sum(file.bytes > 0 for file in files) if config.header else 0
    nullable = tuple(c.name for c in config.columns if c.nullable and c.name not in optional)
    counted = nullable if config.all_null_columns != "ignore" else ()
    return Source(name, parsed, files, headers, counted)


def _make_nullable(config: SourceConfig, optional: Collection[str]) -> SourceConfig:
    columns = tuple(
        column.model_copy(update={"nullable": True}) if column.name in optional else column
        for column in config.columns
    )
    return config.model_copy(update={"columns": columns}) if optional else config


def _lay_out_frames(
    name: str,
    config: SourceConfig,
    frames: tuple[DataFrame, ...],
    files: Sequence[InputFile],
    dates: DateRange | None,
    optional: Collection[str],
) -> tuple[ParsedRows, ...]:
    check_new_columns(name, config, undeclared_fields(config, frames))
    order = file_order(name, files) if files else None
    fields = {column.field_name for column in config.columns if column.name in optional}
    whole = fill_fields(frames, fields)
    return tuple(lay_out_frame(name, config, frame, whole, dates, order) for frame in whole)


def _lay_out_text(
    spark: SparkSession,
    name: str,
    config: SourceConfig,
    files: Sequence[InputFile],
    optional: Collection[str],
) -> tuple[ParsedRows, ...]:
    """One layout, or where columns are found by name one for each header.

    Without a header, files that have as many fields as the source has columns but for the optional
    ones are laid out without these.
    """
    order = file_order(name, files)
    if not config.header:
        lacking: Sequence[InputFile] = ()
        others = files
        if optional and config.format in SEPARATED_FORMATS:
            lacking, others = split_by_fields(spark, name, config, files, optional)
        names = [column.field_name for column in config.columns if column.name not in optional]
        layouts = [_lay_out_lines(spark, config, lacking, None, order, names)] if lacking else []
        if others:
            layouts.append(_lay_out_lines(spark, config, others, None, order))
        return tuple(layouts)
    if optional and config.header is True and are_named(spark, name, config, files, optional):
        config = config.model_copy(update={"header": "by_name"})
    headers = read_headers(spark, name, config, files, optional)
    if config.header == "by_name":
        declared = {column.field_name for column in config.columns}
        fields = dict.fromkeys(field for line in headers for field in header_names(config, line))
        check_new_columns(name, config, [field for field in fields if field not in declared])
    return tuple(
        _lay_out_lines(spark, config, group, header, order) for header, group in headers.items()
    )


def _lay_out_lines(
    spark: SparkSession,
    config: SourceConfig,
    files: Sequence[InputFile],
    header: bytes | None,
    order: Column,
    names: list[str] | None = None,
) -> ParsedRows:
    """One layout; `names` are those of the fields, where not all columns have one."""
    lines = read_lines(spark, config, files)
    faults = line_faults(config, header)
    new = None
    if config.format == "json":
        frame, columns, shape, keys = parse_json_lines(lines, config)
        new = keys if config.new_columns != "ignore" else None
    elif config.format in SPARSE_FORMATS:
        frame, columns, shape = split_sparse_lines(lines, config)
    else:
        if header is not None and config.header == "by_name":
            names = header_names(config, header)
        frame, columns, shape = split_lines(lines, config, names)
    return ParsedRows(frame, columns, (*faults, *shape), order, new)


def _finish(
    config: SourceConfig, layout: ParsedRows, dates: DateRange | None, days: dict[str, str]
) -> DataFrame:
    """The declared columns, the reason and the books of each row of the run's days."""
    columns, frame = dict(layout.columns), layout.frame
    if config.days and dates is not None and not config.day_in_path:
        column = next(column for column in config.columns if column.name == config.days.column)
        inside = value_in_days(column, config.days, dates, columns[column.name].value)
        frame = frame.where(F.coalesce(inside, F.lit(True)))
    if config.made_day_column:
        day = _day_of_file(days)
        columns[config.made_day_column] = ParsedColumn(day, day.isNotNull(), day)
    faults = list(layout.faults)
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
        *([] if layout.new is None else [layout.new.alias(NEW_COLUMN)]),
        layout.order.alias(ORDER_COLUMN),
    )


def _made_days(
    name: str, config: SourceConfig, data_dir: str, dates: DateRange | None
) -> dict[str, str]:
    """The day of each folder, where a column is to be made of it."""
    if config.made_day_column is None:
        return {}
    days: dict[str, str] = {}
    for day, files in find_files_by_day(name, config, data_dir, dates).items():
        for file in files:
            if days.setdefault(str(file.parent), str(day)) != str(day):
                raise InputDataError(
                    f"source {name!r}: a folder has files of two days, and `days.column` tells "
                    "days apart by folder",
                    received=f"{days[str(file.parent)]} and {day} in {file.parent}",
                    fix="give each day a folder, as in logs/date={date}/part.tsv, or leave "
                    "`days.column` out",
                )
    return days


def _day_of_file(days: dict[str, str]) -> Column:
    """The day of a row's folder; a path is decoded from the URI that Spark gives."""
    folder = F.regexp_replace(FILE_COLUMN, "/[^/]*$", "")
    folder = F.regexp_replace(folder, "^file:/+", "/")
    # In a URI a plus is a plus; only in a query does it stand for a space.
    plain = F.try_url_decode(F.replace(folder, F.lit("+"), F.lit("%2B")))
    entries = [F.lit(text) for entry in days.items() for text in entry]
    return F.try_element_at(F.create_map(*entries), plain)

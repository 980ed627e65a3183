"""Reads a source of any format lazily: each row with its values, or the reason why it is bad."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from types import MappingProxyType
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
from etl.sources.files import find_files, find_files_by_day, find_folder_values
from etl.sources.frames import fill_fields, lay_out_frame, read_column_files, undeclared_fields
from etl.sources.source import (
    FILE_COLUMN,
    LINE_COLUMN,
    NEW_COLUMN,
    ORDER_COLUMN,
    REASON_COLUMN,
    FolderTexts,
    ParsedColumn,
    ParsedRows,
    Source,
)
from etl.sources.tables import read_catalogue_table, read_jdbc
from etl.sources.text_files import (
    are_named,
    file_order,
    group_by_fields,
    header_names,
    line_faults,
    read_headers,
    read_lines,
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
    by_folder = find_folder_values(name, config, data_dir, dates) if files else {}
    folders = {field: _value_of_folder(values) for field, values in by_folder.items()}
    if config.format in _COLUMN_FILES:
        frames = read_column_files(spark, name, config, files)
        layouts = _lay_out_frames(name, config, frames, files, dates, optional, folders)
    elif config.table is not None:
        table = read_catalogue_table(spark, name, config.table).withColumn(
            FILE_COLUMN, F.lit(config.table)
        )
        layouts = _lay_out_frames(name, config, (table,), files, dates, optional)
    elif config.jdbc is not None:
        rows = read_jdbc(spark, name, config.jdbc).withColumn(FILE_COLUMN, F.lit(config.jdbc.url))
        layouts = _lay_out_frames(name, config, (rows,), files, dates, optional)
    else:
        layouts = _lay_out_text(spark, name, config, files, optional, folders)
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
    folders: FolderTexts = MappingProxyType({}),
) -> tuple[ParsedRows, ...]:
    check_new_columns(name, config, undeclared_fields(config, frames))
    order = file_order(name, files) if files else None
    fields = {column.field_name for column in config.columns if column.name in optional}
    whole = fill_fields(frames, fields - folders.keys())
    return tuple(
        lay_out_frame(name, config, frame, whole, dates, order, folders) for frame in whole
    )


def _lay_out_text(
    spark: SparkSession,
    name: str,
    config: SourceConfig,
    files: Sequence[InputFile],
    optional: Collection[str],
    folders: FolderTexts,
) -> tuple[ParsedRows, ...]:
    """One layout, or where columns are found by name one for each header.

    Without a header, files that have as many fields as the source has columns but for the optional
    ones, or those that folders give, are laid out without these.
    """
    order = file_order(name, files)
    given = {column.name for column in config.columns if column.field_name in folders}
    lackable = {*optional, *given}
    if not config.header:
        groups: dict[frozenset[str], list[InputFile]] = {frozenset(): list(files)}
        if lackable and config.format in SEPARATED_FORMATS:
            choices = [frozenset(names) for names in ((), given, optional, lackable)]
            groups = group_by_fields(spark, name, config, files, choices)
        layouts = []
        for lacking, some in groups.items():
            rest = [column.field_name for column in config.columns if column.name not in lacking]
            layout = Layout(config, None, order, rest if lacking else None, folders)
            layouts.append(_lay_out_lines(spark, layout, some))
        return tuple(layouts)
    if lackable and config.header is True and are_named(spark, name, config, files, lackable):
        config = config.model_copy(update={"header": "by_name"})
    headers = read_headers(spark, name, config, files, lackable)
    if config.header == "by_name":
        declared = {column.field_name for column in config.columns}
        fields = dict.fromkeys(field for line in headers for field in header_names(config, line))
        check_new_columns(name, config, [field for field in fields if field not in declared])
    layouts = []
    for header, group in headers.items():
        names = header_names(config, header) if config.header == "by_name" else None
        layouts.append(_lay_out_lines(spark, Layout(config, header, order, names, folders), group))
    return tuple(layouts)


@dataclass(frozen=True)
class Layout:
    """How lines of some files are taken apart.

    Attributes:
        config: The source's declaration.
        header: Their header; None: they have none.
        order: Position in the input.
        names: The fields, where columns are found by name or not all have one; None: by position.
        folders: Text of the columns that folders give, by field.
    """

    config: SourceConfig
    header: bytes | None
    order: Column
    names: list[str] | None
    folders: FolderTexts


def _lay_out_lines(spark: SparkSession, layout: Layout, files: Sequence[InputFile]) -> ParsedRows:
    config, folders = layout.config, layout.folders
    lines = read_lines(spark, config, files)
    faults = line_faults(config, layout.header)
    new = None
    if config.format == "json":
        frame, columns, shape, keys = parse_json_lines(lines, config, folders)
        new = keys if config.new_columns != "ignore" else None
    elif config.format in SPARSE_FORMATS:
        frame, columns, shape = split_sparse_lines(lines, config)
    else:
        frame, columns, shape = split_lines(lines, config, layout.names, folders)
    return ParsedRows(frame, columns, (*faults, *shape), layout.order, new)


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
        day = _value_of_folder(days)
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


def _value_of_folder(values: Mapping[str, str | None]) -> Column:
    """The text that a row's folder gives; a path is decoded from the URI that Spark gives."""
    folder = F.regexp_replace(FILE_COLUMN, "/[^/]*$", "")
    folder = F.regexp_replace(folder, "^file:/+", "/")
    # In a URI a plus is a plus; only in a query does it stand for a space.
    plain = F.try_url_decode(F.replace(folder, F.lit("+"), F.lit("%2B")))
    # One constant: a literal for each folder would take seconds to plan.
    texts = F.from_json(F.lit(json.dumps(values)), "map<string,string>")
    return F.try_element_at(texts, plain)

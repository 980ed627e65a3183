"""Reads a source of any format lazily: each row with its values, or the reason why it is bad."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from conf.dates import DateRange
from conf.etl.sources import SEPARATED_FORMATS, SPARK_TYPES, SPARSE_FORMATS, SourceConfig
from conf.manifest import InputFile
from etl.sources.bad_rows import check_new_columns, column_faults, first_reason, nan_as_missing
from etl.sources.files import (
    check_days_of_rows,
    find_files,
    find_files_by_day,
    find_folder_values,
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
    FolderTexts,
    ParsedColumn,
    ParsedRows,
    Source,
)
from etl.sources.tables import read_table
from etl.sources.text_files import (
    Headers,
    are_named,
    check_headers,
    file_order,
    group_by_fields,
    header_names,
    line_faults,
    read_first_lines,
    read_lines,
    value_of_path,
)
from etl.sources.text_formats import parse_json_lines, split_lines, split_sparse_lines

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_COLUMN_FILES = ("parquet", "orc", "avro")


@dataclass(frozen=True)
class Reading:
    """What is read of a source.

    Attributes:
        name: The source's name in the config.
        config: Its declaration.
        dates: The run's days; None: a dated input is read whole.
        files: Its files; none for a table.
        folders: What folders say of declared columns.
        optional: Declared columns that may be missing in the input or some of its files.
    """

    name: str
    config: SourceConfig
    dates: DateRange | None
    files: Sequence[InputFile] = ()
    folders: FolderTexts = field(default_factory=dict)
    optional: Collection[str] = ()


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
    given = find_folder_values(name, config, data_dir, dates) if files else {}
    folders = {field: value_of_path(v, F.col(FILE_COLUMN)) for field, v in given.items()}
    reading = Reading(name, config, dates, files, folders, optional)
    if config.path is None:
        layouts = _lay_out_frames(reading, (read_table(spark, name, config),))
    elif config.format in _COLUMN_FILES:
        layouts = _lay_out_frames(reading, read_column_files(spark, name, config, files))
    else:
        layouts = _lay_out_text(spark, reading)
    made = _made_day(name, config, data_dir, dates)
    parsed = reduce(
        lambda one, other: one.unionByName(other),
        (_finish(config, replace(rows, columns=rows.columns | made), dates) for rows in layouts),
    )
    day = config.day_column
    if dates is not None and config.days and day is not None and not config.day_in_path:
        check_days_of_rows(name, config.days, day, parsed, dates)
    headers = sum(file.bytes > 0 for file in files) if config.header else 0
    nullable = tuple(c.name for c in config.columns if c.nullable and c.name not in optional)
    return Source(name, parsed, files, headers, nullable)


def _make_nullable(config: SourceConfig, optional: Collection[str]) -> SourceConfig:
    columns = tuple(
        column.model_copy(update={"nullable": True}) if column.name in optional else column
        for column in config.columns
    )
    return config.model_copy(update={"columns": columns}) if optional else config


def _lay_out_frames(reading: Reading, frames: tuple[DataFrame, ...]) -> list[ParsedRows]:
    name, config = reading.name, reading.config
    check_new_columns(name, config, undeclared_fields(config, frames))
    order = file_order(name, reading.files) if reading.files else None
    lackable = find_lackable(config, frames, reading.optional)
    return [
        lay_out_frame(name, config, frame, lackable, reading.dates, order, reading.folders)
        for frame in frames
    ]


def _lay_out_text(spark: SparkSession, reading: Reading) -> list[ParsedRows]:
    """One layout, or where columns are found by name one for each header.

    Without a header, files that have as many fields as the source has columns but for the optional
    ones, or those that folders give, are laid out without these.
    """
    name, config, files = reading.name, reading.config, reading.files
    given = {column.name for column in config.columns if column.field_name in reading.folders}
    lackable = {*reading.optional, *given}
    if config.header:
        return _lay_out_by_header(spark, reading, lackable)
    groups = {frozenset[str](): list(files)}
    if lackable and config.format in SEPARATED_FORMATS:
        choices = [frozenset(names) for names in ((), given, reading.optional, lackable)]
        groups = group_by_fields(config, read_first_lines(spark, name, files), choices)
    layouts = []
    for lacking, some in groups.items():
        rest = [column.field_name for column in config.columns if column.name not in lacking]
        layouts.append(_lay_out_lines(spark, reading, some, None, rest if lacking else None))
    return layouts


def _lay_out_by_header(
    spark: SparkSession, reading: Reading, lackable: Collection[str]
) -> list[ParsedRows]:
    name, config = reading.name, reading.config
    headers = read_first_lines(spark, name, reading.files)
    if lackable and config.header is True and are_named(config, headers, lackable):
        config = config.model_copy(update={"header": "by_name"})
        reading = replace(reading, config=config)
    check_headers(name, config, headers, lackable)
    is_named = config.header == "by_name"
    if is_named:
        check_new_columns(name, config, _new_names(config, headers))
    return [
        _lay_out_lines(
            spark, reading, files, header, header_names(config, header) if is_named else None
        )
        for header, files in headers.items()
    ]


def _new_names(config: SourceConfig, headers: Headers) -> list[str]:
    declared = {column.field_name for column in config.columns}
    fields = dict.fromkeys(field for line in headers for field in header_names(config, line))
    return [field for field in fields if field not in declared]


def _lay_out_lines(
    spark: SparkSession,
    reading: Reading,
    files: Sequence[InputFile],
    header: bytes | None,
    names: list[str] | None,
) -> ParsedRows:
    """Takes the lines of some files apart; `names` are their fields, None: all, by position."""
    config, new = reading.config, None
    lines = read_lines(spark, config, files)
    if config.format == "json":
        frame, columns, shape, keys = parse_json_lines(lines, config, reading.folders)
        new = keys if config.new_columns != "ignore" else None
    elif config.format in SPARSE_FORMATS:
        frame, columns, shape = split_sparse_lines(lines, config)
    else:
        frame, columns, shape = split_lines(lines, config, names, reading.folders)
    faults = (*line_faults(config, header), *shape)
    return ParsedRows(frame, columns, faults, file_order(reading.name, reading.files), new)


def _finish(config: SourceConfig, rows: ParsedRows, dates: DateRange | None) -> DataFrame:
    """The declared columns, the reason and the books of each row of the run's days."""
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


def _made_day(
    name: str, config: SourceConfig, data_dir: str, dates: DateRange | None
) -> dict[str, ParsedColumn]:
    """The column that is made of the day in the path, where there is one."""
    if config.made_day_column is None:
        return {}
    by_day = find_files_by_day(name, config, data_dir, dates)
    days = {str(file): str(day) for day, files in by_day.items() for file in files}
    value = value_of_path(days, F.col(FILE_COLUMN))
    return {config.made_day_column: ParsedColumn(value, value.isNotNull(), value)}

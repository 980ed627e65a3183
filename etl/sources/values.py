"""Text to values of the declared types: what does not parse is null, never something else."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from conf.etl.columns import EPOCH_UNITS, SPARK_TYPES, ColumnConfig
from etl.sources.pairs import parse_pairs
from etl.sources.source import Cell

if TYPE_CHECKING:
    from pyspark.sql import Column

# A time of day alone would be taken for one of today.
_STARTS_WITH_DATE = r"^\s*[+-]?\d{4,6}-\d"


def parse_cells(column: ColumnConfig, text: Column) -> dict[str, Cell]:
    """Parses a declared column.

    Args:
        column: Its declaration.
        text: What stands in the input; null where nothing does.

    Returns:
        A cell by name: the column's, and that of its second column where it has one.
    """
    if column.type != "string":
        text = F.nullif(text, F.lit(""))
    if column.pair is not None:
        entries = split_list(column, text) if column.is_list else F.array(text)
        return parse_pairs(column, column.pair, text, entries)
    return {column.name: Cell(parse_text(column, text), text.isNotNull(), text)}


def parse_text(column: ColumnConfig, text: Column) -> Column:
    """Parses the text of a column without a second one."""
    if column.is_list:
        return split_list(column, text).try_cast(SPARK_TYPES[column.type])
    return parse_scalar(column, text)


def parse_scalar(column: ColumnConfig, text: Column) -> Column:
    """Parses the text of one value, or of one in a list."""
    if column.type == "timestamp":
        return parse_timestamp(text, column.timestamp_format)
    return text.try_cast(SPARK_TYPES[column.element_type])


def split_list(column: ColumnConfig, text: Column) -> Column:
    """Splits the text of a list."""
    return F.split(text, re.escape(column.separator or ""), -1)


def parse_timestamp(text: Column, written: str | None) -> Column:
    """Reads a timestamp as milliseconds since 1970, UTC."""
    if written is None:
        return F.unix_millis(F.when(text.rlike(_STARTS_WITH_DATE), text.try_cast("timestamp")))
    if written in EPOCH_UNITS:
        return epoch_millis(text.try_cast("bigint"), written)
    return F.unix_millis(F.try_to_timestamp(text, F.lit(written)))


def epoch_millis(number: Column, written: str) -> Column:
    """Turns a bigint of seconds, milliseconds or microseconds into milliseconds."""
    if EPOCH_UNITS[written] == "ms":
        return number
    if EPOCH_UNITS[written] == "us":
        return F.unix_millis(F.timestamp_micros(number))
    return F.try_multiply(number, F.lit(1000).cast("bigint"))

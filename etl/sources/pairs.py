"""Entries `<value>` or `<value>_<second>`, such as clicks on a video in a column: two columns."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from conf.etl.columns import SPARK_TYPES, ColumnConfig, PairConfig
from etl.sources.source import Cell

if TYPE_CHECKING:
    from pyspark.sql import Column


def parse_pairs(
    column: ColumnConfig, pair: PairConfig, text: Column, entries: Column
) -> dict[str, Cell]:
    """Takes entries apart into two columns, aligned where they are lists.

    An entry is a value, or a value, the pair's separator once, and a second value. All else makes
    the row a bad row: an empty entry (`empty_entry`), nothing before the separator
    (`missing_value`), nothing after it or one more separator (`malformed_entry`).

    Args:
        column: The column of values.
        pair: Its second column.
        text: What stands in the input; null where nothing does.
        entries: Its entries, an array of strings; one of them where the column is no list.

    Returns:
        The cells of both columns, by name.
    """
    second = pair.as_column(column)
    firsts = F.transform(entries, lambda e: F.substring_index(e, pair.separator, 1))
    seconds = F.transform(entries, lambda e: _second_text(e, pair))
    values = {}
    for part, texts in ((column, firsts), (second, seconds)):
        parsed = texts.try_cast(f"array<{SPARK_TYPES[part.element_type]}>")
        values[part.name] = parsed if column.is_list else F.get(parsed, F.lit(0))
    present = text.isNotNull()
    first_cell = Cell(values[column.name], present, text, _entry_faults(column, pair, entries))
    return {column.name: first_cell, second.name: Cell(values[second.name], present, text)}


def _second_text(entry: Column, pair: PairConfig) -> Column:
    has_second = F.contains(entry, F.lit(pair.separator))
    written = F.substring_index(entry, pair.separator, -1)
    return F.when(has_second, written).when(entry.isNotNull(), F.lit(str(pair.default)))


def _entry_faults(
    column: ColumnConfig, pair: PairConfig, entries: Column
) -> tuple[tuple[Column, str], ...]:
    separator = re.escape(pair.separator)
    parts = f"(?:(?!{separator}).)++"
    well_formed = f"^{parts}(?:{separator}{parts})?$"
    kinds = {
        "empty_entry": lambda e: e == "",
        "missing_value": lambda e: F.startswith(e, F.lit(pair.separator)),
        "malformed_entry": lambda e: ~e.rlike(f"(?s){well_formed}"),
    }
    return tuple((F.exists(entries, test), f"{name}:{column.name}") for name, test in kinds.items())

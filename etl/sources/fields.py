"""Lines taken apart into fields: by a separator, with or without quotes, or by a pattern."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from conf.etl import SourceConfig
from etl.sources.source import LINE_COLUMN, Cell
from etl.sources.values import parse_cells

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_FIELDS = "__fields"
_TOKENS = "__tokens"
# Ends the last field as a separator ends the others; no line has it inside.
_END = "\n"
Fault = tuple["Column", str]


def split_lines(
    lines: DataFrame, config: SourceConfig, names: list[str] | None
) -> tuple[DataFrame, dict[str, Cell], list[Fault]]:
    """Takes lines apart into the declared columns.

    Args:
        lines: A frame with `__line`.
        config: A source that is delimited, csv or pattern.
        names: Names in the header where columns are found by name; a column that is not among
            them is null. None: by position.

    Returns:
        The lines with what was split, the cells of all columns, and what may be wrong with a
        line's shape.
    """
    split, faults = _split(lines, config)
    count = len(config.columns) if names is None else len(names)
    shape = "pattern_mismatch" if config.format == "pattern" else "wrong_field_count"
    faults.append((F.size(_FIELDS) != count, shape))
    cells: dict[str, Cell] = {}
    for position, column in enumerate(config.columns):
        if names is None:
            text = F.get(F.col(_FIELDS), F.lit(position))
        elif column.field_name in names:
            text = F.get(F.col(_FIELDS), F.lit(names.index(column.field_name)))
        else:
            text = F.lit(None).cast("string")
        if config.quote_mark is None:
            # A field left empty is null, for strings too: the log has no other way to write it.
            text = F.nullif(text, F.lit(""))
        if config.null_values:
            text = F.when(~text.isin(*config.null_values), text)
        cells |= parse_cells(column, text)
    return split, cells, faults


def _split(lines: DataFrame, config: SourceConfig) -> tuple[DataFrame, list[Fault]]:
    line = F.col(LINE_COLUMN)
    if config.pattern is not None:
        return lines.withColumn(_FIELDS, _match(line, config)), []
    if config.quote_mark is None:
        fields = F.split(line, re.escape(config.field_separator), -1)
        return lines.withColumn(_FIELDS, fields), []
    ended = F.concat(line, F.lit(_END))
    tokens = F.regexp_extract_all(ended, F.lit(_token_pattern(config)), F.lit(0))
    split = lines.withColumn(_TOKENS, tokens).withColumn(_FIELDS, _unquote(config))
    # Tokens follow each other without a gap: where they end early, the rest is no field.
    malformed = F.array_join(_TOKENS, "") != ended
    return split, [(malformed, "malformed_quotes")]


def _match(line: Column, config: SourceConfig) -> Column:
    pattern = f"^(?:{config.pattern})$"
    groups = [F.regexp_extract(line, pattern, i + 1) for i in range(len(config.columns))]
    return F.when(line.rlike(pattern), F.array(*groups)).otherwise(F.array().cast("array<string>"))


def _token_pattern(config: SourceConfig) -> str:
    """A field and the separator after it; possessive, so that no line is too long for the stack."""
    quote, escape, separator = _escaped(config)
    if escape == quote:
        quoted = f"{quote}[^{quote}]*+(?:{quote}{quote}[^{quote}]*+)*+{quote}"
    else:
        quoted = f"{quote}[^{quote}{escape}]*+(?:{escape}.[^{quote}{escape}]*+)*+{quote}"
    plain = f"(?!{quote})(?:(?!{separator})[^{_END}])*+"
    if len(config.field_separator) == 1:
        plain = f"(?!{quote})[^{separator}{_END}]*+"
    return rf"(?s)\G(?:{quoted}|{plain})(?:{separator}|{_END})"


def _unquote(config: SourceConfig) -> Column:
    """The fields of the tokens; null where nothing is written, while `""` is an empty text."""
    quote, escape, _ = _escaped(config)
    mark = config.quote_mark or ""

    def field(token: Column) -> Column:
        ending = F.when(F.endswith(token, F.lit(_END)), len(_END))
        ending = ending.otherwise(len(config.field_separator))
        text = F.substr(token, F.lit(1), F.length(token) - ending)
        inner = F.substr(text, F.lit(2), F.length(text) - 2)
        if escape == quote:
            inner = F.replace(inner, F.lit(mark * 2), F.lit(mark))
        else:
            inner = F.regexp_replace(inner, f"(?s){escape}([{escape}{quote}])", "$1")
        return F.when(F.startswith(text, F.lit(mark)), inner).otherwise(F.nullif(text, F.lit("")))

    return F.transform(_TOKENS, field)


def _escaped(config: SourceConfig) -> tuple[str, str, str]:
    """Quote, escape and separator as a regular expression writes them."""
    mark = config.quote_mark or ""

    def literal(text: str) -> str:
        return "".join(f"\\x{{{ord(character):x}}}" for character in text)

    return literal(mark), literal(config.escape or mark), literal(config.field_separator)

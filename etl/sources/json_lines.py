"""JSON lines: one object per line, columns by key or by a path of keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from conf.etl import SourceConfig
from conf.etl.columns import ColumnConfig
from etl.sources.pairs import parse_pairs
from etl.sources.source import LINE_COLUMN, Cell
from etl.sources.values import parse_cells, parse_scalar

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_OBJECT = "__object"
_CORRUPT = "__corrupt"
_TEXTS = r'"(?:[^"\\]|\\.)*+"'
# Nothing stands between the end of an object and the start of another but a comma.
_TWO_OBJECTS = r"\}\s*+\{"


def parse_json_lines(
    lines: DataFrame, config: SourceConfig
) -> tuple[DataFrame, dict[str, Cell], list[tuple[Column, str]], Column]:
    """Takes objects apart into the declared columns.

    Every value is first taken as it is written, so that one that does not fit its column is told
    from one that is not there.

    Args:
        lines: A frame with `__line`.
        config: A source of JSON lines.

    Returns:
        The lines with what was parsed, the cells of all columns, what may be wrong with a line,
        and the keys of each object that are not declared.
    """
    # Paths that share keys are read side by side: a key may be asked for whole and in part.
    paths = {column.field_name: column.field_name.split(".") for column in config.columns}
    keys = dict.fromkeys(path[0] for path in paths.values())
    schema = ", ".join(f"{_quote(key)} string" for key in (*keys, _CORRUPT))
    options = {"columnNameOfCorruptRecord": _CORRUPT, "allowSingleQuotes": "false"}
    parsed = lines.withColumn(_OBJECT, F.from_json(LINE_COLUMN, schema, options))
    cells: dict[str, Cell] = {}
    for column in config.columns:
        cells |= _parse(column, _at_path(paths[column.field_name]))
    line = F.trim(LINE_COLUMN)
    bare = F.regexp_replace(line, _TEXTS, "")
    several = line.rlike(_TWO_OBJECTS) & bare.rlike(_TWO_OBJECTS)
    whole = F.startswith(line, F.lit("{")) & F.endswith(line, F.lit("}"))
    corrupt = F.col(_OBJECT)[_CORRUPT].isNotNull()
    new = F.array_except(F.json_object_keys(LINE_COLUMN), F.array(*map(F.lit, keys)))
    return parsed, cells, [(corrupt | ~whole | several, "malformed_json")], new


def _at_path(path: list[str]) -> Column:
    text = F.col(_OBJECT)[path[0]]
    for key in path[1:]:
        text = F.from_json(text, f"{_quote(key)} string")[key]
    return text


def _parse(column: ColumnConfig, text: Column) -> dict[str, Cell]:
    if not column.is_list or column.separator is not None:
        return parse_cells(column, text)
    entries = F.from_json(text, "array<string>")
    if column.pair is not None:
        return parse_pairs(column, column.pair, text, entries)
    value = F.transform(entries, lambda entry: parse_element(column, entry))
    return {column.name: Cell(value, text.isNotNull(), text)}


def parse_element(column: ColumnConfig, text: Column) -> Column:
    """Parses the text of one value of a list column."""
    return parse_scalar(_element(column), text)


def _element(column: ColumnConfig) -> ColumnConfig:
    data: dict[str, Any] = {"name": column.name, "type": column.element_type}
    return ColumnConfig.model_validate(data)


def _quote(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"

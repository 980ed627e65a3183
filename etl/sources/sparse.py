"""libsvm, libfm and libffm lines: `label [qid:q] index:value …` or `… field:index:value …`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from conf.etl import SourceConfig
from conf.etl.columns import SPARK_TYPES, ColumnConfig
from etl.sources.source import LINE_COLUMN, Cell

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_TOKENS = "__tokens"
_PAIRS = "__pairs"
_QID = "qid:"
_PARTS = {"libffm": ("fields", "indices", "values")}
_PAIR_PARTS = ("indices", "values")


def split_sparse_lines(
    lines: DataFrame, config: SourceConfig
) -> tuple[DataFrame, dict[str, Cell], list[tuple[Column, str]]]:
    """Takes lines apart into label, query id and aligned lists of indices and values.

    What follows a `#` is a comment. A pair that has not all of its parts, or one part too many,
    makes the row a bad row (`malformed_pair`): nothing is dropped out of a list.

    Args:
        lines: A frame with `__line`.
        config: A source of a sparse format.

    Returns:
        The lines with what was split, the cells of all columns, and what may be wrong with the
        line's shape.
    """
    parts = _PARTS.get(config.format, _PAIR_PARTS)
    bare = F.trim(F.regexp_replace(LINE_COLUMN, "#.*", ""))
    split = lines.withColumn(_TOKENS, F.split(bare, r"\s+"))
    has_qid = F.startswith(F.get(_TOKENS, F.lit(1)), F.lit(_QID))
    first_pair = F.when(has_qid, 3).otherwise(2)
    split = split.withColumn(_PAIRS, F.slice(_TOKENS, first_pair, F.size(_TOKENS)))
    colons = len(parts) - 1
    part = "[^:]+"
    whole = f"^{':'.join([part] * len(parts))}$"
    malformed = F.exists(_PAIRS, lambda pair: ~pair.rlike(whole))
    cells = {}
    for column in config.columns:
        name = column.field_name
        if name == "label":
            text = F.nullif(F.get(_TOKENS, F.lit(0)), F.lit(""))
            cells[column.name] = _scalar(column, text)
        elif name == "qid":
            second = F.get(_TOKENS, F.lit(1))
            text = F.when(has_qid, F.substr(second, F.lit(len(_QID) + 1)))
            cells[column.name] = _scalar(column, text)
        else:
            cells[column.name] = _list(column, parts.index(name), colons)
    comment = F.startswith(F.trim(LINE_COLUMN), F.lit("#"))
    return split, cells, [(comment, "comment_line"), (malformed, "malformed_pair")]


def _scalar(column: ColumnConfig, text: Column) -> Cell:
    return Cell(text.try_cast(SPARK_TYPES[column.type]), text.isNotNull(), text)


def _list(column: ColumnConfig, place: int, colons: int) -> Cell:
    def part(pair: Column) -> Column:
        if place == colons:
            return F.substring_index(pair, ":", -1)
        head = F.substring_index(pair, ":", place + 1)
        return F.substring_index(head, ":", -1)

    texts = F.transform(_PAIRS, part)
    value = texts.try_cast(SPARK_TYPES[column.type])
    return Cell(value, F.lit(True), F.array_join(texts, " "))

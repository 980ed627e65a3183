"""Lines to values: separated fields, patterns, JSON lines, sparse text, click sequences.

What does not parse as the declared type is null and counted, never another value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from conf.etl.sources import EPOCH_UNITS, PAIR_SEPARATOR, SPARK_TYPES, ColumnConfig, SourceConfig
from etl.sources.source import LINE_COLUMN, Fault, ParsedColumn
from etl.tfrecord.spark.schema import quote_name

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


def parse_pairs(
    column: ColumnConfig, second: ColumnConfig, text: Column, entries: Column
) -> dict[str, ParsedColumn]:
    """Takes entries apart into two columns, aligned where they are lists.

    An entry is a value, or a value, `_` once, and a second value. All else makes
    the row a bad row: an empty entry (`empty_entry`), nothing before the separator
    (`missing_value`), nothing after it or one more separator (`malformed_entry`).
    """
    firsts = F.transform(entries, lambda e: F.substring_index(e, PAIR_SEPARATOR, 1))
    seconds = F.transform(entries, lambda e: _second_text(e, column))
    values = {}
    for part, texts in ((column, firsts), (second, seconds)):
        parsed = texts.try_cast(f"array<{SPARK_TYPES[part.element_type]}>")
        values[part.name] = parsed if column.is_list else F.get(parsed, F.lit(0))
    present = text.isNotNull()
    first = ParsedColumn(values[column.name], present, text, _entry_faults(column, entries))
    if column.pair_default is None:
        present = F.contains(text, F.lit(PAIR_SEPARATOR))
    return {column.name: first, second.name: ParsedColumn(values[second.name], present, text)}


def _second_text(entry: Column, column: ColumnConfig) -> Column:
    has_second = F.contains(entry, F.lit(PAIR_SEPARATOR))
    written = F.substring_index(entry, PAIR_SEPARATOR, -1)
    default = F.lit(None if column.pair_default is None else str(column.pair_default))
    return F.when(has_second, written).when(entry.isNotNull(), default)


def _entry_faults(column: ColumnConfig, entries: Column) -> tuple[Fault, ...]:
    part = f"[^{PAIR_SEPARATOR}]++"
    well_formed = f"^{part}(?:{PAIR_SEPARATOR}{part})?$"
    kinds = {
        "empty_entry": lambda e: e == "",
        "missing_value": lambda e: F.startswith(e, F.lit(PAIR_SEPARATOR)),
        "malformed_entry": lambda e: ~e.rlike(f"(?s){well_formed}"),
    }
    return tuple((F.exists(entries, test), f"{name}:{column.name}") for name, test in kinds.items())


# A time of day alone would be taken for one of today.
# Spark takes `BST` for a zone of Bangladesh and `CST` for Chicago's: no such word ends ISO 8601.
_IS_ISO = r"^\s*[+-]?\d{4,6}-\d(?!.*(?<![A-Za-z/_+-])(?!(?:UTC|GMT|UT)\s*$)[A-Za-z]{2,}\s*$)"


def parse_column(column: ColumnConfig, text: Column) -> dict[str, ParsedColumn]:
    """Parses the text of a declared column: it by its name, and its second column if it has one."""
    if column.type != "string":
        text = F.nullif(text, F.lit(""))
    if (second := column.second) is not None:
        entries = split_list(column, text) if column.is_list else F.array(text)
        return parse_pairs(column, second, text, entries)
    if column.is_list:
        entries = split_list(column, _without_suffix(column, text))
        value = entries.try_cast(SPARK_TYPES[column.type])
    else:
        value = parse_scalar(column, text)
    return {column.name: ParsedColumn(value, text.isNotNull(), text)}


# Java's names of types behind a number, and its hexadecimal floats: Spark casts 5D, 1f and 0x1p3.
_NO_NUMBER = "[0-9.][dDfFxXpP]"


def _without_suffix(column: ColumnConfig, text: Column) -> Column:
    """The text of a column; null where Spark alone would take it for a float, or a list of some."""
    return F.when(~text.rlike(_NO_NUMBER), text) if column.is_float else text


def parse_scalar(column: ColumnConfig, text: Column) -> Column:
    """Parses the text of one value, or of one in a list."""
    if column.type == "timestamp":
        return parse_timestamp(text, column.timestamp_format)
    return _without_suffix(column, text).try_cast(SPARK_TYPES[column.element_type])


def split_list(column: ColumnConfig, text: Column) -> Column:
    """Splits the text of a list."""
    return F.split(text, re.escape(column.separator or ""), -1)


def parse_timestamp(text: Column, written: str | None) -> Column:
    """Reads a timestamp as milliseconds since 1970, UTC."""
    if written is None:
        return F.unix_millis(F.when(text.rlike(_IS_ISO), text.try_cast("timestamp")))
    if written in EPOCH_UNITS:
        whole = epoch_millis(text.try_cast("bigint"), written)
        return F.coalesce(whole, fraction_millis(F.when(text.rlike(_DECIMAL), text), written))
    return F.unix_millis(F.try_to_timestamp(text, F.lit(written)))


# Java's decimals may have the digits of any script.
_DECIMAL = r"^\s*[+-]?[0-9]*\.?[0-9]*(?:[eE][+-]?[0-9]+)?\s*$"


def epoch_millis(number: Column, written: str) -> Column:
    """Turns a bigint of seconds, milliseconds or microseconds into milliseconds."""
    if EPOCH_UNITS[written] == "ms":
        return number
    if EPOCH_UNITS[written] == "us":
        return F.unix_millis(F.timestamp_micros(number))
    return F.try_multiply(number, F.lit(1000).cast("bigint"))


def fraction_millis(number: Column, written: str) -> Column:
    """Turns a fraction, or its text, into whole milliseconds as `epoch_millis`, rounded down."""
    exact = number.try_cast("decimal(33,13)")
    if EPOCH_UNITS[written] == "s":
        return F.floor(exact * F.lit(1000).cast("decimal(4,0)")).try_cast("bigint")
    return epoch_millis(F.floor(exact).try_cast("bigint"), written)


_FIELDS = "__fields"
_QUOTED = "__quoted"
# Ends the last field as a separator ends the others; no line has it inside.
_END = "\n"


def split_lines(
    lines: DataFrame, config: SourceConfig, fields: Sequence[str], folders: Mapping[str, Column]
) -> tuple[DataFrame, dict[str, ParsedColumn], list[Fault]]:
    """Takes separated fields, or the groups of a pattern, apart into the declared columns.

    Returns the lines with what was split, the columns, and what may be wrong with a line's shape.
    """
    split, faults = _split_by_separator(lines, config)
    shape = "pattern_mismatch" if config.format == "pattern" else "wrong_field_count"
    faults.append((F.size(_FIELDS) != len(fields), shape))
    columns: dict[str, ParsedColumn] = {}
    for column in config.columns:
        if column.field_name in fields:
            text = F.get(F.col(_FIELDS), F.lit(fields.index(column.field_name)))
        else:
            text = folders.get(column.field_name, F.lit(None).cast("string"))
        if config.quote_mark is None:
            # A field left empty is null, for strings too: the log has no other way to write it.
            text = F.nullif(text, F.lit(""))
        if config.null_values:
            text = F.when(~text.isin(*config.null_values), text)
        columns |= parse_column(column, text)
    return split, columns, faults


def _split_by_separator(lines: DataFrame, config: SourceConfig) -> tuple[DataFrame, list[Fault]]:
    line = F.col(LINE_COLUMN)
    if config.pattern is not None:
        return lines.withColumn(_FIELDS, _match(line, config)), []
    if config.quote_mark is None:
        fields = F.split(line, re.escape(config.field_separator), -1)
        return lines.withColumn(_FIELDS, fields), []
    split = lines.withColumn(_QUOTED, _find_quoted(line, config))
    split = split.withColumn(_FIELDS, F.transform(_QUOTED, lambda text: _unquote(text, config)))
    return split, [(_are_cut(F.col(_QUOTED), line), "malformed_quotes")]


def _match(line: Column, config: SourceConfig) -> Column:
    pattern = f"^(?:{config.pattern})$"
    groups = [F.regexp_extract(line, pattern, i + 1) for i in range(len(config.columns))]
    return F.when(line.rlike(pattern), F.array(*groups)).otherwise(F.array().cast("array<string>"))


def has_bad_quotes(line: Column, config: SourceConfig) -> Column:
    """Whether a line has a quote without an end, or text behind its end."""
    return F.contains(line, F.lit(config.quote_mark)) & _are_cut(_find_quoted(line, config), line)


def _find_quoted(line: Column, config: SourceConfig) -> Column:
    """The fields as they are written, each with the separator behind it.

    The pattern is possessive, so that no line is too long for the stack.
    """
    quote, escape, separator = _literals(config)
    inside = f"[^{quote}{escape}]*+"
    escaped = escape + (quote if escape == quote else ".")
    quoted = f"{quote}{inside}(?:{escaped}{inside})*+{quote}"
    plain = f"(?!{quote})(?:(?!{separator})[^{_END}])*+"
    if len(config.field_separator) == 1:
        plain = f"(?!{quote})[^{separator}{_END}]*+"
    pattern = rf"(?s)\G(?:{quoted}|{plain})(?:{separator}|{_END})"
    return F.regexp_extract_all(F.concat(line, F.lit(_END)), F.lit(pattern), F.lit(0))


def _are_cut(quoted: Column, line: Column) -> Column:
    """Whether fields, which follow each other without a gap, end early: the rest is none."""
    return F.array_join(quoted, "") != F.concat(line, F.lit(_END))


def _unquote(text: Column, config: SourceConfig) -> Column:
    """A field without its quotes; null where nothing is written, while `""` is an empty text."""
    ending = F.when(F.endswith(text, F.lit(_END)), len(_END))
    ending = ending.otherwise(len(config.field_separator))
    text = F.substr(text, F.lit(1), F.length(text) - ending)
    quote, escape, _ = _literals(config)
    inner = F.substr(text, F.lit(2), F.length(text) - 2)
    inner = F.regexp_replace(inner, f"(?s){escape}([{escape}{quote}])", "$1")
    is_quoted = F.startswith(text, F.lit(config.quote_mark))
    return F.when(is_quoted, inner).otherwise(F.nullif(text, F.lit("")))


def _literals(config: SourceConfig) -> list[str]:
    """Quote, escape and separator as a regular expression writes them."""
    mark = config.quote_mark or ""
    texts = (mark, config.escape or mark, config.field_separator)
    return ["".join(f"\\x{{{ord(letter):x}}}" for letter in text) for text in texts]


_TOKENS = "__tokens"
_PAIRS = "__pairs"
_QID = "qid:"


def split_sparse_lines(
    lines: DataFrame, config: SourceConfig
) -> tuple[DataFrame, dict[str, ParsedColumn], list[Fault]]:
    """Takes lines `label [qid:id] [field:]index:value … # comment` apart.

    A pair that has not all of its parts, or one part too many, makes the row a bad row
    (`malformed_pair`): nothing is dropped out of a list. Returns what `split_lines` does.
    """
    bare = F.trim(F.regexp_replace(LINE_COLUMN, "#.*", ""))
    tokens = F.split(bare, r"\s+")
    second = F.get(_TOKENS, F.lit(1))
    has_qid = F.startswith(second, F.lit(_QID))
    pairs = F.slice(_TOKENS, F.when(has_qid, 3).otherwise(2), F.size(_TOKENS))
    split = lines.withColumn(_TOKENS, tokens).withColumn(_PAIRS, pairs)
    texts = {
        "label": F.nullif(F.get(_TOKENS, F.lit(0)), F.lit("")),
        "qid": F.when(has_qid, F.substr(second, F.lit(len(_QID) + 1))),
    }
    columns = {}
    for column in config.columns:
        if (text := texts.get(column.field_name)) is not None:
            value = parse_scalar(column, text)
            columns[column.name] = ParsedColumn(value, text.isNotNull(), text)
        else:
            columns[column.name] = _parse_part(column, config.pair_parts.index(column.field_name))
    comment = F.startswith(F.trim(LINE_COLUMN), F.lit("#"))
    whole = f"^{':'.join(['[^:]+'] * len(config.pair_parts))}$"
    malformed = F.exists(_PAIRS, lambda pair: ~pair.rlike(whole))
    return split, columns, [(comment, "comment_line"), (malformed, "malformed_pair")]


def _parse_part(column: ColumnConfig, number: int) -> ParsedColumn:
    texts = F.transform(_PAIRS, lambda pair: F.get(F.split(pair, ":"), F.lit(number)))
    joined = F.array_join(texts, " ")
    plain = F.when(_without_suffix(column, joined).isNotNull(), texts)
    return ParsedColumn(plain.try_cast(SPARK_TYPES[column.type]), F.lit(True), joined)


_OBJECT = "__object"
_CORRUPT = "__corrupt"
_TEXTS = r'"(?:[^"\\]|\\.)*+"'
# An escape of half a character, such as \ud800 alone, which would become a question mark.
_HALF = (
    r"(?<!\\)(?:\\\\)*+(?:\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    r"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F])"
)
# Nothing stands between the end of an object and the start of another but a comma.
_TWO_OBJECTS = r"\}\s*+\{"
# Spark would make the text "Infinity" of such a number.
_BEYOND_FLOAT64 = r"[0-9][eE]\+?0*+(?:309|3[1-9][0-9]|[4-9][0-9]{2}|[1-9][0-9]{3,})"


def parse_json_lines(
    lines: DataFrame, config: SourceConfig, folders: Mapping[str, Column]
) -> tuple[DataFrame, dict[str, ParsedColumn], list[Fault], Column]:
    """Takes objects apart into the declared columns.

    Every value is first taken as it is written, so that one that does not fit its column is told
    from one that is not there. Folders say what an object has no value of. Returns what
    `split_lines` does, and the keys of each object that are not declared.
    """
    # Paths that share keys are read side by side: a key may be asked for whole and in part.
    paths = [column.field_name for column in config.columns]
    keys = dict.fromkeys(key for path in paths for key in (path, *(h for h, _ in split_path(path))))
    schema = ", ".join(f"{quote_name(key)} string" for key in (*keys, _CORRUPT))
    # A bare NaN would become the text "NaN".
    options = {"allowSingleQuotes": "false", "allowNonNumericNumbers": "false"}
    options["columnNameOfCorruptRecord"] = _CORRUPT
    parsed = lines.withColumn(_OBJECT, F.from_json(LINE_COLUMN, schema, options))
    columns: dict[str, ParsedColumn] = {}
    for column in config.columns:
        text = _at_path(column.field_name)
        if column.field_name in folders:
            text = F.coalesce(text, folders[column.field_name])
        columns |= _parse_json_value(column, text)
    line = F.trim(LINE_COLUMN)
    bare = F.regexp_replace(line, _TEXTS, "")
    several, infinite = (line.rlike(p) & bare.rlike(p) for p in (_TWO_OBJECTS, _BEYOND_FLOAT64))
    whole = F.startswith(line, F.lit("{")) & F.endswith(line, F.lit("}"))
    corrupt = F.col(_OBJECT)[_CORRUPT].isNotNull() | line.rlike(_HALF)
    new = F.array_except(F.json_object_keys(LINE_COLUMN), F.array(*map(F.lit, keys)))
    return parsed, columns, [(corrupt | ~whole | several | infinite, "malformed_json")], new


def split_path(path: str) -> list[tuple[str, str]]:
    """Where a path may be cut into a key and the path below it, the longest key first."""
    keys = path.split(".")
    cuts = range(len(keys) - 1, 0, -1)
    return [(".".join(keys[:cut]), ".".join(keys[cut:])) for cut in cuts]


def _at_path(path: str, above: Column | None = None) -> Column:
    """The text at a path: that of the key of this very name, or else of keys below others."""

    def get(key: str) -> Column:
        if above is None:
            return F.col(_OBJECT)[key]
        return F.from_json(above, f"{quote_name(key)} string")[key]

    below = [_at_path(rest, get(head)) for head, rest in split_path(path)]
    return F.coalesce(get(path), *below)


def _parse_json_value(column: ColumnConfig, text: Column) -> dict[str, ParsedColumn]:
    if not column.is_list or column.separator is not None:
        return parse_column(column, text)
    entries = F.from_json(text, "array<string>")
    if (second := column.second) is not None:
        return parse_pairs(column, second, text, entries)
    value = F.transform(entries, lambda entry: parse_scalar(column, entry))
    return {column.name: ParsedColumn(value, text.isNotNull(), text)}

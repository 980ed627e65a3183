"""Lines to values: separated fields, patterns, JSON lines, sparse text, click sequences.

What does not parse as the declared type is null and counted, never another value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from conf.etl.sources import EPOCH_UNITS, PAIR_SEPARATOR, SPARK_TYPES, ColumnConfig, SourceConfig
from etl.sources.source import LINE_COLUMN, NEW_COLUMN, Fault, ParsedColumn, ParsedRows
from etl.tfrecord.spark.schema import quote_name

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


def parse_column(
    column: ColumnConfig, text: Column, entries: Column | None = None
) -> dict[str, ParsedColumn]:
    """Parses the text of a declared column: it by its name, and its second column if it has one.

    `entries` are the texts in a list that the input has taken apart; else its separator does.
    """
    if entries is None:
        text = text if column.type == "string" else F.nullif(text, F.lit(""))
        separator = re.escape(column.separator or "")
        entries = F.split(text, separator, -1) if column.is_list else F.array(text)
    if (second := column.second) is not None:
        return parse_pairs(column, second, text, entries)
    value = parse_scalar(column, text)
    if column.is_list:
        value = _unless_java(column, text, entries.try_cast(SPARK_TYPES[column.type]))
    return {column.name: ParsedColumn(value, text.isNotNull(), text)}


def parse_pairs(
    column: ColumnConfig, second: ColumnConfig, text: Column, entries: Column
) -> dict[str, ParsedColumn]:
    """Takes entries `<value>` or `<value>_<second>` apart into two columns, aligned if lists."""

    def second_text(entry: Column) -> Column:
        written = F.substring_index(entry, PAIR_SEPARATOR, -1)
        default = F.lit(None if column.pair_default is None else str(column.pair_default))
        return F.when(F.contains(entry, mark), written).when(entry.isNotNull(), default)

    def read(part: ColumnConfig, texts: Column) -> Column:
        values = texts.try_cast(f"array<{SPARK_TYPES[part.element_type]}>")
        return values if column.is_list else F.get(values, F.lit(0))

    mark, present = F.lit(PAIR_SEPARATOR), text.isNotNull()
    has_second = F.contains(text, mark) if column.pair_default is None else present
    first = read(column, F.transform(entries, lambda e: F.substring_index(e, PAIR_SEPARATOR, 1)))
    other = read(second, F.transform(entries, second_text))
    return {
        column.name: ParsedColumn(first, present, text, _entry_faults(column, entries)),
        second.name: ParsedColumn(other, has_second, text),
    }


def _entry_faults(column: ColumnConfig, entries: Column) -> tuple[Fault, ...]:
    part = f"[^{PAIR_SEPARATOR}]++"
    kinds = {
        "empty_entry": lambda e: e == "",
        "missing_value": lambda e: F.startswith(e, F.lit(PAIR_SEPARATOR)),
        "malformed_entry": lambda e: ~e.rlike(f"(?s)^{part}(?:{PAIR_SEPARATOR}{part})?$"),
    }
    return tuple((F.exists(entries, test), f"{name}:{column.name}") for name, test in kinds.items())


# Java's names of types behind a number, and its hexadecimal floats: Spark casts 5D, 1f and 0x1p3.
_JAVA_NUMBER = "[0-9.][dDfFxXpP]"


def _unless_java(column: ColumnConfig, text: Column, value: Column) -> Column:
    return F.when(~text.rlike(_JAVA_NUMBER), value) if column.is_float else value


def parse_scalar(column: ColumnConfig, text: Column) -> Column:
    """Parses the text of one value, or of one in a list."""
    if column.type == "timestamp":
        return _parse_timestamp(text, column.timestamp_format)
    return _unless_java(column, text, text.try_cast(SPARK_TYPES[column.element_type]))


# A time of day alone would be taken for one of today.
# Spark takes `BST` for a zone of Bangladesh and `CST` for Chicago's: no such word ends ISO 8601.
_IS_ISO = r"^\s*[+-]?\d{4,6}-\d(?!.*(?<![A-Za-z/_+-])(?!(?:UTC|GMT|UT)\s*$)[A-Za-z]{2,}\s*$)"


def _parse_timestamp(text: Column, written: str | None) -> Column:
    """Milliseconds since 1970, UTC."""
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
) -> ParsedRows:
    """Takes separated fields, or the groups of a pattern, apart into the declared columns."""
    line, faults = F.col(LINE_COLUMN), []
    if config.pattern is not None:
        found = _match(line, config)
    elif config.quote_mark is None:
        found = F.split(line, re.escape(config.field_separator), -1)
    else:
        lines = lines.withColumn(_QUOTED, _find_quoted(line, config))
        found = F.transform(_QUOTED, lambda text: _unquote(text, config))
        faults.append((_are_cut(F.col(_QUOTED), line, config), "malformed_quotes"))
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
    return ParsedRows(lines.withColumn(_FIELDS, found), columns, tuple(faults))


def _match(line: Column, config: SourceConfig) -> Column:
    pattern = f"^(?:{config.pattern})$"
    groups = [F.regexp_extract(line, pattern, i + 1) for i in range(len(config.columns))]
    return F.when(line.rlike(pattern), F.array(*groups)).otherwise(F.array().cast("array<string>"))


def has_bad_quotes(line: Column, config: SourceConfig) -> Column:
    """Whether a line has a quote without an end, or text behind its end."""
    cut = _are_cut(_find_quoted(line, config), line, config)
    return F.contains(line, F.lit(config.quote_mark)) & cut


def _find_quoted(line: Column, config: SourceConfig) -> Column:
    """The fields as they are written, with their quotes."""
    # The pattern is possessive, so that no line is too long for the stack.
    quote, escape, separator = _literals(config)
    inside = f"[^{quote}{escape}]*+"
    escaped = escape + (quote if escape == quote else ".")
    quoted = f"{quote}{inside}(?:{escaped}{inside})*+{quote}"
    plain = f"(?!{quote})(?:(?!{separator})[^{_END}])*+"
    if len(config.field_separator) == 1:
        plain = f"(?!{quote})[^{separator}{_END}]*+"
    pattern = rf"(?s)\G({quoted}|{plain})(?:{separator}|{_END})"
    return F.regexp_extract_all(F.concat(line, F.lit(_END)), F.lit(pattern), F.lit(1))


def _are_cut(quoted: Column, line: Column, config: SourceConfig) -> Column:
    """Whether fields, which follow each other without a gap, end early: the rest is none."""
    return F.array_join(quoted, config.field_separator) != line


def _unquote(text: Column, config: SourceConfig) -> Column:
    """A field without its quotes; null where nothing is written, while `""` is an empty text."""
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


def split_sparse_lines(lines: DataFrame, config: SourceConfig) -> ParsedRows:
    """Takes lines `label [qid:id] [field:]index:value … # comment` apart."""
    bare = F.trim(F.regexp_replace(LINE_COLUMN, "#.*", ""))
    second = F.get(_TOKENS, F.lit(1))
    has_qid = F.startswith(second, F.lit(_QID))
    pairs = F.slice(_TOKENS, F.when(has_qid, 3).otherwise(2), F.size(_TOKENS))
    lines = lines.withColumn(_TOKENS, F.split(bare, r"\s+")).withColumn(_PAIRS, pairs)
    single = {
        "label": F.nullif(F.get(_TOKENS, F.lit(0)), F.lit("")),
        "qid": F.when(has_qid, F.substr(second, F.lit(len(_QID) + 1))),
    }
    columns: dict[str, ParsedColumn] = {}
    for column in config.columns:
        if (text := single.get(column.field_name)) is not None:
            value = parse_scalar(column, text)
            columns[column.name] = ParsedColumn(value, text.isNotNull(), text)
        else:
            parts = _take_part(config.pair_parts.index(column.field_name))
            columns |= parse_column(column, F.array_join(parts, " "), parts)
    comment = F.startswith(F.trim(LINE_COLUMN), F.lit("#"))
    whole = f"^{':'.join(['[^:]+'] * len(config.pair_parts))}$"
    malformed = F.exists(_PAIRS, lambda pair: ~pair.rlike(whole))
    return ParsedRows(lines, columns, ((comment, "comment_line"), (malformed, "malformed_pair")))


def _take_part(number: int) -> Column:
    return F.transform(_PAIRS, lambda pair: F.get(F.split(pair, ":"), F.lit(number)))


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
) -> ParsedRows:
    """Takes objects apart into the declared columns; folders say what an object has no value of.

    Every value is first taken as it is written, so that one that does not fit its column is told
    from one that is not there.
    """
    # Paths that share keys are read side by side: a key may be asked for whole and in part.
    paths = [column.field_name for column in config.columns]
    keys = dict.fromkeys(key for path in paths for key in (path, *(h for h, _ in split_path(path))))
    schema = ", ".join(f"{quote_name(key)} string" for key in (*keys, _CORRUPT))
    # A bare NaN would become the text "NaN".
    options = {"allowSingleQuotes": "false", "allowNonNumericNumbers": "false"}
    options["columnNameOfCorruptRecord"] = _CORRUPT
    frame = lines.withColumn(_OBJECT, F.from_json(LINE_COLUMN, schema, options))
    if config.new_columns != "ignore":
        new = F.array_except(F.json_object_keys(LINE_COLUMN), F.array(*map(F.lit, keys)))
        frame = frame.withColumn(NEW_COLUMN, new)
    columns: dict[str, ParsedColumn] = {}
    for column in config.columns:
        text = _at_path(column.field_name)
        if column.field_name in folders:
            text = F.coalesce(text, folders[column.field_name])
        is_array = column.is_list and column.separator is None
        entries = F.from_json(text, "array<string>") if is_array else None
        columns |= parse_column(column, text, entries)
    return ParsedRows(frame, columns, ((_is_malformed(), "malformed_json"),))


def _is_malformed() -> Column:
    """Whether a line is no single object, or has what Spark would read as something else."""
    line = F.trim(LINE_COLUMN)
    bare = F.regexp_replace(line, _TEXTS, "")
    several, infinite = (line.rlike(p) & bare.rlike(p) for p in (_TWO_OBJECTS, _BEYOND_FLOAT64))
    whole = F.startswith(line, F.lit("{")) & F.endswith(line, F.lit("}"))
    corrupt = F.col(_OBJECT)[_CORRUPT].isNotNull() | line.rlike(_HALF)
    return corrupt | ~whole | several | infinite


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

"""Lines to values: separated fields, patterns, JSON lines, libsvm and libffm, click sequences.

What does not parse as the declared type is null and counted, never another value.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from conf.etl.sources import EPOCH_UNITS, SPARK_TYPES, ColumnConfig, PairConfig, SourceConfig
from etl.sources.source import LINE_COLUMN, Fault, FolderTexts, ParsedColumn
from etl.tfrecord.spark.schema import quote_name

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


def parse_pairs(
    column: ColumnConfig, pair: PairConfig, text: Column, entries: Column
) -> dict[str, ParsedColumn]:
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
        Both parsed columns, by name.
    """
    second = pair.as_column(column)
    firsts = F.transform(entries, lambda e: F.substring_index(e, pair.separator, 1))
    seconds = F.transform(entries, lambda e: _second_text(e, pair))
    values = {}
    for part, texts in ((column, firsts), (second, seconds)):
        parsed = texts.try_cast(f"array<{SPARK_TYPES[part.element_type]}>")
        values[part.name] = parsed if column.is_list else F.get(parsed, F.lit(0))
    present = text.isNotNull()
    first = ParsedColumn(values[column.name], present, text, _entry_faults(column, pair, entries))
    if pair.default is None:
        present = F.contains(text, F.lit(pair.separator))
    return {column.name: first, second.name: ParsedColumn(values[second.name], present, text)}


def _second_text(entry: Column, pair: PairConfig) -> Column:
    has_second = F.contains(entry, F.lit(pair.separator))
    written = F.substring_index(entry, pair.separator, -1)
    default = F.lit(None if pair.default is None else str(pair.default))
    return F.when(has_second, written).when(entry.isNotNull(), default)


def _entry_faults(column: ColumnConfig, pair: PairConfig, entries: Column) -> tuple[Fault, ...]:
    separator = re.escape(pair.separator)
    parts = f"(?:(?!{separator}).)++"
    well_formed = f"^{parts}(?:{separator}{parts})?$"
    kinds = {
        "empty_entry": lambda e: e == "",
        "missing_value": lambda e: F.startswith(e, F.lit(pair.separator)),
        "malformed_entry": lambda e: ~e.rlike(f"(?s){well_formed}"),
    }
    return tuple((F.exists(entries, test), f"{name}:{column.name}") for name, test in kinds.items())


# A time of day alone would be taken for one of today.
# Spark takes `BST` for a zone of Bangladesh and `CST` for Chicago's: no such word ends ISO 8601.
_IS_ISO = r"^\s*[+-]?\d{4,6}-\d(?!.*(?<![A-Za-z/_+-])(?!(?:UTC|GMT|UT)\s*$)[A-Za-z]{2,}\s*$)"


def parse_column(column: ColumnConfig, text: Column) -> dict[str, ParsedColumn]:
    """Parses a declared column.

    Args:
        column: Its declaration.
        text: What stands in the input; null where nothing does.

    Returns:
        By name the parsed column, and its second column where it has one.
    """
    if column.type != "string":
        text = F.nullif(text, F.lit(""))
    if column.pair is not None:
        entries = split_list(column, text) if column.is_list else F.array(text)
        return parse_pairs(column, column.pair, text, entries)
    return {column.name: ParsedColumn(parse_text(column, text), text.isNotNull(), text)}


# Java's names of types behind a number, and its hexadecimal floats: Spark casts 5D, 1f and 0x1p3.
_NO_NUMBER = "[0-9.][dDfFxXpP]"


def _without_suffix(column: ColumnConfig, text: Column) -> Column:
    """The text of a column; null where Spark alone would take it for a float, or a list of some."""
    return F.when(~text.rlike(_NO_NUMBER), text) if column.is_float else text


def parse_text(column: ColumnConfig, text: Column) -> Column:
    """Parses the text of a column without a second one."""
    if column.is_list:
        text = _without_suffix(column, text)
        return split_list(column, text).try_cast(SPARK_TYPES[column.type])
    return parse_scalar(column, text)


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
_FIELD_TOKENS = "__tokens"
# Ends the last field as a separator ends the others; no line has it inside.
_END = "\n"


def split_lines(
    lines: DataFrame, config: SourceConfig, names: list[str] | None, folders: FolderTexts
) -> tuple[DataFrame, dict[str, ParsedColumn], list[Fault]]:
    """Takes lines apart into the declared columns.

    Args:
        lines: A frame with `__line`.
        config: A source that is delimited, csv or pattern.
        names: Names in the header where columns are found by name; a column that is not among
            them is what the file's folder says, or null. None: by position.
        folders: What folders say.

    Returns:
        The lines with what was split, all parsed columns, and what may be wrong with a
        line's shape.
    """
    split, faults = _split_by_separator(lines, config)
    count = len(config.columns) if names is None else len(names)
    shape = "pattern_mismatch" if config.format == "pattern" else "wrong_field_count"
    faults.append((F.size(_FIELDS) != count, shape))
    columns: dict[str, ParsedColumn] = {}
    for position, column in enumerate(config.columns):
        if names is None:
            text = F.get(F.col(_FIELDS), F.lit(position))
        elif column.field_name in names:
            text = F.get(F.col(_FIELDS), F.lit(names.index(column.field_name)))
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
    tokens = _find_tokens(line, config)
    split = lines.withColumn(_FIELD_TOKENS, tokens).withColumn(_FIELDS, _unquote(config))
    return split, [(_are_cut(F.col(_FIELD_TOKENS), line), "malformed_quotes")]


def has_bad_quotes(line: Column, config: SourceConfig) -> Column:
    """Whether a line has a quote without an end, or text behind its end."""
    return F.contains(line, F.lit(config.quote_mark)) & _are_cut(_find_tokens(line, config), line)


def _find_tokens(line: Column, config: SourceConfig) -> Column:
    ended = F.concat(line, F.lit(_END))
    return F.regexp_extract_all(ended, F.lit(_token_pattern(config)), F.lit(0))


def _are_cut(tokens: Column, line: Column) -> Column:
    """Whether tokens, which follow each other without a gap, end early: the rest is no field."""
    return F.array_join(tokens, "") != F.concat(line, F.lit(_END))


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

    return F.transform(_FIELD_TOKENS, field)


def _escaped(config: SourceConfig) -> tuple[str, str, str]:
    """Quote, escape and separator as a regular expression writes them."""
    mark = config.quote_mark or ""

    def literal(text: str) -> str:
        return "".join(f"\\x{{{ord(character):x}}}" for character in text)

    return literal(mark), literal(config.escape or mark), literal(config.field_separator)


_SPARSE_TOKENS = "__tokens"
_PAIRS = "__pairs"
_QID = "qid:"
_PARTS = {"libffm": ("fields", "indices", "values")}
_PAIR_PARTS = ("indices", "values")


def split_sparse_lines(
    lines: DataFrame, config: SourceConfig
) -> tuple[DataFrame, dict[str, ParsedColumn], list[Fault]]:
    """Takes lines apart into label, query id and aligned lists of indices and values.

    What follows a `#` is a comment. A pair that has not all of its parts, or one part too many,
    makes the row a bad row (`malformed_pair`): nothing is dropped out of a list.

    Args:
        lines: A frame with `__line`.
        config: A source of a sparse format.

    Returns:
        The lines with what was split, all parsed columns, and what may be wrong with the
        line's shape.
    """
    parts = _PARTS.get(config.format, _PAIR_PARTS)
    bare = F.trim(F.regexp_replace(LINE_COLUMN, "#.*", ""))
    split = lines.withColumn(_SPARSE_TOKENS, F.split(bare, r"\s+"))
    has_qid = F.startswith(F.get(_SPARSE_TOKENS, F.lit(1)), F.lit(_QID))
    first_pair = F.when(has_qid, 3).otherwise(2)
    split = split.withColumn(_PAIRS, F.slice(_SPARSE_TOKENS, first_pair, F.size(_SPARSE_TOKENS)))
    colons = len(parts) - 1
    part = "[^:]+"
    whole = f"^{':'.join([part] * len(parts))}$"
    malformed = F.exists(_PAIRS, lambda pair: ~pair.rlike(whole))
    columns = {}
    for column in config.columns:
        name = column.field_name
        if name == "label":
            text = F.nullif(F.get(_SPARSE_TOKENS, F.lit(0)), F.lit(""))
            columns[column.name] = _scalar(column, text)
        elif name == "qid":
            second = F.get(_SPARSE_TOKENS, F.lit(1))
            text = F.when(has_qid, F.substr(second, F.lit(len(_QID) + 1)))
            columns[column.name] = _scalar(column, text)
        else:
            columns[column.name] = _list(column, parts.index(name), colons)
    comment = F.startswith(F.trim(LINE_COLUMN), F.lit("#"))
    return split, columns, [(comment, "comment_line"), (malformed, "malformed_pair")]


def _scalar(column: ColumnConfig, text: Column) -> ParsedColumn:
    return ParsedColumn(parse_scalar(column, text), text.isNotNull(), text)


def _list(column: ColumnConfig, number: int, colons: int) -> ParsedColumn:
    def part(pair: Column) -> Column:
        if number == colons:
            return F.substring_index(pair, ":", -1)
        head = F.substring_index(pair, ":", number + 1)
        return F.substring_index(head, ":", -1)

    texts = F.transform(_PAIRS, part)
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
    lines: DataFrame, config: SourceConfig, folders: FolderTexts
) -> tuple[DataFrame, dict[str, ParsedColumn], list[Fault], Column]:
    """Takes objects apart into the declared columns.

    Every value is first taken as it is written, so that one that does not fit its column is told
    from one that is not there.

    Args:
        lines: A frame with `__line`.
        config: A source of JSON lines.
        folders: What the files' folders say where an object has no value.

    Returns:
        The lines with what was parsed, all parsed columns, what may be wrong with a line,
        and the keys of each object that are not declared.
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
    if column.pair is not None:
        return parse_pairs(column, column.pair, text, entries)
    value = F.transform(entries, lambda entry: parse_element(column, entry))
    return {column.name: ParsedColumn(value, text.isNotNull(), text)}


def parse_element(column: ColumnConfig, text: Column) -> Column:
    """Parses the text of one value of a list column."""
    return parse_scalar(_element(column), text)


def _element(column: ColumnConfig) -> ColumnConfig:
    data: dict[str, Any] = {"name": column.name, "type": column.element_type}
    return ColumnConfig.model_validate(data)

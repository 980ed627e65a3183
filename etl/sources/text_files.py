"""Text files by line: decoded, with the place of each line, headers recognised and checked."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from conf.errors import InputDataError, did_you_mean
from conf.etl.sources import SEPARATED_FORMATS, SourceConfig
from conf.manifest import InputFile
from etl.sources.session_settings import changed_settings
from etl.sources.source import FILE_COLUMN, LINE_COLUMN, REPEATED_HEADER, Fault, Reading

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


_MAX_HEADER_BYTES = 1 << 20
_LINE_END = re.compile(rb"\r\n|\r|\n")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# By their names Hadoop tells the files that it decompresses.
_COMPRESSED = frozenset({".gz", ".bz2", ".deflate", ".lz4", ".snappy", ".zst"})


@dataclass(frozen=True)
class TextLayout:
    """Files whose lines have the same fields, and begin with the same header if with any."""

    files: tuple[InputFile, ...]
    fields: tuple[str, ...]
    header: bytes | None = None


def find_layouts(
    spark: SparkSession, reading: Reading, optional: Collection[str]
) -> list[TextLayout]:
    """Finds the fields of each file of separated lines, by its header or by position.

    Headers that name columns as they are declared go by name, file by file; `header: by_name` may
    name others too. Any other header goes by position: there is one, with as many names as columns.
    """
    config, files = reading.config, reading.files
    fields = tuple(column.field_name for column in config.columns)
    absent = {column.field_name for column in config.columns if column.name in optional}
    given = {*reading.folders} & {*fields}
    lackable = absent | given  # Without a header the number of fields tells whether they are there.
    if config.header is False and (not lackable or config.format not in SEPARATED_FORMATS):
        return [TextLayout(files, fields)]
    lines = _read_first_lines(spark, files)
    if config.header is False:
        return _group_by_count(config, lines, fields, (lackable, absent, given, set()))
    headers = [TextLayout(files, header_names(config, line), line) for line, files in lines.items()]
    needed = {*fields} - lackable
    is_named = all(needed <= {*header.fields} <= {*fields} for header in headers)
    if config.header == "by_name" or (is_named and config.pattern is None):
        _check_names(reading.name, fields, needed, headers)
        return headers
    if len(headers) > 1 or (config.pattern is None and len(headers[0].fields) != len(fields)):
        fix = "; set header: by_name if files name the same columns, or header: false without one"
        raise _refuse(reading.name, f"is not one of {len(fields)} fields", headers[-1], fix)
    return [replace(header, fields=fields) for header in headers]


def _group_by_count(
    config: SourceConfig,
    lines: Mapping[bytes, tuple[InputFile, ...]],
    fields: tuple[str, ...],
    choices: Sequence[Collection[str]],
) -> list[TextLayout]:
    """Groups files by the fields that they have, of what may lack together the last that fits."""
    lefts = [tuple(field for field in fields if field not in lacking) for lacking in choices]
    by_count = {len(left): left for left in lefts}
    groups: dict[tuple[str, ...], tuple[InputFile, ...]] = {}
    for line, files in lines.items():
        left = by_count.get(len(header_names(config, line)) if line else 0, fields)
        groups[left] = (*groups.get(left, ()), *files)
    return [TextLayout(files, left) for left, files in groups.items()]


def _check_names(
    name: str, fields: tuple[str, ...], needed: Collection[str], headers: Sequence[TextLayout]
) -> None:
    for header in headers:
        repeated = [field for field in fields if header.fields.count(field) > 1]
        if repeated or not {*fields} & {*header.fields}:
            raise _refuse(name, "names no declared column, or one twice", header)
    found = {field for header in headers for field in header.fields}
    if missing := [field for field in fields if field in needed and field not in found]:
        fix = f"; {did_you_mean(missing[0], headers[0].fields)}"
        raise _refuse(name, f"does not name {', '.join(missing)}", headers[0], fix)


def _refuse(name: str, what: str, header: TextLayout, fix: str = "") -> InputDataError:
    return InputDataError(
        f"source {name!r}: its header {what}",
        received=f"{header.files[0].path}: {(header.header or b'')[:200]!r}",
        fix=f"correct sources.{name}.columns or .separator{fix}",
    )


def escape_path(path: str) -> str:
    """Escapes what Spark would read as a pattern in a file name."""
    return re.sub(r"([\[\]{}*?\\])", r"\\\1", path)


def _read_first_lines(
    spark: SparkSession, files: Sequence[InputFile]
) -> dict[bytes, tuple[InputFile, ...]]:
    """The files by their first line, without its end; those without a byte have none."""
    lines: dict[bytes, tuple[InputFile, ...]] = {}
    for file in files:
        if file.bytes:
            line = _read_first_line(spark, file.path)
            lines[line] = (*lines.get(line, ()), file)
    return lines


def _read_first_line(spark: SparkSession, path: str) -> bytes:
    if Path(path).suffix.lower() in _COMPRESSED:
        row = spark.read.text(escape_path(path)).select(F.col("value").cast("binary")).head()
        return b"" if row is None else bytes(row[0])
    with Path(path).open("rb") as file:
        start = file.readline(_MAX_HEADER_BYTES)
    return _LINE_END.split(start.removeprefix(_BYTE_ORDER_MARK), maxsplit=1)[0]


def header_names(config: SourceConfig, header: bytes) -> tuple[str, ...]:
    """The fields of a header line, without the quotes around them, which may hold separators."""
    text, mark = header.decode(config.encoding, errors="replace"), config.quote_mark
    separator = config.field_separator
    if mark is None or len(separator) > 1:
        return tuple(name.strip(mark or "") for name in text.split(separator))
    escape = None if config.escape == mark else config.escape
    quotes: Any = {"quotechar": mark, "escapechar": escape, "doublequote": escape is None}
    return tuple(next(csv.reader([text], delimiter=separator, **quotes), [])) or ("",)


RAW_COLUMN = "__raw"
# Encodings of Java by their names, and U+FFFD for bytes that one does not know, which make the row
# a bad row: else the task would fail.
_JAVA_CHARSETS = {
    "spark.sql.legacy.javaCharsets": "true",
    "spark.sql.legacy.codingErrorAction": "true",
}


def read_lines(spark: SparkSession, config: SourceConfig, files: Sequence[InputFile]) -> DataFrame:
    """Reads lines as `__raw` (the bytes), `__line` (the text), `__file` and `_metadata`."""
    raw, file = F.col(RAW_COLUMN), F.col("_metadata.file_path")
    lines = spark.read.text([escape_path(file.path) for file in files]).select(
        F.col("value").alias(RAW_COLUMN), "_metadata", file.alias(FILE_COLUMN)
    )
    if config.encoding == "utf-8":
        return lines.withColumn(LINE_COLUMN, F.make_valid_utf8(raw))
    charset = config.encoding.replace("latin-1", "iso-8859-1")
    # Spark takes these settings into the plan.
    with changed_settings(spark, _JAVA_CHARSETS):
        return lines.withColumn(LINE_COLUMN, F.decode(raw.cast("binary"), charset))


# A URI made of a path writes these characters as they are, by any library.
_PLAIN_PATH = re.compile(r"/[\w/.=,@~+-]*", re.ASCII)
_ROOTS = ("file:", "file://")


def file_order(name: str, files: Sequence[InputFile]) -> Column:
    """Position in the input, whatever the partitioning; the name tells its rows from others'."""
    # A number stands for a path, since every row carries it through each sort. The id grows with
    # the line inside one block, and blocks are ordered by where they start.
    paths = sorted(file.path for file in files)
    digits = len(str(len(paths)))
    numbers = {path: f"{name}/{number:0{digits}d}" for number, path in enumerate(paths)}
    uri = F.col("_metadata.file_path")
    unknown = F.raise_error(F.concat(F.lit("not one of the input's files: "), uri))
    return F.struct(
        F.coalesce(value_of_path(numbers, uri), unknown.cast("string")).alias("file"),
        F.col("_metadata.file_block_start").alias("block"),
        F.monotonically_increasing_id().alias("line"),
    )


def value_of_path(values: Mapping[str, str | None], uri: Column) -> Column:
    """The text that a path stands for; Spark gives the URI, which a plain path is as it is."""
    if all(map(_PLAIN_PATH.fullmatch, values)):
        values = {f"{root}{path}": text for path, text in values.items() for root in _ROOTS}
        path = uri
    else:
        # In a URI a plus is a plus; only in a query does it stand for a space.
        path = F.replace(F.regexp_replace(uri, "^file:/+", "/"), F.lit("+"), F.lit("%2B"))
        path = F.try_url_decode(path)
    # One constant: a literal for each path would take seconds to plan.
    return F.try_element_at(F.from_json(F.lit(json.dumps(values)), "map<string,string>"), path)


def line_faults(config: SourceConfig, header: bytes | None) -> Iterator[Fault]:
    """What may be wrong with a line before it is taken apart."""
    line = F.col(LINE_COLUMN)
    if header is not None:
        yield F.col(RAW_COLUMN).cast("binary") == F.lit(header), REPEATED_HEADER
    # Spaces alone come before all that can be seen: few lines need to be trimmed.
    yield (line < "!") & (F.trim(line) == ""), "empty_line"
    # UTF-16 in the place of another encoding, or what a crash left of a log.
    yield F.contains(RAW_COLUMN, F.lit("\0")), "nul_byte"
    if config.encoding == "utf-8":
        yield ~F.is_valid_utf8(RAW_COLUMN), "not_utf8"
    elif config.encoding != "latin-1":
        yield F.contains(line, F.lit("\ufffd")), f"not_{config.encoding}"

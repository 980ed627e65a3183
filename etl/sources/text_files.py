"""Text files by line: decoded, with the place of each line, headers recognised and checked."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

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

    Headers that name columns as they are declared go by name, file by file. Other headers go by
    position: there is one, with as many names as columns. `header: by_name` has columns that are
    not declared too. Columns may be missing that are optional or given by folders; without a header
    the number of fields tells whether they are.
    """
    config, files = reading.config, reading.files
    fields = tuple(column.field_name for column in config.columns)
    given = {column.name for column in config.columns if column.field_name in reading.folders}
    lackable = {*optional, *given}
    if config.header is False and (not lackable or config.format not in SEPARATED_FORMATS):
        return [TextLayout(files, fields)]
    lines = _read_first_lines(spark, files)
    if config.header is False:
        choices = [frozenset(names) for names in ((), given, optional, lackable)]
        return _group_by_count(config, lines, choices)
    headers = [TextLayout(files, header_names(config, line), line) for line, files in lines.items()]
    needed = {column.field_name for column in config.columns if column.name not in lackable}
    is_named = all(needed <= set(header.fields) <= set(fields) for header in headers)
    if config.header == "by_name" or (is_named and config.pattern is None):
        _check_names(reading.name, fields, needed, headers)
        return headers
    _check_position(reading.name, config, fields, headers)
    return [replace(header, fields=fields) for header in headers]


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
        return tuple(name.strip(mark) if mark else name for name in text.split(separator))
    escape = None if config.escape == mark else config.escape
    fields = csv.reader(
        [text],
        delimiter=separator,
        quotechar=mark,
        escapechar=escape,
        doublequote=escape is None,
    )
    return tuple(next(fields, [])) or ("",)


def _group_by_count(
    config: SourceConfig,
    lines: Mapping[bytes, tuple[InputFile, ...]],
    choices: Sequence[frozenset[str]],
) -> list[TextLayout]:
    """Groups files by the columns that they lack, as the number of fields of the first line tells.

    Of the columns that a file may lack together the first that fits holds; where none does, the
    first of all.
    """
    by_count = {len(config.columns) - len(lacking): lacking for lacking in reversed(choices)}
    groups: dict[frozenset[str], tuple[InputFile, ...]] = {}
    for line, files in lines.items():
        count = len(header_names(config, line)) if line else 0
        lacking = by_count.get(count, choices[0])
        groups[lacking] = (*groups.get(lacking, ()), *files)
    return [
        TextLayout(files, tuple(c.field_name for c in config.columns if c.name not in lacking))
        for lacking, files in groups.items()
    ]


def _check_position(
    name: str, config: SourceConfig, fields: tuple[str, ...], headers: Sequence[TextLayout]
) -> None:
    is_short = config.pattern is None and len(headers[0].fields) != len(fields)
    if is_short or len(headers) > 1:
        shown = [f"{h.files[0].path}: {(h.header or b'')[:120]!r}" for h in headers[:2]]
        raise InputDataError(
            f"source {name!r}: its header is not one of {len(fields)} fields",
            received="; ".join(shown),
            fix=f"correct sources.{name}.columns or .separator, set header: by_name if files name "
            "the same columns, or header: false if there is none",
        )


def _check_names(
    name: str, fields: tuple[str, ...], needed: Collection[str], headers: Sequence[TextLayout]
) -> None:
    for header in headers:
        repeated = [field for field in fields if header.fields.count(field) > 1]
        if repeated or not set(fields) & set(header.fields):
            raise _misnamed(name, repeated, fields, header)
    found = {field for header in headers for field in header.fields}
    if missing := [field for field in fields if field in needed and field not in found]:
        raise _misnamed(name, [], missing, headers[0])


def _misnamed(
    name: str, repeated: Sequence[str], missing: Sequence[str], header: TextLayout
) -> InputDataError:
    what, wrong = ("repeated", repeated) if repeated else ("missing", missing)
    return InputDataError(
        f"source {name!r}: its header does not name each declared column once",
        received=f"{header.files[0].path}: {', '.join(header.fields)}; {what}: {', '.join(wrong)}",
        fix=f"{did_you_mean(wrong[0], header.fields)}; correct sources.{name}.columns",
    )


RAW_COLUMN = "__raw"
_METADATA = "_metadata"
_REPLACEMENT = "\ufffd"
# Names that Spark decodes by itself; the others are Java's, which it must be told to allow.
_SPARK_CHARSETS = {"latin-1": "ISO-8859-1", "us-ascii": "US-ASCII"}
_JAVA_CHARSETS = {
    "spark.sql.legacy.javaCharsets": "true",
    "spark.sql.legacy.codingErrorAction": "true",
}


def read_lines(spark: SparkSession, config: SourceConfig, files: Sequence[InputFile]) -> DataFrame:
    """Reads the lines of text files.

    Returns:
        A frame of `__raw` (the bytes), `__line` (the text), `__file` and Spark's `_metadata`.
    """
    paths = [escape_path(file.path) for file in files]
    lines = spark.read.text(paths).select(F.col("value").alias(RAW_COLUMN), _METADATA)
    # Spark takes these settings into the plan. Bytes that the charset does not know become U+FFFD,
    # which makes the row a bad row, not a failed task.
    is_plain = config.encoding in ("utf-8", "latin-1")
    with changed_settings(spark, {} if is_plain else _JAVA_CHARSETS):
        return lines.withColumn(LINE_COLUMN, _decode(config)).withColumn(
            FILE_COLUMN, F.col(f"{_METADATA}.file_path")
        )


def _decode(config: SourceConfig) -> Column:
    raw = F.col(RAW_COLUMN)
    if config.encoding == "utf-8":
        return F.make_valid_utf8(raw)
    charset = _SPARK_CHARSETS.get(config.encoding, config.encoding)
    return F.decode(raw.cast("binary"), charset)


# A URI made of a path writes these characters as they are, by any library.
_PLAIN_PATH = re.compile(r"/[\w/.=,@~+-]*", re.ASCII)
_ROOTS = ("file:", "file://")


def file_order(name: str, files: Sequence[InputFile]) -> Column:
    """Position in the input, whatever the partitioning; the name tells its rows from others'.

    Files are ordered by their path, which a number stands for: every row carries it through each
    sort. The id grows with the line inside one block, and blocks are ordered by where they start.
    """
    paths = sorted(file.path for file in files)
    digits = len(str(len(paths)))
    numbers = {path: f"{name}/{number:0{digits}d}" for number, path in enumerate(paths)}
    uri = F.col(f"{_METADATA}.file_path")
    place = value_of_path(numbers, uri, is_plain=all(map(_PLAIN_PATH.fullmatch, paths)))
    unknown = F.raise_error(F.concat(F.lit("not one of the input's files: "), uri))
    return F.struct(
        F.coalesce(place, unknown.cast("string")).alias("file"),
        F.col(f"{_METADATA}.file_block_start").alias("block"),
        F.monotonically_increasing_id().alias("line"),
    )


def value_of_path(
    values: Mapping[str, str | None], uri: Column, *, is_plain: bool = False
) -> Column:
    """The text that a path stands for; Spark gives the URI, which a plain path is as it is."""
    if is_plain:
        values = {f"{root}{path}": text for path, text in values.items() for root in _ROOTS}
        path = uri
    else:
        # In a URI a plus is a plus; only in a query does it stand for a space.
        path = F.replace(F.regexp_replace(uri, "^file:/+", "/"), F.lit("+"), F.lit("%2B"))
        path = F.try_url_decode(path)
    # One constant: a literal for each path would take seconds to plan.
    return F.try_element_at(F.from_json(F.lit(json.dumps(values)), "map<string,string>"), path)


def line_faults(config: SourceConfig, header: bytes | None) -> list[Fault]:
    """What may be wrong with a line before it is taken apart."""
    faults = []
    if header is not None:
        is_header = F.col(RAW_COLUMN).cast("binary") == F.lit(header)
        faults.append((is_header, REPEATED_HEADER))
    # Spaces alone come before all that can be seen: few lines need to be trimmed.
    line = F.col(LINE_COLUMN)
    faults.append(((line < "!") & (F.trim(line) == ""), "empty_line"))
    # UTF-16 in the place of another encoding, or what a crash left of a log.
    faults.append((F.contains(RAW_COLUMN, F.lit("\0")), "nul_byte"))
    if config.encoding == "utf-8":
        faults.append((~F.is_valid_utf8(RAW_COLUMN), "not_utf8"))
    elif config.encoding != "latin-1":
        undecoded = F.contains(F.col(LINE_COLUMN), F.lit(_REPLACEMENT))
        faults.append((undecoded, f"not_{config.encoding}"))
    return faults

"""Text files by line: decoded, with the place of each line, headers recognised and checked."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from conf.errors import InputDataError, did_you_mean
from conf.etl.sources import SourceConfig
from conf.manifest import InputFile
from etl.sources.files import count_levels
from etl.sources.session_settings import changed_settings
from etl.sources.source import FILE_COLUMN, LINE_COLUMN, REPEATED_HEADER, Fault

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


_MAX_HEADER_BYTES = 1 << 20
_LINE_END = re.compile(rb"\r\n|\r|\n")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# By their names Hadoop tells the files that it decompresses.
_COMPRESSED = frozenset({".gz", ".bz2", ".deflate", ".lz4", ".snappy", ".zst"})


def escape_path(path: str) -> str:
    """Escapes what Spark would read as a pattern in a file name."""
    return re.sub(r"([\[\]{}*?\\])", r"\\\1", path)


def read_headers(
    spark: SparkSession,
    name: str,
    config: SourceConfig,
    files: Iterable[InputFile],
    optional: Collection[str] = (),
) -> dict[bytes, tuple[InputFile, ...]]:
    """Reads the first line of each file.

    Columns are taken by position, so there is one header: it may name them as it likes, but there
    must be as many names as declared columns, and declared names must stand where they are
    declared. With `header: by_name` each file has a header of its own, which names some of the
    declared columns, each once; there may be more. One of the files must name a column, at least.

    Args:
        spark: Session, for compressed files.
        name: The source's name in the config.
        config: Its declaration.
        files: Its files; those without a byte have no header.
        optional: Columns that no header needs to name, where they are found by name.

    Returns:
        The files by their header line, without its end.

    Raises:
        InputDataError: By position, a first line has another number of fields than the source has
            columns, names the columns in another order, or is not the same in all files; by name,
            it names none of the columns, or one of them twice, or no file names a column.
    """
    headers: dict[bytes, tuple[InputFile, ...]] = {}
    for file in files:
        if file.bytes:
            line = _read_first_line(spark, name, file.path)
            headers[line] = (*headers.get(line, ()), file)
    if config.header == "by_name":
        _check_names(name, config, headers, optional)
        return headers
    if len(headers) > 1:
        firsts = list(headers.items())[:2]
        raise InputDataError(
            f"source {name!r}: its files have different headers",
            received="; ".join(f"{group[0].path}: {_show(line)}" for line, group in firsts),
            allowed="one header, since columns are read by position",
            fix="set header: by_name if they name the same columns, make them sources of their "
            "own, or set header: false if they have none",
        )
    for header, group in headers.items():
        _check_header(name, config, header, group[0].path)
    return headers


def are_named(
    spark: SparkSession,
    name: str,
    config: SourceConfig,
    files: Iterable[InputFile],
    optional: Collection[str],
) -> bool:
    """Whether each header names the columns as they are declared, but for optional ones.

    Args:
        spark: Session, for compressed files.
        name: The source's name in the config.
        config: A source with a header, whose columns are read by position.
        files: Its files.
        optional: Columns that a file may lack.
    """
    if config.pattern is not None:
        return False
    declared = {column.field_name for column in config.columns}
    needed = {column.field_name for column in config.columns if column.name not in optional}
    return all(
        needed <= set(header_names(config, _read_first_line(spark, name, file.path))) <= declared
        for file in files
        if file.bytes
    )


def group_by_fields(
    spark: SparkSession,
    name: str,
    config: SourceConfig,
    files: Iterable[InputFile],
    choices: Sequence[frozenset[str]],
) -> dict[frozenset[str], list[InputFile]]:
    """Groups files by the columns that they lack, as the number of fields of the first line tells.

    Args:
        spark: Session, for compressed files.
        name: The source's name in the config.
        config: A source whose columns are read by position.
        files: Its files.
        choices: Columns that a file may lack together. The first that fits holds; where none does,
            the first of all.
    """
    by_count = {len(config.columns) - len(lacking): lacking for lacking in reversed(choices)}
    groups: dict[frozenset[str], list[InputFile]] = {}
    for file in files:
        line = _read_first_line(spark, name, file.path) if file.bytes else b""
        fields = len(header_names(config, line)) if line else 0
        groups.setdefault(by_count.get(fields, choices[0]), []).append(file)
    return groups


def _read_first_line(spark: SparkSession, name: str, path: str) -> bytes:
    if Path(path).suffix.lower() in _COMPRESSED:
        row = spark.read.text(escape_path(path)).select(F.col("value").cast("binary")).head()
        return b"" if row is None else bytes(row[0])
    with Path(path).open("rb") as file:
        start = file.readline(_MAX_HEADER_BYTES)
    line = _LINE_END.split(start.removeprefix(_BYTE_ORDER_MARK), maxsplit=1)[0]
    if len(line) > _MAX_HEADER_BYTES - 4:
        raise InputDataError(
            f"source {name!r}: the first line is too long for a header",
            received=f"{path}: {line[:80]!r}…",
            allowed=f"at most {_MAX_HEADER_BYTES} bytes",
            fix=f"set sources.{name}.header to false if there is none",
        )
    return line


def header_names(config: SourceConfig, header: bytes) -> list[str]:
    """The fields of a header line, without the quotes around them, which may hold separators."""
    text, mark = header.decode(config.encoding, errors="replace"), config.quote_mark
    separator = config.field_separator
    if mark is None or len(separator) > 1:
        return [name.strip(mark) if mark else name for name in text.split(separator)]
    escape = None if config.escape == mark else config.escape
    fields = csv.reader(
        [text],
        delimiter=separator,
        quotechar=mark,
        escapechar=escape,
        doublequote=escape is None,
    )
    return next(fields, []) or [""]


def _check_header(name: str, config: SourceConfig, header: bytes, path: str) -> None:
    if config.pattern is not None:
        return
    fields = header_names(config, header)
    declared = [column.field_name for column in config.columns]
    reordered = sorted(fields) == sorted(declared) and fields != declared
    if len(fields) == len(declared) and not reordered:
        return
    raise InputDataError(
        f"source {name!r}: its header does not fit the declared columns",
        received=f"{path}: {_show(header)}",
        allowed=f"{len(declared)} fields, by position: {config.field_separator.join(declared)}",
        fix=f"correct sources.{name}.columns or .separator, or set header: false if there is none",
    )


def _check_names(
    name: str,
    config: SourceConfig,
    headers: Mapping[bytes, tuple[InputFile, ...]],
    optional: Collection[str],
) -> None:
    declared = [column.field_name for column in config.columns]
    found: list[str] = []
    for header, group in headers.items():
        fields = header_names(config, header)
        repeated = [field for field in declared if fields.count(field) > 1]
        if repeated or not set(declared) & set(fields):
            raise _misnamed(name, declared, repeated, fields, group[0].path)
        found += fields
    needed = [column.field_name for column in config.columns if column.name not in optional]
    missing = [field for field in needed if field not in found]
    if missing:
        paths = [group[0].path for group in headers.values()]
        raise _misnamed(name, missing, [], list(dict.fromkeys(found)), ", ".join(paths[:2]))


def _misnamed(
    name: str, missing: list[str], repeated: list[str], fields: list[str], path: str
) -> InputDataError:
    wrong = repeated or missing
    return InputDataError(
        f"source {name!r}: its header does not name each declared column once",
        received=f"{path}: {'repeated' if repeated else 'missing'}: {', '.join(wrong)}",
        allowed=f"a name in the header: {', '.join(fields)}",
        fix=f"{did_you_mean(wrong[0], fields)}; correct sources.{name}.columns (name or field)",
    )


def _show(line: bytes) -> str:
    return repr(line[:120].decode("utf-8", errors="replace"))


RAW_COLUMN = "__raw"
_METADATA = "_metadata"
_REPLACEMENT = "\ufffd"
# A URI made of a path writes these characters as they are, by any library.
_PLAIN_PATH = re.compile(r"/[\w/.=,@~+-]*", re.ASCII)
_ROOTS = ("file:", "file://")
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
    with _java_charsets(spark, config):
        return lines.withColumn(LINE_COLUMN, _decode(config)).withColumn(
            FILE_COLUMN, F.col(f"{_METADATA}.file_path")
        )


def file_order(name: str, files: Sequence[InputFile]) -> Column:
    """Position in the input, whatever the partitioning.

    The id grows with the line inside one block, and blocks are ordered by where they start.

    Args:
        name: The source's name, which tells its rows from those of others.
        files: All its files.
    """
    return F.struct(
        _file_place(name, files).alias("file"),
        F.col(f"{_METADATA}.file_block_start").alias("block"),
        F.monotonically_increasing_id().alias("line"),
    )


def _file_place(name: str, files: Sequence[InputFile]) -> Column:
    """What orders files by their path: short, as every row carries it through each sort."""
    path = F.col(f"{_METADATA}.file_path")
    paths = sorted(file.path for file in files)
    if not all(map(_PLAIN_PATH.fullmatch, paths)):
        # No more of the path than tells files apart.
        tail = F.substring_index(path, "/", -count_levels(files))
        return F.concat(F.lit(f"{name}/"), tail)
    digits = len(str(len(paths)))
    names = {
        f"{root}{file}": f"{name}/{number:0{digits}d}"
        for number, file in enumerate(paths)
        for root in _ROOTS
    }
    place = F.try_element_at(F.from_json(F.lit(json.dumps(names)), "map<string,string>"), path)
    unknown = F.raise_error(F.concat(F.lit("not one of the input's files: "), path))
    return F.coalesce(place, unknown.cast("string"))


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


def _decode(config: SourceConfig) -> Column:
    raw = F.col(RAW_COLUMN)
    if config.encoding == "utf-8":
        return F.make_valid_utf8(raw)
    charset = _SPARK_CHARSETS.get(config.encoding, config.encoding)
    return F.decode(raw.cast("binary"), charset)


@contextmanager
def _java_charsets(spark: SparkSession, config: SourceConfig) -> Iterator[None]:
    """Lets Spark decode by any charset of Java while a plan is made.

    Spark takes these settings into the plan; afterwards the session is as it was. Bytes that the
    charset does not know become U+FFFD, which makes the row a bad row, not a failed task.
    """
    if config.encoding in ("utf-8", "latin-1"):
        yield
        return
    with changed_settings(spark, _JAVA_CHARSETS):
        yield

"""The first lines of input files that declare `header: true`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from conf.errors import InputDataError, did_you_mean
from conf.etl import SourceConfig
from conf.provenance import InputFile

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_MAX_HEADER_BYTES = 1 << 20
_LINE_END = re.compile(rb"\r\n|\r|\n")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# By their names Hadoop tells the files that it decompresses.
_COMPRESSED = frozenset({".gz", ".bz2", ".deflate", ".lz4", ".snappy", ".zst"})


def escape_path(path: str) -> str:
    """Escapes what Spark would read as a pattern in a file name."""
    return re.sub(r"([\[\]{}*?\\])", r"\\\1", path)


def read_headers(
    spark: SparkSession, name: str, config: SourceConfig, files: Iterable[InputFile]
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
        _check_names(name, config, headers)
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
    """The names in a header line, without the quotes around them."""
    names = header.decode(config.encoding, errors="replace").split(config.field_separator)
    mark = config.quote_mark
    return [name.strip(mark) if mark else name for name in names]


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
    name: str, config: SourceConfig, headers: Mapping[bytes, tuple[InputFile, ...]]
) -> None:
    declared = [column.field_name for column in config.columns]
    found: list[str] = []
    for header, group in headers.items():
        fields = header_names(config, header)
        repeated = [field for field in declared if fields.count(field) > 1]
        if repeated or not set(declared) & set(fields):
            raise _misnamed(name, declared, repeated, fields, group[0].path)
        found += fields
    missing = [field for field in declared if field not in found]
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

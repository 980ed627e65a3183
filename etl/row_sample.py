"""Some rows of a source, and how many there are: read without Spark, for the estimate of a plan.

Text is looked at in a few places of a few files; files of columns tell their rows themselves.
"""

from __future__ import annotations

import csv
import datetime
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import chain
from math import floor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from conf.dates import UNITS_PER_SECOND
from conf.etl.sources import EPOCH_UNITS, SPARSE_FORMATS, ColumnConfig, SourceConfig
from conf.manifest import InputFile
from conf.storage.table_files import open_parquet

_FILES = 8
_PLACES, _PLACE_BYTES = 256, 1 << 12
_PACKED_BYTES = 1 << 20
_TABLE_ROWS, _TABLE_GROUPS = 4_000, 8
_CODECS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
_OTHER_CODECS = (".deflate", ".lz4", ".snappy")
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)

Row = dict[str, Any]


@dataclass(frozen=True)
class FileSample:
    """Rows of a file.

    Attributes:
        count: About how many it has; None: nothing tells.
        rows: Some of them; None: Spark alone reads their values.
        spread: Some of these, evenly spread over the file; None: all stand at its start.
    """

    count: float | None
    rows: Sequence[Row] | None = ()
    spread: Sequence[Row] | None = None


@dataclass(frozen=True)
class RowSample:
    """Rows of a source.

    Attributes:
        count: About how many there are; None: nothing tells.
        files: Some of them; none where values cannot be read without Spark.
    """

    count: int | None
    files: tuple[FileSample, ...] = ()

    def share(self, keep: Callable[[Sequence[Row]], Sequence[Row]]) -> float:
        """Returns the share of the rows that a filter keeps; 1 where there are none to look at."""
        counts = [(f.count or 0.0, len(keep(f.rows)) / len(f.rows)) for f in self.files if f.rows]
        return _mean(counts, 1.0)

    def share_between(self, column: str, first: float, end: float) -> float | None:
        """Returns the share of the rows whose number is from `first` on and below `end`.

        Numbers between those of the sample are taken to rise evenly: a log of a year, in order,
        tells a day.

        Returns:
            None where the sample stands at the start of a file, or has no number.
        """
        shares_of_files = []
        for file in self.files:
            if file.spread is None:
                return None
            numbers = np.sort([r[column] for r in file.spread if r[column] is not None])
            if not len(numbers):
                return None
            shares = (np.arange(len(numbers)) + 0.5) / len(numbers)
            low, high = np.interp([first, end], numbers, shares, left=0.0, right=1.0)
            shares_of_files.append((file.count or 0.0, float(high - low)))
        return _mean(shares_of_files, 0.0) if shares_of_files else None


def _mean(weighted: Sequence[tuple[float, float]], empty: float) -> float:
    total = sum(weight for weight, _ in weighted)
    return sum(weight * value for weight, value in weighted) / total if total else empty


def sample_source(
    source: SourceConfig, files: Sequence[InputFile], wanted: Iterable[str] = ()
) -> RowSample:
    """Counts the rows of a source, about, and reads some columns of some rows.

    Args:
        source: Its declaration.
        files: Its files; a table or a query has none.
        wanted: Columns to read.
    """
    files = [file for file in files if file.bytes]
    missing = set(wanted)
    columns = [column for column in source.columns if missing.intersection(_names(column))]
    missing -= {name for column in columns for name in _names(column)}
    if source.path is None or source.format == "avro":
        return RowSample(None)
    chosen = files[:: max(1, -(-len(files) // _FILES))]
    read = _read_table if source.format in ("parquet", "orc") else _read_text
    files_read = tuple(read(source, Path(file.path), columns) for file in chosen)
    if any(file.count is None for file in files_read):
        return RowSample(None)
    seen, total = sum(file.bytes for file in chosen), sum(file.bytes for file in files)
    count = round(sum(file.count or 0 for file in files_read) * total / seen) if seen else 0
    readable = not missing and all(file.rows is not None for file in files_read)
    return RowSample(count, files_read if readable else ())


def _names(column: ColumnConfig) -> list[str]:
    """Names of a column and of the one that its entries' second values make."""
    return [column.name, *([column.pair.name] if column.pair is not None else [])]


def _read_table(source: SourceConfig, path: Path, columns: Sequence[ColumnConfig]) -> FileSample:
    names = {column.field_name: column for column in columns}
    try:
        if source.format == "orc":
            from pyarrow import orc

            file = orc.ORCFile(str(path))
            count, groups, known = file.nrows, file.nstripes, set(file.schema.names)
            read: Callable[[int, list[str]], Any] = file.read_stripe
        else:
            table = open_parquet(path)
            count, groups = table.metadata.num_rows, table.num_row_groups
            known, read = set(table.schema_arrow.names), table.read_row_group
        if not names or not known.issuperset(names):
            return FileSample(count, None if names else [])
        step = max(1, groups // _TABLE_GROUPS)
        stride = max(1, count // step // _TABLE_ROWS)
        tables = [_spread(read(group, list(names)), stride) for group in range(0, groups, step)]
    except (OSError, pa.ArrowException):  # The build says what is wrong with it.
        return FileSample(None)
    rows = _try_rows(
        columns, ({c.name: row[f] for f, c in names.items()} for row in chain(*tables))
    )
    return FileSample(count, rows, rows)


def _try_rows(columns: Sequence[ColumnConfig], rows: Iterable[Row]) -> list[Row] | None:
    """Returns rows as the build reads them; None where Spark alone can."""
    try:
        return [_read_row(columns, row) for row in rows]
    except (ValueError, TypeError, AttributeError):
        return None


def _spread(table: Any, stride: int) -> list[Row]:
    rows: list[Row] = table.take(pa.array(np.arange(0, table.num_rows, stride))).to_pylist()
    return rows


def _read_text(source: SourceConfig, path: Path, columns: Sequence[ColumnConfig]) -> FileSample:
    suffix, size = path.suffix.lower(), path.stat().st_size
    if suffix in _OTHER_CODECS:
        return FileSample(None)
    with path.open("rb") as file:
        if suffix in _CODECS:
            packed = file.read(_PACKED_BYTES)
            is_whole = len(packed) == size
            places = [_unpack(packed, _CODECS[suffix], is_whole=is_whole)]
            read, lines = len(packed), len(places[0])
        else:
            is_whole = size <= _PLACE_BYTES
            parts = 1 if is_whole else _PLACES
            starts = sorted({size * place // parts for place in range(parts)})
            places = [_read_place(file, start, size) for start in starts]
            read = sum(len(line) + 1 for place in places for line in place)
            lines = sum(map(len, places))
    if not lines:
        return FileSample(None if size > _PLACE_BYTES else 0.0)
    texts = [[_decode(source, line) for line in place] for place in places]
    header = texts[0][0] if source.header is not False and texts[0] else None
    rows, firsts = (
        _parse_lines(source, [t for t in found if t and t != header], columns, header or "")
        for found in (list(chain(*texts)), [place[0] for place in texts if place])
    )
    if is_whole or suffix in _CODECS:
        firsts = rows if is_whole else None
    return FileSample(size * lines / read - (header is not None), rows, firsts)


def _decode(source: SourceConfig, line: bytes) -> str:
    return line.decode(source.encoding, "replace").rstrip("\r")


def _read_place(file: Any, place: int, size: int) -> list[bytes]:
    """Whole lines behind a place of a file; a place inside a line begins with the next one."""
    file.seek(place)
    piece = file.read(_PLACE_BYTES)
    start = 0 if place == 0 else piece.find(b"\n") + 1
    is_end = place + len(piece) >= size
    end = len(piece) if is_end else piece.rfind(b"\n") + 1
    return piece[start:end].splitlines() if (start or not place) and start < end else []


def _unpack(packed: bytes, codec: str, *, is_whole: bool) -> list[bytes]:
    pieces: list[bytes] = []
    try:
        with pa.CompressedInputStream(pa.BufferReader(packed), codec) as stream:
            while piece := stream.read(1 << 16):
                pieces.append(piece)
    except (OSError, pa.ArrowException):  # It goes on behind what was read.
        is_whole = False
    lines = b"".join(pieces).splitlines()
    return lines if is_whole else lines[:-1]


def _parse_lines(
    source: SourceConfig, lines: Sequence[str], columns: Sequence[ColumnConfig], header: str
) -> list[Row] | None:
    """Returns rows of some columns; None where they are written in a way that Spark alone reads."""
    if not columns:
        return [{} for _ in lines]
    try:
        if source.format == "json":
            objects = [json.loads(line) for line in lines]
            values = [{c.name: row.get(c.field_name) for c in columns} for row in objects]
        else:
            values = [*_split_lines(source, lines, columns, header)]
    except (ValueError, TypeError, AttributeError, re.error, csv.Error):
        return None
    return _try_rows(columns, values)


def _split_lines(
    source: SourceConfig, lines: Sequence[str], columns: Sequence[ColumnConfig], header: str
) -> Iterable[Row]:
    if source.format in SPARSE_FORMATS:
        raise ValueError("a column of a sparse text is made of all its fields")
    if source.format == "pattern":
        pattern = re.compile(source.pattern or "")
        matches = (pattern.search(line) for line in lines)
        split: Iterable[Sequence[str | None]] = (m.groups() for m in matches if m is not None)
    else:
        split = _split_fields(source, lines)
    names = [column.name for column in source.columns]
    if source.header == "by_name":
        [fields] = _split_fields(source, [header])
        names = list(fields)
    places = {c.name: names.index(c.field_name if source.header == "by_name" else c.name)
              for c in columns}  # fmt: skip
    most = max(places.values())
    for fields_of_row in split:
        if len(fields_of_row) > most:
            row = {name: fields_of_row[place] for name, place in places.items()}
            yield {
                name: None if value in source.null_values else value for name, value in row.items()
            }


def _split_fields(source: SourceConfig, lines: Sequence[str]) -> Iterable[list[str]]:
    separator, quote = source.field_separator, source.quote_mark
    if quote is None or len(separator) > 1:
        return (line.split(separator) for line in lines)
    return csv.reader(lines, delimiter=separator, quotechar=quote, escapechar=source.escape)


def _read_row(columns: Sequence[ColumnConfig], row: Row) -> Row:
    """Returns a row as the build reads it; entries of two values make two columns."""
    read: Row = {}
    for column in columns:
        value, pair = row[column.name], column.pair
        if pair is not None:
            if column.is_list:
                raise ValueError("a list of entries")
            value, _, second = (value or "").partition(pair.separator)
            read[pair.name] = _read_value(pair.as_column(column), second or pair.default)
        read[column.name] = _read_value(column, value)
    return read


def _read_value(column: ColumnConfig, value: Any) -> Any:
    """Returns a value as the build reads it; one that does not parse is missing."""
    if value is None or column.is_list:
        return value
    try:
        match column.type:
            case "int64":
                return int(value)
            case "float32" | "float64":
                return float(value)
            case "timestamp":
                return _read_timestamp(column, value)
        return str(value)
    except (ArithmeticError, ValueError):
        return None


def _read_timestamp(column: ColumnConfig, value: Any) -> int:
    written = column.timestamp_format
    if isinstance(value, datetime.datetime | datetime.date):
        time = value
    elif written in EPOCH_UNITS:
        return floor(Decimal(str(value)) * 1000 / UNITS_PER_SECOND[EPOCH_UNITS[str(written)]])
    elif written is not None:
        raise TypeError("a pattern of Java's")
    else:
        time = datetime.datetime.fromisoformat(str(value))
    if not isinstance(time, datetime.datetime):
        time = datetime.datetime.combine(time, datetime.time())
    aware = time if time.tzinfo else time.replace(tzinfo=datetime.UTC)
    return (aware - _EPOCH) // datetime.timedelta(milliseconds=1)

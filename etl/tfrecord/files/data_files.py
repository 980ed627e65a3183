"""Data files of an output directory: places, limits, and partition folders as Spark has them.

Escaping and type inference follow Spark's `ExternalCatalogUtils` and `PartitioningUtils`; escapes
beyond ASCII, which Spark does not write, are UTF-8.
"""

from __future__ import annotations

import datetime
import decimal
import functools
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conf.errors import ConfigError, InputDataError, InternalError
from conf.local_paths import is_hidden
from conf.manifest import ShardInfo
from etl.tfrecord.types.refusals import refuse_unknown


@dataclass(frozen=True)
class DataFile:
    """A file to read: absolute path or URI, size, partition values (None: null).

    `split_offsets` are byte offsets of records; None where no manifest lists the file.
    """

    path: str
    bytes: int
    partition: tuple[str | None, ...] = ()
    split_offsets: tuple[int, ...] | None = None


@dataclass(frozen=True)
class WrittenShard:
    """A finished file; its path is relative to the root that it was written under."""

    info: ShardInfo
    split_offsets: tuple[int, ...]
    statistics: dict[str, Any] | None = None
    has_index: bool = False
    partition_values: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True)
class ShardLimits:
    """Records and stored bytes of a file at most; a longer record gets a file of its own."""

    rows: int | None = None
    bytes: int | None = None


@dataclass(frozen=True)
class ShardRange:
    """Shards of one folder, by successive Spark partitions from `start`, one each."""

    folder: str
    start: int
    count: int


def find_stem(ranges: Sequence[ShardRange], partition: int) -> str:
    """Path of the shard of a Spark partition, without its ending."""
    for shards in ranges:
        if shards.start <= partition < shards.start + shards.count:
            name = f"part-{partition - shards.start:05d}-of-{shards.count:05d}"
            return str(PurePosixPath(shards.folder, name))
    raise InternalError("no shard is planned for a partition that has rows", received=partition)


def list_folders(names: Iterable[str]) -> list[str]:
    """Folders of files and the folders around those, outermost first, the root left out."""
    folders = {str(p) for name in names for p in PurePosixPath(name).parents if str(p) != "."}
    return sorted(folders)


def make_folders(root: Path, names: Iterable[str]) -> None:
    """Makes the folders of files; never the root, which may have been removed on purpose."""
    for name in list_folders(names):
        (root / name).mkdir(exist_ok=True)


def index_path(shard: str) -> str:
    """Where the side file of a shard lies, hidden from readers; both below the root."""
    return f"_index/{shard}.idx"


def refuse_missing(where: object, listed: Collection[str], found: Collection[str]) -> None:
    """Refuses rows that went without a word."""
    missing = sorted(set(listed) - set(found))
    if missing:
        raise InputDataError(
            f"{where}/{missing[0]} is missing: its manifest lists it, but it is not there",
            received=f"{len(missing)} of {len(listed)} listed files missing",
            fix="restore the files, or remove the manifest to read what is left",
        )


NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"
Partition = tuple[tuple[str, str | None], ...]
"""Column and value of each level of partition directories, None for null."""
PartitionValues = tuple[str | None, ...]

_ESCAPED = frozenset(map(chr, range(0x20))) | frozenset("\"#%'*/:=?\\\x7f{[]^")
_INTEGER = re.compile(r"[+-]?[0-9]+")
_DECIMAL = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
# What Java's Double.parseDouble takes beyond that.
_DOUBLE = re.compile(rf"[+-]?(?:NaN|Infinity|{_DECIMAL.pattern}[dDfF]?)")
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_CLOCK = re.compile(r"([01][0-9]|2[0-3])(:[0-5][0-9]){2}(\.[0-9])?")
_MAX_DECIMAL_DIGITS = 38


def _escape(text: str) -> str:
    return "".join(f"%{ord(c):02X}" if c in _ESCAPED else c for c in text)


def _unescape(text: str) -> str:
    """Reads escaped bytes as UTF-8, as pyarrow and pandas write them; else as Spark reads them."""
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        return unquote(text, "latin-1")


def partition_path(names: Sequence[str], values: Sequence[str | None]) -> str:
    """Builds the relative directory of a partition, such as `date=2026-01-01/country=NO`."""
    return "/".join(
        f"{_escape(name)}={_escape_value(value) if value else NULL_PARTITION}"
        for name, value in zip(names, values, strict=True)
    )


def _escape_value(text: str) -> str:
    # Readers, Spark's too, look for null before they unescape: so the text differs from it.
    return f"%5F{text[1:]}" if text == NULL_PARTITION else _escape(text)


def read_partition(relative: str) -> Partition:
    """Reads a directory's parts with `=`, in whatever way they are escaped."""
    pairs = (part.partition("=") for part in relative.split("/") if "=" in part)
    return tuple(
        (_unescape(name), None if value == NULL_PARTITION else _unescape(value))
        for name, _, value in pairs
    )


def parse_partition_path(relative: str) -> dict[str, str | None]:
    """Reads the partition values off a relative directory; the inverse of `partition_path`."""
    pairs = read_partition(relative)
    values = dict(pairs)
    if len(values) < len(pairs) or not all(name and value != "" for name, value in pairs):
        allowed = f"<column>=<value>, each column once; {NULL_PARTITION} for null"
        raise InputDataError("not a partition directory", received=relative, allowed=allowed)
    return values


def _is_date(text: str) -> bool:
    try:
        return bool(_DATE.fullmatch(text) and datetime.date.fromisoformat(text))
    except ValueError:
        return False


def _is_timestamp(text: str) -> bool:
    day, space, clock = text.partition(" ")
    return bool(space and _is_date(day) and _CLOCK.fullmatch(clock))


def _whole_decimal_type(text: str) -> str | None:
    """Decimal type of a number written without a fraction, or None."""
    value = decimal.Decimal(text).as_tuple()
    if not isinstance(value.exponent, int) or value.exponent < 0:
        return None
    digits = len(value.digits) + value.exponent
    return f"decimal({digits},0)" if digits <= _MAX_DECIMAL_DIGITS else None


def infer_partition_type(text: str | None) -> str | None:
    """Returns the Spark type of one value as its simple name, or None for null."""
    if text is None:
        return None
    if _INTEGER.fullmatch(text):
        for name, bits in (("int", 32), ("bigint", 64)):
            if -(1 << bits - 1) <= int(text) < 1 << bits - 1:
                return name
    if _DECIMAL.fullmatch(text):
        return _whole_decimal_type(text) or "double"
    if _DOUBLE.fullmatch(text.strip()):
        return "double"
    if _is_timestamp(text):
        return "timestamp"
    return "date" if _is_date(text) else "string"


_WIDER = {
    frozenset({"int", "bigint"}): "bigint",
    frozenset({"int", "double"}): "double",
    frozenset({"date", "timestamp"}): "timestamp",
}
_DIGITS = {"int": 10, "bigint": 20}


def _widen(left: str | None, right: str | None) -> str | None:
    """Type that holds values of both; a string where Spark finds none."""
    if left is None or right is None or left == right:
        return left or right
    if (wider := _WIDER.get(frozenset({left, right}))) is not None:
        return wider
    if all(kind in _DIGITS or kind.startswith("decimal") for kind in (left, right)):
        digits = (_DIGITS.get(kind) or int(kind[8:-3]) for kind in (left, right))
        return f"decimal({max(digits)},0)"
    return "string"


def infer_partition_types(
    partitions: Iterable[Mapping[str, str | None]],
) -> tuple[tuple[str, str], ...]:
    """Spark's type of each partition column; of nulls alone a string, where Spark says void."""
    distinct = list({tuple(values.items()): values for values in partitions}.values())
    if not distinct:
        return ()
    names = list(distinct[0])
    for values in distinct:
        if list(values) != names:
            raise InputDataError(
                "the partition directories differ in their columns",
                received=f"{'/'.join(names) or 'none'} and {'/'.join(values) or 'none'}",
                fix="read one subdirectory, or move the files that do not belong",
            )
    kinds = {name: [infer_partition_type(values[name]) for values in distinct] for name in names}
    return tuple((n, functools.reduce(_widen, found) or "string") for n, found in kinds.items())


def parse_partition_value(name: str, text: str | None, target: pa.DataType) -> pa.Scalar:
    """Reads a partition value as a type; timestamps without a zone are UTC."""
    if text is None:
        return pa.scalar(None, target)
    try:
        if pa.types.is_timestamp(target) and target.tz is not None:
            moment = pa.scalar(text.strip()).cast(pa.timestamp(target.unit))
            return pa.scalar(moment.value, target)
        if pa.types.is_string(target) or pa.types.is_binary(target):
            return pa.scalar(text).cast(target)
        plain = pa.scalar(text.strip().removeprefix("+"))
        if pa.types.is_decimal(target) and "e" in text.lower():  # 1e3, to Spark a whole number
            plain = plain.cast(pa.float64())
        return plain.cast(target)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise InputDataError(
            f"a value of partition column {name!r} does not fit its type",
            received=repr(text),
            allowed=f"{target}; give the column another type in the schema, for example string",
        ) from error


def parse_names(text: str, option: str = "partitionBy") -> tuple[str, ...]:
    """Parses an option that names columns: comma separated, or a JSON list of strings."""
    names: list[Any] = [name.strip() for name in text.split(",")]
    if text.lstrip().startswith("["):
        try:
            names = json.loads(text)
        except ValueError:
            names = []
    if not names or not all(isinstance(n, str) and n for n in names) or len({*names}) < len(names):
        raise ConfigError(
            f"bad value of TFRecord option {option!r}",
            received=repr(text),
            allowed='distinct column names, as in date,country or ["date", "country"]',
        )
    return tuple(names)


def check_partition_columns(schema: pa.Schema, names: Sequence[str]) -> None:
    """Refuses partition columns that are not there, or have no safe text form or folder name."""
    missing = [name for name in names if name not in schema.names]
    refuse_unknown("partitionBy names columns that are not there", missing, schema.names)
    bad = [name for name in names if not _has_text_form(schema.field(name).type)]
    if bad:
        raise ConfigError(
            f"{len(bad)} column(s) cannot be partitioned by",
            received=", ".join(f"{name} ({schema.field(name).type})" for name in bad),
            allowed="boolean, integers, decimal, date, timestamp and string columns",
            fix="cast the column to one of these, floating point to string or decimal",
        )
    hidden = [name for name in names if is_hidden(f"{name}=", is_folder=True)]
    if hidden:
        what = "folders of these partition columns would be hidden from readers: rename them"
        raise ConfigError(what, received=", ".join(hidden))
    if len(names) == len(schema):
        what = "partitionBy names every column: the records would be empty"
        raise ConfigError(what, received=", ".join(names))


def _has_text_form(data_type: pa.DataType) -> bool:
    t = pa.types
    checks = (t.is_boolean, t.is_integer, t.is_decimal, t.is_date32, t.is_timestamp,
              t.is_string, t.is_large_string)  # fmt: skip
    return any(check(data_type) for check in checks)


def split_partitions(
    batch: pa.RecordBatch, keys: Sequence[pa.Array]
) -> Iterator[tuple[PartitionValues, pa.RecordBatch, np.ndarray]]:
    """Splits a batch by partition columns that it lacks, keeping the rows' order within each.

    Yields values as Spark casts them to strings, None for null; their rows; and the numbers of
    these in the batch, int64 `[rows]`.
    """
    codes = np.zeros(batch.num_rows, np.int64)
    columns: list[tuple[np.ndarray, list[str | None]]] = []
    for key in keys:
        encoded = pc.dictionary_encode(key, null_encoding="encode")
        indices = encoded.indices.to_numpy(zero_copy_only=False)
        # Dense again before each column: below the square of the rows, whatever their number.
        dense = np.unique(codes, return_inverse=True)[1] if columns else codes
        codes = dense * len(encoded.dictionary) + indices
        found = encoded.dictionary.to_pylist()
        columns.append((indices, [None if v is None else _format_value(v) for v in found]))
    starts, order = np.flatnonzero(np.diff(codes, prepend=-1)), np.arange(batch.num_rows)
    if len(starts) > len(np.unique(codes)):
        order = np.argsort(codes, kind="stable")
        batch, codes = batch.take(pa.array(order)), codes[order]
        starts = np.flatnonzero(np.diff(codes, prepend=-1))
    for start, end in zip(starts, np.append(starts, batch.num_rows)[1:], strict=True):
        values = tuple(texts[indices[order[start]]] for indices, texts in columns)
        yield values, batch.slice(start, end - start), order[start:end]


def _format_value(value: Any) -> str:
    """Text as Spark casts it; times in UTC where they have a zone, without trailing zeros."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, decimal.Decimal):
        return format(value, "f")
    if isinstance(value, datetime.datetime):
        value = value if value.tzinfo is None else value.astimezone(datetime.UTC)
        text = value.replace(tzinfo=None).isoformat(" ")
        return text.rstrip("0") if value.microsecond else text
    text = str(value)
    if not text:
        raise InputDataError(
            "a partition column holds an empty string, which would be read back as null",
            fix="write nullif(column, ''), or a word that stands for it",
        )
    return text

"""Takes the partition columns out of batches and sorts the rows by their values."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conf.errors import ConfigError, InputDataError
from etl.tfrecord.unknown_columns import refuse_unknown

_ALLOWED = "boolean, integers, decimal, date, timestamp and string columns"

PartitionValues = tuple[str | None, ...]


def parse_names(text: str, option: str = "partitionBy") -> tuple[str, ...]:
    """Parses an option that names columns: comma separated, or a JSON list of strings.

    Raises:
        ConfigError: No such list, an empty name, or a name that occurs twice.
    """
    names: object = [name.strip() for name in text.split(",")]
    if text.lstrip().startswith("["):
        try:
            names = json.loads(text)
        except ValueError:
            names = None
    valid = isinstance(names, list) and all(isinstance(n, str) and n for n in names)
    if not valid or not names or len(set(names)) < len(names):  # type: ignore[call-overload,arg-type]
        raise ConfigError(
            f"bad value of TFRecord option {option!r}",
            received=repr(text),
            allowed='distinct column names, as in date,country or ["date", "country"]',
        )
    return tuple(names)  # type: ignore[arg-type]


def check_partition_columns(schema: pa.Schema, names: Sequence[str]) -> None:
    """Refuses partition columns that are not there, or of a type without a safe text form.

    Args:
        schema: Schema of the rows, partition columns included.
        names: Partition columns.

    Raises:
        ConfigError: Names every such column; or nothing would be left for the records.
    """
    missing = [name for name in names if name not in schema.names]
    refuse_unknown("partitionBy names columns that are not there", missing, schema.names)
    bad = [name for name in names if not _has_text_form(schema.field(name).type)]
    if bad:
        raise ConfigError(
            f"{len(bad)} column(s) cannot be partitioned by",
            received=", ".join(f"{name} ({schema.field(name).type})" for name in bad),
            allowed=_ALLOWED,
            fix="cast the column to one of these, floating point to string or decimal",
        )
    if len(names) == len(schema):
        raise ConfigError(
            "partitionBy names every column: the records would be empty",
            received=", ".join(names),
            fix="leave out one of them, or add a copy under another name",
        )


def _has_text_form(data_type: pa.DataType) -> bool:
    t = pa.types
    checks = (t.is_boolean, t.is_integer, t.is_decimal, t.is_date32, t.is_timestamp,
              t.is_string, t.is_large_string)  # fmt: skip
    return any(check(data_type) for check in checks)


def split_partitions(
    batch: pa.RecordBatch, keys: Sequence[pa.Array]
) -> Iterator[tuple[PartitionValues, pa.RecordBatch, np.ndarray]]:
    """Splits a batch by partition values, keeping the rows' order within each.

    Args:
        batch: Rows without the partition columns.
        keys: The partition columns, of as many rows.

    Yields:
        Values as Spark casts them to strings, None for null; their rows; and the numbers of these
        in the batch, int64 `[rows]`.

    Raises:
        InputDataError: An empty string, which would be read back as null.
    """
    codes = np.zeros(batch.num_rows, np.int64)
    dictionaries: list[list[str | None]] = []
    for key in keys:
        encoded = pc.dictionary_encode(key, null_encoding="encode")
        codes = codes * len(encoded.dictionary) + encoded.indices.to_numpy(zero_copy_only=False)
        dictionaries.append(_format_values(encoded.dictionary))
    starts, order = np.flatnonzero(np.diff(codes, prepend=-1)), np.arange(batch.num_rows)
    if len(starts) > len(np.unique(codes)):
        order = np.argsort(codes, kind="stable")
        batch, codes = batch.take(pa.array(order)), codes[order]
        starts = np.flatnonzero(np.diff(codes, prepend=-1))
    for start, end in zip(starts, np.append(starts, batch.num_rows)[1:], strict=True):
        values = _look_up(int(codes[start]), dictionaries)
        yield values, batch.slice(start, end - start), order[start:end]


def _look_up(code: int, dictionaries: Sequence[list[str | None]]) -> PartitionValues:
    values: list[str | None] = []
    for dictionary in reversed(dictionaries):
        code, place = divmod(code, len(dictionary))
        values.append(dictionary[place])
    return tuple(reversed(values))


def _format_values(values: pa.Array) -> list[str | None]:
    format_value = _formatter(values.type)
    return [None if v is None else format_value(v) for v in values.to_pylist()]


def _formatter(data_type: pa.DataType) -> Callable[..., str]:
    if pa.types.is_boolean(data_type):
        return lambda value: "true" if value else "false"
    if pa.types.is_timestamp(data_type):
        return _format_timestamp
    if pa.types.is_decimal(data_type):
        return lambda value: format(value, "f")
    return _format_text


def _format_timestamp(value: datetime.datetime) -> str:
    """Local time of the session's zone, which the batch carries, without trailing zeros."""
    text = value.replace(tzinfo=None).isoformat(" ")
    return text.rstrip("0") if value.microsecond else text


def _format_text(value: object) -> str:
    text = str(value)
    if not text:
        raise InputDataError(
            "a partition column holds an empty string, which would be read back as null",
            fix="write nullif(column, ''), or a word that stands for it",
        )
    return text

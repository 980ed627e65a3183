"""Partition values as typed columns, and which files a condition on them leaves."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql import datasource as f

from conf.errors import ConfigError, InputDataError, did_you_mean
from etl.tfrecord.input_files import DataFile

_COMPARISONS: Mapping[type, Callable[[Any, Any], bool]] = {
    f.EqualTo: lambda value, wanted: value == wanted,
    f.GreaterThan: lambda value, wanted: value > wanted,
    f.GreaterThanOrEqual: lambda value, wanted: value >= wanted,
    f.LessThan: lambda value, wanted: value < wanted,
    f.LessThanOrEqual: lambda value, wanted: value <= wanted,
    f.In: lambda value, wanted: value in wanted,
    f.StringStartsWith: lambda value, wanted: value.startswith(wanted),
    f.StringEndsWith: lambda value, wanted: value.endswith(wanted),
    f.StringContains: lambda value, wanted: wanted in value,
}


def parse_partition_value(name: str, text: str | None, target: pa.DataType) -> pa.Scalar:
    """Reads a partition value as a type; timestamps without a zone are UTC.

    Raises:
        InputDataError: The text does not fit the type.
    """
    if text is None:
        return pa.scalar(None, target)
    try:
        if pa.types.is_timestamp(target) and target.tz is not None:
            moment = pa.scalar(text.strip()).cast(pa.timestamp(target.unit))
            return pa.scalar(moment.value, target)
        is_text = pa.types.is_string(target) or pa.types.is_binary(target)
        plain = text if is_text else text.strip().removeprefix("+")
        if pa.types.is_decimal(target):  # also 1e3, which Spark takes for a whole number
            return (
                pa.scalar(plain).cast(pa.float64() if "e" in plain.lower() else target).cast(target)
            )
        return pa.scalar(plain).cast(target)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise InputDataError(
            f"a value of partition column {name!r} does not fit its type",
            received=repr(text),
            allowed=str(target),
            fix="give the column another type in the schema, for example string",
        ) from error


def select_files(
    files: Sequence[DataFile],
    types: Mapping[str, pa.DataType],
    where: Mapping[str, Sequence[str | None]],
) -> list[DataFile]:
    """Leaves the files whose partition has one of the allowed values in each column.

    Args:
        files: With their partition values, in the order of `types`.
        types: Type by partition column.
        where: Allowed values, as text, by partition column.

    Raises:
        ConfigError: No such partition column.
        InputDataError: A value does not fit its column's type.
    """
    allowed: dict[int, set[Any]] = {}
    for name, texts in where.items():
        if name not in types:
            raise ConfigError(
                f"there is no partition column {name!r} to select files by",
                received=", ".join(where),
                allowed=", ".join(types) or "none: the files are not partitioned",
                fix=did_you_mean(name, types) if types else "filter the rows with .where(...)",
            )
        allowed[list(types).index(name)] = {
            parse_partition_value(name, text, types[name]).as_py() for text in texts
        }
    names = list(types)
    return [
        file
        for file in files
        if all(
            parse_partition_value(names[k], file.partition[k], types[names[k]]).as_py() in values
            for k, values in allowed.items()
        )
    ]


def prune_files(
    files: Sequence[DataFile], types: Mapping[str, pa.DataType], filters: Sequence[f.Filter]
) -> list[DataFile]:
    """Leaves the files that Spark's filters on partition columns may accept.

    Args:
        files: With their partition values, in the order of `types`.
        types: Type by partition column.
        filters: All of them must hold; one that cannot be judged here drops no file.
    """
    kept = []
    for file in files:
        row = {
            name: parse_partition_value(name, text, types[name]).as_py()
            for name, text in zip(types, file.partition, strict=True)
        }
        if all(_judge(condition, row) is not False for condition in filters):
            kept.append(file)
    return kept


def _judge(condition: f.Filter, row: Mapping[str, Any]) -> bool | None:
    """Whether a filter accepts a row; None where it cannot be told from the partition values.

    SQL's unknown counts as False, under `Not` too: no row of the file is accepted.
    """
    is_negated = isinstance(condition, f.Not)
    inner: Any = condition.child if isinstance(condition, f.Not) else condition
    attribute: Any = getattr(inner, "attribute", ())
    if len(attribute) != 1 or attribute[0] not in row:
        return None
    value = row[attribute[0]]
    if isinstance(inner, f.IsNull | f.IsNotNull):
        return ((value is None) == isinstance(inner, f.IsNull)) != is_negated
    if value is None:
        return None if isinstance(inner, f.EqualNullSafe) else False
    compare = _COMPARISONS.get(type(inner))
    wanted = inner.value
    samples = wanted if isinstance(inner, f.In) else [wanted]
    if compare is None or not all(_is_comparable(value, sample) for sample in samples):
        return None
    return compare(value, wanted) != is_negated


def _is_comparable(value: Any, wanted: Any) -> bool:
    """Whether Python compares two values as SQL does."""
    exact: Sequence[type] = (int, str, datetime.date)
    return any(type(value) is kind and type(wanted) is kind for kind in exact)

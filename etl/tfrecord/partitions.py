"""Partition directories in Hive's and Spark's form: `date=2026-01-01/country=NO`.

Escaping and type inference follow Spark's `ExternalCatalogUtils` and `PartitioningUtils`.
"""

from __future__ import annotations

import datetime
import decimal
import functools
import re
from collections.abc import Iterable, Mapping, Sequence

from conf.errors import InputDataError

NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"

_ESCAPED = frozenset(map(chr, range(0x20))) | frozenset("\"#%'*/:=?\\\x7f{[]^")
_INTEGER = re.compile(r"[+-]?[0-9]+")
_DECIMAL = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
# What Java's Double.parseDouble takes beyond that.
_DOUBLE = re.compile(rf"[+-]?(?:NaN|Infinity|{_DECIMAL.pattern}[dDfF]?)")
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_TIMESTAMP = re.compile(rf"({_DATE.pattern}) ([0-9]{{2}}):([0-9]{{2}}):([0-9]{{2}})(\.[0-9])?")
_MAX_DECIMAL_DIGITS = 38
_INT_BITS, _LONG_BITS = 32, 64


def _escape(text: str) -> str:
    return "".join(f"%{ord(c):02X}" if c in _ESCAPED else c for c in text)


def _unescape(text: str) -> str:
    return re.sub(r"%([0-9A-Fa-f]{2})", lambda match: chr(int(match[1], 16)), text)


def partition_path(names: Sequence[str], values: Sequence[str | None]) -> str:
    """Builds the relative directory of a partition.

    Args:
        names: Partition columns, outermost first.
        values: Their values as Spark casts them to strings; None or "" for null.

    Returns:
        For example `date=2026-01-01/country=NO`; "" without columns.
    """
    return "/".join(
        f"{_escape(name)}={_escape(value) if value else NULL_PARTITION}"
        for name, value in zip(names, values, strict=True)
    )


def parse_partition_path(relative: str) -> dict[str, str | None]:
    """Reads the partition values off a relative directory; the inverse of `partition_path`.

    Args:
        relative: Directory of a file, relative to the root, without the file's name. Parts without
            `=` are passed over.

    Raises:
        InputDataError: A part has no name or no value, or a name occurs twice.
    """
    values: dict[str, str | None] = {}
    for part in relative.split("/"):
        name, equals, value = part.partition("=")
        if not equals:
            continue
        if not name or not value or _unescape(name) in values:
            raise InputDataError(
                "not a partition directory",
                received=relative,
                allowed="<column>=<value>, each column once",
                fix=f"rename it; null is written {NULL_PARTITION}",
            )
        values[_unescape(name)] = None if value == NULL_PARTITION else _unescape(value)
    return values


def _is_date(text: str) -> bool:
    try:
        return bool(_DATE.fullmatch(text) and datetime.date.fromisoformat(text))
    except ValueError:
        return False


def _is_timestamp(text: str) -> bool:
    match = _TIMESTAMP.fullmatch(text)
    if match is None or not _is_date(match[1]):
        return False
    return int(match[2]) < 24 and int(match[3]) < 60 and int(match[4]) < 60


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
        value = int(text)
        for name, bits in (("int", _INT_BITS), ("bigint", _LONG_BITS)):
            if -(1 << bits - 1) <= value < 1 << bits - 1:
                return name
    if _DECIMAL.fullmatch(text):
        return _whole_decimal_type(text) or "double"
    if _DOUBLE.fullmatch(text.strip()):
        return "double"
    if _is_timestamp(text):
        return "timestamp"
    return "date" if _is_date(text) else "string"


def _widen(left: str | None, right: str | None) -> str | None:
    """Type that holds values of both; a string where Spark finds none."""
    if left is None or right is None or left == right:
        return left or right
    pair = {left, right}
    if pair == {"int", "bigint"}:
        return "bigint"
    if pair == {"int", "double"}:
        return "double"
    if pair == {"date", "timestamp"}:
        return "timestamp"
    whole = {"int": 10, "bigint": 20}
    digits = [whole.get(t) or (int(t[8:-3]) if t.startswith("decimal") else None) for t in pair]
    if None not in digits:
        return f"decimal({max(d for d in digits if d)},0)"
    return "string"


def infer_partition_types(
    partitions: Iterable[Mapping[str, str | None]],
) -> tuple[tuple[str, str], ...]:
    """Infers the type of each partition column from all of its values, as Spark does.

    Args:
        partitions: Values by column, one mapping per directory.

    Returns:
        Name and Spark type (`int`, `bigint`, `decimal(n,0)`, `double`, `date`, `timestamp`,
        `string`) per column, in the order of the path. A column of nulls alone is a string, where
        Spark says void.

    Raises:
        InputDataError: The directories differ in their columns.
    """
    distinct = list({tuple(values.items()): values for values in partitions}.values())
    if not distinct:
        return ()
    names = list(distinct[0])
    for values in distinct:
        if list(values) != names:
            raise InputDataError(
                "the partition directories differ in their columns",
                received=f"{'/'.join(names) or 'none'} and {'/'.join(values) or 'none'}",
                allowed="the same columns in the same order for every file",
                fix="read one subdirectory, or move the files that do not belong",
            )
    return tuple(
        (name, functools.reduce(_widen, (infer_partition_type(v[name]) for v in distinct), None)
         or "string")
        for name in names
    )  # fmt: skip

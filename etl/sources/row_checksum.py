"""A checksum of a frame's rows that does not depend on their order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F
from pyspark.sql import types as T

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_WIDE = "decimal(28,0)"  # of 64-bit numbers, 10**19 of which sum up within 38 digits


def checksum_rows(frame: DataFrame) -> str:
    """Counts rows and sums a 64-bit hash of each, in one scan.

    Two frames with the same rows have the same checksum, however they are stored; others differ
    but for one chance in 2**64.

    Args:
        frame: Rows with columns of any type.
    """
    cells = [cell for field in frame.schema for cell in _cells(field)]
    row: Any = frame.agg(
        F.count("*").alias("n"), F.sum(F.xxhash64(*cells).cast(_WIDE)).alias("sum")
    ).collect()[0]
    return f"{row['n']}:{0 if row['sum'] is None else int(row['sum']) % 2**64:016x}"


def _cells(field: T.StructField) -> list[Column]:
    """What of a column is hashed: Spark's hash passes over nulls, and over where lists end."""
    value = F.col("`" + field.name.replace("`", "``") + "`")
    kind = field.dataType
    if isinstance(kind, T.ArrayType):
        inner = kind.elementType
        entries = F.transform(value, lambda e: F.struct(e.isNull(), _plain(e, inner)))
        return [value.isNull(), F.size(value), entries]
    return [value.isNull(), _plain(value, kind)]


def _plain(value: Column, kind: T.DataType) -> Column:
    # Maps have no hash, and structs and vectors hold nulls and lists of their own.
    return value if isinstance(kind, T.AtomicType) else value.cast("string")

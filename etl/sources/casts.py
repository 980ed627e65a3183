"""Spark values to the declared types by checked casts: what does not fit is null, and counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.ml.functions import vector_to_array
from pyspark.sql import functions as F
from pyspark.sql import types as T

from conf.errors import InputDataError
from conf.etl.columns import EPOCH_UNITS, SPARK_TYPES, ColumnConfig
from etl.sources.pairs import parse_pairs
from etl.sources.source import Cell
from etl.sources.values import epoch_millis, parse_cells, parse_scalar

if TYPE_CHECKING:
    from pyspark.sql import Column

_INTEGERS = (T.ByteType, T.ShortType, T.IntegerType, T.LongType)
_FRACTIONS = (T.FloatType, T.DoubleType, T.DecimalType)
_TEXTS = (T.StringType, T.BinaryType)
_TIMES = (T.TimestampType, T.TimestampNTZType, T.DateType)
# What a column may be declared as, by what it is in the input. Floats have no text that every
# engine agrees on, and a time has no number but by a unit.
_ALLOWED: dict[str, tuple[type[T.DataType], ...]] = {
    "int64": (*_INTEGERS, *_FRACTIONS, T.BooleanType, *_TEXTS),
    "float32": (*_INTEGERS, *_FRACTIONS, T.BooleanType, *_TEXTS),
    "float64": (*_INTEGERS, *_FRACTIONS, T.BooleanType, *_TEXTS),
    "string": (*_INTEGERS, T.DecimalType, T.BooleanType, *_TEXTS),
    "timestamp": (*_TIMES, *_TEXTS),
}
_INT64_END = 2.0**63


def cast_cells(name: str, column: ColumnConfig, raw: Column, found: T.DataType) -> dict[str, Cell]:
    """Casts a declared column from what it is in the input.

    Args:
        name: The source's name.
        column: The column's declaration.
        raw: The column of the input.
        found: Its type there.

    Returns:
        A cell by name: the column's, and that of its second column where it has one.

    Raises:
        InputDataError: No value of the type that was found could become one of the declared type.
    """
    if column.is_list and column.pair is None and _is_vector(found):
        # The function takes no null.
        raw = F.when(raw.isNotNull(), vector_to_array(raw))
        found = T.ArrayType(T.DoubleType())
    _check_type(name, column, found)
    if isinstance(found, T.ArrayType):
        return _cast_list(column, raw, found.elementType)
    if isinstance(found, _TEXTS):
        text = _valid_text(raw, found)
        broken = ((raw.isNotNull() & text.isNull(), f"not_utf8:{column.name}"),)
        cells = parse_cells(column, text)
        first = cells[column.name]
        cells[column.name] = Cell(first.value, first.present, first.text, broken + first.faults)
        return cells
    if column.pair is not None:
        # A whole number has no second value.
        return parse_cells(column, raw.cast("string"))
    value = _cast(column, raw, found)
    return {column.name: Cell(value, raw.isNotNull(), value.cast("string"))}


def _is_vector(found: T.DataType) -> bool:
    """Whether values are vectors of Spark's ML or MLlib, dense or sparse."""
    return isinstance(found, T.UserDefinedType) and found.simpleString() == "vector"


def _cast_list(column: ColumnConfig, raw: Column, element: T.DataType) -> dict[str, Cell]:
    if column.pair is not None:
        texts = F.transform(raw, lambda e: _valid_text(e, element).cast("string"))
        return parse_pairs(column, column.pair, raw, texts)
    value = F.transform(raw, lambda e: _cast(column, e, element))
    return {column.name: Cell(value, raw.isNotNull(), value.cast("string"))}


def _check_type(name: str, column: ColumnConfig, found: T.DataType) -> None:
    inner = found.elementType if isinstance(found, T.ArrayType) and column.is_list else found
    by_text = isinstance(found, _TEXTS) and column.separator is not None
    shape_fits = not column.is_list or isinstance(found, T.ArrayType) or by_text
    allowed = list(_ALLOWED[column.element_type])
    if column.timestamp_format in EPOCH_UNITS:
        allowed += _INTEGERS
    if shape_fits and isinstance(inner, tuple(allowed)):
        return
    raise InputDataError(
        f"source {name!r}: column {column.field_name!r} has changed its type",
        received=found.simpleString(),
        allowed=f"what can be read as {column.type}: "
        + ", ".join(dict.fromkeys(kind.typeName() for kind in allowed)),
        fix=f"correct the type of sources.{name}.columns, or mend the input"
        + (
            "; times as numbers need a timestamp_format such as epoch_ms"
            if column.type == "timestamp"
            else ""
        ),
    )


def _valid_text(raw: Column, found: T.DataType) -> Column:
    """The text of a string or of bytes; null where the bytes are no UTF-8."""
    if not isinstance(found, _TEXTS):
        return raw.cast("string")
    return F.when(F.is_valid_utf8(raw.cast("string")), raw.cast("string"))


def _cast(column: ColumnConfig, raw: Column, found: T.DataType) -> Column:
    kind = SPARK_TYPES[column.element_type]
    if isinstance(found, _TEXTS):
        return parse_scalar(column, _valid_text(raw, found))
    if column.type == "timestamp":
        if isinstance(found, _INTEGERS):
            return epoch_millis(raw.cast("bigint"), column.timestamp_format or "")
        return F.unix_millis(raw.cast("timestamp"))
    if column.element_type == "int64" and isinstance(found, _FRACTIONS):
        whole = raw % F.lit(1) == F.lit(0)
        if not isinstance(found, T.DecimalType):
            # The cast would let 2**63 pass as the number before it.
            whole = whole & (raw < F.lit(_INT64_END))
        return F.when(whole, raw.try_cast(kind))
    return raw.try_cast(kind)

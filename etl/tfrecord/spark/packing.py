"""Packs numbers side by side in Spark's own plan, before they are handed over to Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F
from pyspark.sql import types as T

from etl.tfrecord.lowering.prepacked import Prepacked

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from etl.tfrecord.policies import ColumnPolicy
    from etl.tfrecord.write_config import WriteConfig

_INTEGERS = (T.BooleanType, T.ByteType, T.ShortType, T.IntegerType, T.LongType)
# Columns of other types that end up in the same packed feature must be packed together, in Python.
_KINDS: dict[type[T.DataType], str] = {
    **dict.fromkeys(_INTEGERS, "packed.int64"),
    T.FloatType: "packed.float",
}
_APART = (T.StringType, T.BinaryType, T.ArrayType)  # never among packed numbers
_SPARK_TYPES = {"packed.int64": "bigint", "packed.float": "float"}


def pack_columns(frame: DataFrame, config: WriteConfig) -> tuple[DataFrame, Prepacked]:
    """Packs the columns of a DataFrame that is to be written in the packed layout.

    Only where that gives the same records as packing in Python: a packed feature is formed here if
    all of its columns are integers or booleans, or floats.

    Args:
        frame: The rows.
        config: How they are written.

    Returns:
        The rows to write, and what was packed.
    """
    fields = [f for f in frame.schema.fields if f.name not in config.partition_by]
    is_plain = all(type(f.dataType) in _KINDS or isinstance(f.dataType, _APART) for f in fields)
    if config.layout != "packed" or config.encoders is not None or not is_plain:
        return frame, Prepacked()
    packed: dict[str, list[str]] = {}
    for field in fields:
        if type(field.dataType) in _KINDS:
            packed.setdefault(_KINDS[type(field.dataType)], []).append(field.name)
    chosen = {name: tuple(columns) for name, columns in packed.items() if len(columns) > 1}
    if not chosen or any(f.name.startswith("packed.") for f in fields):
        return frame, Prepacked()
    types = {f.name: str(f.dataType.jsonValue()) for f in fields}
    packed_types = {name: types[name] for names in chosen.values() for name in names}
    given = Prepacked(tuple(types), chosen, packed_types)
    rest = [name for name in frame.columns if name not in given.columns]
    lists = [
        F.array(*(_number(frame, n, _SPARK_TYPES[key], config) for n in names)).alias(key)
        for key, names in chosen.items()
    ]
    return frame.select(*(F.col(_quote(name)) for name in rest), *lists), given


def _number(frame: DataFrame, name: str, spark_type: str, config: WriteConfig) -> Column:
    column = F.col(_quote(name)).cast(spark_type)
    policy: ColumnPolicy = config.columns.get(name, config.policy)
    if policy.nulls != "default":
        return column  # a null is refused by the writer, which knows the row
    return F.coalesce(column, F.lit(policy.default or 0).cast(spark_type))


def _quote(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"

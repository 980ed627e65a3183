"""TFRecord files to and from Spark, Arrow and pandas; Spark reads and writes `format("tfrecord")`.

The public API, loaded at first use: importing it brings neither Spark, numba nor pandas. Errors are
those of `conf.errors`.

Example:
    >>> from etl.tfrecord import read_table, write_table
    >>> write_table(pa.table({"user": [1, 2]}), "train.tfrecord")
    >>> read_table("train.tfrecord").column("user").to_pylist()
    [1, 2]
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etl.tfrecord.files.writer import ShardOptions
    from etl.tfrecord.spark.datasource import register_tfrecord
    from etl.tfrecord.spark.frames import read_tfrecords, write_tfrecords
    from etl.tfrecord.table import (
        TableWriter,
        read_frame,
        read_table,
        read_table_batches,
        write_frame,
        write_table,
    )
    from etl.tfrecord.types.type_options import TypeOptions

__all__ = [
    "ShardOptions",
    "TableWriter",
    "TypeOptions",
    "read_frame",
    "read_table",
    "read_table_batches",
    "read_tfrecords",
    "register_tfrecord",
    "write_frame",
    "write_table",
    "write_tfrecords",
]

_TABLE = "table"
_MODULES = {
    "ShardOptions": "files.writer",
    "TableWriter": _TABLE,
    "TypeOptions": "types.type_options",
    "read_frame": _TABLE,
    "read_table": _TABLE,
    "read_table_batches": _TABLE,
    "read_tfrecords": "spark.frames",
    "register_tfrecord": "spark.datasource",
    "write_frame": _TABLE,
    "write_table": _TABLE,
    "write_tfrecords": "spark.frames",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

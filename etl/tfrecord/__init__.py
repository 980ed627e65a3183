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
    from etl.tfrecord.files.writer import ShardOptions as ShardOptions
    from etl.tfrecord.spark.datasource import register_tfrecord as register_tfrecord
    from etl.tfrecord.spark.frames import read_tfrecords as read_tfrecords
    from etl.tfrecord.spark.frames import write_tfrecords as write_tfrecords
    from etl.tfrecord.table import TableWriter as TableWriter
    from etl.tfrecord.table import read_frame as read_frame
    from etl.tfrecord.table import read_table as read_table
    from etl.tfrecord.table import read_table_batches as read_table_batches
    from etl.tfrecord.table import write_frame as write_frame
    from etl.tfrecord.table import write_table as write_table
    from etl.tfrecord.types.features import TypeOptions as TypeOptions

_TABLE = "table"
_MODULES = {
    "ShardOptions": "files.writer",
    "TableWriter": _TABLE,
    "TypeOptions": "types.features",
    "read_frame": _TABLE,
    "read_table": _TABLE,
    "read_table_batches": _TABLE,
    "read_tfrecords": "spark.frames",
    "register_tfrecord": "spark.datasource",
    "write_frame": _TABLE,
    "write_table": _TABLE,
    "write_tfrecords": "spark.frames",
}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

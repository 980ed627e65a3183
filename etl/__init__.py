"""The ETL side: logs in, TFRecord dataset versions out. Never imports TensorFlow.

The public functions are imported on first use, so that `import etl` loads neither Spark nor numba.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from etl.build import build_dataset
    from etl.tfrecord.spark.frames import read_tfrecords, write_tfrecords
    from etl.tfrecord.table import read_table, write_table

__all__ = ["build_dataset", "read_table", "read_tfrecords", "write_table", "write_tfrecords"]

_MODULES = {
    "build_dataset": "etl.build",
    "read_table": "etl.tfrecord.table",
    "read_tfrecords": "etl.tfrecord.spark.frames",
    "write_table": "etl.tfrecord.table",
    "write_tfrecords": "etl.tfrecord.spark.frames",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

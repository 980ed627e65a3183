"""Makes `format("tfrecord")` known to Spark, which imports top-level modules named `pyspark_…`."""

from __future__ import annotations

import importlib
from typing import Any

from pyspark.sql.datasource import DataSource

from sluice_recsys import HiddenPackageError, refuse_hidden_packages


def find_source(class_name: str, format_name: str) -> type[DataSource]:
    """Returns Sluice's data source, or one that says on use why ours cannot be imported.

    Spark drops an error of this import without a word, and then knows no such format.

    Args:
        class_name: Name of the class in `etl.tfrecord.spark.datasource`.
        format_name: The name that Spark knows it by.
    """
    try:
        refuse_hidden_packages()
    except HiddenPackageError as error:
        return _build_refusal(format_name, str(error))
    module: Any = importlib.import_module("etl.tfrecord.spark.datasource")
    source: type[DataSource] = getattr(module, class_name)
    return source


def _build_refusal(format_name: str, message: str) -> type[DataSource]:
    class HiddenSource(DataSource):
        def __init__(self, options: Any) -> None:
            raise HiddenPackageError(message)

        @classmethod
        def name(cls) -> str:
            return format_name

    return HiddenSource


DefaultSource = find_source("TFRecordDataSource", "tfrecord")

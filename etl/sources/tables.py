"""Tables by name, from whatever catalogue the session has: Hive, Iceberg, Delta or its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

from conf.errors import InputDataError
from etl.failures import describe_failure

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def read_table(spark: SparkSession, name: str, table: str) -> DataFrame:
    """Opens a table.

    Args:
        spark: A session whose catalogues know it.
        name: The source's name in the config.
        table: The table's name, with catalogue and database where they are not the session's.

    Raises:
        InputDataError: There is no such table.
    """
    try:
        # A session remembers a table's files: what others have written since is not among them.
        spark.catalog.refreshTable(table)
        return spark.read.table(table)
    except (PySparkException, Py4JJavaError) as error:
        raise InputDataError(
            f"source {name!r}: the session has no such table",
            received=f"{table}: {describe_failure(error)}",
            allowed="a table or view of the session's catalogues",
            fix=f"correct sources.{name}.table, or set its catalogue under spark.conf",
        ) from error

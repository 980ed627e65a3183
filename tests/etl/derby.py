"""The database that comes with Spark, for tests of sources that are read by JDBC."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def connect_derby(spark: Any, url: str) -> Iterator[Any]:
    """Opens a database in memory; gives a JDBC statement."""
    jvm = spark._jvm
    jvm.org.apache.spark.sql.execution.datasources.jdbc.DriverRegistry.register(
        "org.apache.derby.iapi.jdbc.AutoloadedDriver"
    )
    connection = jvm.java.sql.DriverManager.getConnection(url)
    try:
        yield connection.createStatement()
    finally:
        connection.close()

"""The version that a table's catalogue gives it: a look at metadata alone, no row is read."""

from __future__ import annotations

import datetime
import logging
from typing import TYPE_CHECKING

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

if TYPE_CHECKING:
    from pyspark.sql import Row, SparkSession

logger = logging.getLogger("sluice.sources")

_DETAILS = "# Detailed Table Information"
# The newest entry of what each format keeps of a table's changes. A version or a snapshot alone
# would not do: a table that is dropped and made again counts from the start, and a column that is
# dropped and made again makes no snapshot.
_LATEST = {
    "delta": ("DESCRIBE HISTORY {table} LIMIT 1", ("version", "timestamp")),
    "iceberg": (
        "SELECT * FROM {table}.metadata_log_entries ORDER BY timestamp DESC LIMIT 1",
        ("latest_snapshot_id", "timestamp", "file"),
    ),
}


def read_table_version(spark: SparkSession, table: str) -> str | None:
    """Reads what changes with each change of a Delta or Iceberg table.

    Args:
        spark: A session whose catalogues know the table.
        table: Its name, with catalogue and database where they are not the session's.

    Returns:
        The version; None of a view, and of a table in another format.
    """
    try:
        name = _quote(spark, table)
        provider = _find_provider(spark.sql(f"DESCRIBE TABLE EXTENDED {name}").collect())
        if provider not in _LATEST:
            return None
        statement, columns = _LATEST[provider]
        rows = spark.sql(statement.format(table=name)).collect()
    except (PySparkException, Py4JError) as error:
        logger.debug("table %s does not tell its version: %s", table, error)
        return None
    if not rows:
        return None
    return ":".join([provider, *(_write(rows[0][column]) for column in columns)])


def _write(value: object) -> str:
    # A time is shown in the zone of this process; what is kept must not depend on it.
    return str(value.timestamp() if isinstance(value, datetime.datetime) else value)


def _quote(spark: SparkSession, table: str) -> str:
    """The name as SQL takes it, whatever characters it has."""
    parser = spark._jsparkSession.sessionState().sqlParser()
    parts = parser.parseMultipartIdentifier(table)
    quoted = [parts.apply(i).replace("`", "``") for i in range(parts.size())]
    return ".".join(f"`{part}`" for part in quoted)


def _find_provider(description: list[Row]) -> str:
    """The table's format, lower case; nothing of a view."""
    names = [row["col_name"] for row in description]
    # A column of the table may have that name too; the columns come first.
    details = description[names.index(_DETAILS) :] if _DETAILS in names else []
    found = (row["data_type"] for row in details if row["col_name"] == "Provider")
    return str(next(found, "")).lower()

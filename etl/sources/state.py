"""What a table or a query holds, so that two runs can tell whether it has changed between them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from conf.dates import DateRange
from conf.etl import SourceConfig
from conf.provenance import InputTable
from etl.sources.day_rows import rows_of_days
from etl.sources.frames import find_field
from etl.sources.jdbc import read_jdbc
from etl.sources.row_checksum import checksum_rows
from etl.sources.table_versions import read_table_version
from etl.sources.tables import read_table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def read_states(
    spark: SparkSession,
    sources: Iterable[tuple[str, SourceConfig]],
    dates: DateRange | None = None,
) -> tuple[InputTable, ...]:
    """Reads the state of each source that is a table or a query; files have theirs in the listing.

    A Delta or Iceberg table has the version of its catalogue. Of any other table and of a query
    the declared columns are read once for a checksum, of the run's days where `days.column` tells
    them apart; with `change_check: null` they are not, and the state is unknown.

    Args:
        spark: Session.
        sources: Names and declarations.
        dates: The run's days, or None.

    Raises:
        ConfigError: A credential or driver is missing.
        InputDataError: A table is not there, or the database refuses.
        UpstreamNotReadyError: A database does not answer.
    """
    return tuple(
        InputTable(name, _place(config), _read_state(spark, name, config, dates))
        for name, config in sources
        if config.table is not None or config.jdbc is not None
    )


def _place(config: SourceConfig) -> str:
    if config.jdbc is None:
        return config.table or ""
    return f"{config.jdbc.url} {config.jdbc.table or config.jdbc.query}"


def _read_state(
    spark: SparkSession, name: str, config: SourceConfig, dates: DateRange | None
) -> str | None:
    version = None if config.table is None else read_table_version(spark, config.table)
    if version is not None:
        return version
    if config.change_check is None:
        return None
    return f"rows:{checksum_rows(_select_declared(_open(spark, name, config), config, dates))}"


def _open(spark: SparkSession, name: str, config: SourceConfig) -> DataFrame:
    if config.jdbc is not None:
        return read_jdbc(spark, name, config.jdbc)
    return read_table(spark, name, config.table or "")


def _select_declared(frame: DataFrame, config: SourceConfig, dates: DateRange | None) -> DataFrame:
    fields = {column.name: find_field(frame.schema, column.field_name) for column in config.columns}
    day = config.column(config.days.column) if config.days and config.days.column else None
    found = fields.get(day.name) if day is not None else None
    if dates is not None and config.days is not None and day is not None and found is not None:
        frame = rows_of_days(frame, day, config.days, dates, *found)
    # A column that is gone holds nothing; that it is gone is said where the source is read.
    return frame.select(
        *[F.lit(None).alias(n) if f is None else f[0].alias(n) for n, f in fields.items()]
    )

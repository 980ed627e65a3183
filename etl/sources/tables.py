"""Tables of the session's catalogue and of databases by JDBC: their rows, and their state."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import functions as F
from pyspark.sql import types as T

from conf.dates import DateRange
from conf.errors import ConfigError, InputDataError, SluiceError, UpstreamNotReadyError
from conf.etl.sources import SourceConfig
from conf.manifest import InputTable
from etl.sources.files import find_row_days
from etl.sources.frames import Given, find_field
from etl.sources.source import FILE_COLUMN
from etl.tfrecord.spark.failures import describe_failure
from etl.tfrecord.spark.schema import quote_name

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def read_table(spark: SparkSession, name: str, config: SourceConfig) -> Given:
    """Opens the table of a source, with `__file`; no row is read."""
    if config.jdbc is not None:
        rows, place = _read_jdbc(spark, name, config.jdbc), config.jdbc["url"]
    else:
        place = config.table or ""
        rows = _read_catalogue(spark, name, place)
    return rows.withColumn(FILE_COLUMN, F.lit(place)), rows.schema


def _read_catalogue(spark: SparkSession, name: str, table: str) -> DataFrame:
    try:
        # A session remembers a table's files: what others have written since is not among them.
        spark.catalog.refreshTable(table)
        return spark.read.table(table)
    except (PySparkException, Py4JJavaError) as error:
        raise InputDataError(
            f"source {name!r}: the session has no such table",
            received=f"{table}: {describe_failure(error)}",
            fix=f"correct sources.{name}.table, or set its catalogue under spark",
        ) from error


# Tells times without a zone from the others.
_OURS = {"preferTimestampNTZ": "true"}
_NO_WRITES = {"sessionInitStatement": "SET SESSION TRANSACTION READ ONLY"}
# What makes a session of the database refuse to write, by the URL's second part.
_READ_ONLY = {
    "postgresql": {"readOnly": "true", "readOnlyMode": "always"},
    "mysql": _NO_WRITES,
    "mariadb": _NO_WRITES,
}


def _read_jdbc(spark: SparkSession, name: str, config: Mapping[str, str]) -> DataFrame:
    named = {key: config.get(f"{key}_env") for key in ("user", "password")}
    secrets = {key: _from_environment(name) for key, name in named.items() if name is not None}
    given = {key: value for key, value in config.items() if not key.endswith("_env")}
    read_only = _READ_ONLY.get(config["url"].split(":")[1], {})
    options = {"fetchsize": "10000", **given, **read_only, **_OURS, **secrets}
    try:
        frame = spark.read.format("jdbc").options(**options).load()
        return _as_written(spark, config["url"], frame)
    except (PySparkException, Py4JJavaError) as error:
        # Without the cause: a driver may quote what it was given.
        raise _explain(name, config["url"], error, secrets.get("password")) from None


def _from_environment(variable: str) -> str:
    value = os.environ.get(variable)
    if value is None:
        raise ConfigError(f"{variable} is not set", fix="set it where the build is started")
    return value


# Winter and summer: a zone that is UTC in both is UTC.
_PROBES = ("2024-01-15 12:00:00.0", "2024-07-15 12:00:00.0")


def _as_written(spark: SparkSession, url: str, frame: DataFrame) -> DataFrame:
    """Gives times without a zone as the database shows them, whatever the zone of the machine."""
    # Drivers take them for times of Java's zone, and most dialects of Spark leave it at that.
    zoneless = [f.name for f in frame.schema if isinstance(f.dataType, T.TimestampNTZType)]
    jvm: Any = spark._jvm
    dialect = jvm.org.apache.spark.sql.jdbc.JdbcDialects.get(url)
    times = [jvm.java.sql.Timestamp.valueOf(text) for text in _PROBES]
    read = [dialect.convertJavaTimestampToTimestampNTZ(time) for time in times]
    if all(one.equals(time.toLocalDateTime()) for one, time in zip(read, times, strict=True)):
        return frame
    zone = F.lit(jvm.java.time.ZoneId.systemDefault().getId())
    return frame.withColumns(
        {n: F.convert_timezone(F.lit("UTC"), zone, F.col(quote_name(n))) for n in zoneless}
    )


_NO_DRIVER = re.compile("No suitable driver|ClassNotFoundException|CANNOT_LOAD_CLASS")
_NOT_THERE = re.compile(
    r"Connection refused| refused\. Check|UnknownHost|timed out|Connection attempt failed"
)


def _explain(name: str, url: str, error: Exception, password: str | None) -> SluiceError:
    text, root = str(error), error
    while (cause := getattr(root, "_cause", None)) is not None:
        text, root = f"{text}\n{cause}", cause
    received = f"{url}: {describe_failure(root)}"
    if password:
        received = received.replace(password, "***")
    kind: type[SluiceError] = InputDataError
    what, fix = "the database refused", "check the options under jdbc, and the user's rights"
    if _NO_DRIVER.search(text):
        kind, what = ConfigError, "the session has no JDBC driver for this database"
        fix = "bring its jar by spark.jars, and its class in jdbc.driver"
    elif _NOT_THERE.search(text):
        kind, what = UpstreamNotReadyError, "the database does not answer"
        fix = "try again when it is up, or correct jdbc.url"
    return kind(f"source {name!r}: {what}", received=received, fix=fix)


def read_state(
    spark: SparkSession, name: str, config: SourceConfig, dates: DateRange | None
) -> InputTable:
    """Reads the state of a table: its version in a Delta or Iceberg catalogue, else a checksum.

    The checksum is of the declared columns, of the run's days where `days.column` tells them apart.
    """
    place = config.table or "{url} {dbtable}".format(**config.jdbc or {})
    state = None if config.table is None else read_table_version(spark, config.table)
    if state is None and config.change_check is not None:
        declared = _select_declared(read_table(spark, name, config), config, dates)
        state = f"rows:{checksum_rows(declared)}"
    return InputTable(name, place, state)


def _select_declared(given: Given, config: SourceConfig, dates: DateRange | None) -> DataFrame:
    frame, schema = given
    fields = {column.name: find_field(schema, column.field_name) for column in config.columns}
    days = find_row_days(config, dates)
    if days is not None and (found := fields[days.column.name]) is not None:
        frame = days.prune(frame, *found)
    # A column that is gone holds nothing; that it is gone is said where the source is read.
    return frame.select(
        *[F.lit(None).alias(n) if f is None else f[0].alias(n) for n, f in fields.items()]
    )


def checksum_rows(frame: DataFrame) -> str:
    """Counts rows and sums a 64-bit hash of each: the same for the same rows, however stored."""
    # Spark's hash of values skips nulls and the ends of lists; their text does not.
    text = F.to_json(F.struct("*"), {"ignoreNullFields": "false"})
    # Of 64-bit numbers 10**19 sum up within 38 digits.
    hashes = frame.select(F.xxhash64(text).cast("decimal(28,0)").alias("hash"))
    row: Any = hashes.agg(F.count("*").alias("n"), F.sum("hash").alias("sum")).collect()[0]
    return f"{row['n']}:{0 if row['sum'] is None else int(row['sum']) % 2**64:016x}"


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
    """Reads what changes with each change of a Delta or Iceberg table; None of any other."""
    for provider, (statement, columns) in _LATEST.items():
        with contextlib.suppress(PySparkException, Py4JError):  # of another format
            for row in spark.sql(statement.format(table=table)).collect():
                values = [row[column] for column in columns]
                # A time is shown in the zone of this process; what is kept must not depend on it.
                times = [v.timestamp() if isinstance(v, datetime.datetime) else v for v in values]
                return ":".join(map(str, [provider, *times]))
    return None

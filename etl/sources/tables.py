"""Tables of the session's catalogue, and tables and queries of a database by JDBC, read only."""

from __future__ import annotations

import math
import os
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import functions as F
from pyspark.sql.types import TimestampNTZType

from conf.errors import ConfigError, InputDataError, SluiceError, UpstreamNotReadyError
from conf.etl.sources import JdbcConfig
from etl.tfrecord.spark.failures import describe_failure
from etl.tfrecord.spark.schema import quote_name

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def read_catalogue_table(spark: SparkSession, name: str, table: str) -> DataFrame:
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


# What makes a session of the database refuse to write, by the URL's second part.
_READ_ONLY = {
    "postgresql": {"readOnly": "true", "readOnlyMode": "always"},
    "mysql": {"sessionInitStatement": "SET SESSION TRANSACTION READ ONLY"},
    "mariadb": {"sessionInitStatement": "SET SESSION TRANSACTION READ ONLY"},
}
_NO_DRIVER = ("No suitable driver", "ClassNotFoundException", "CANNOT_LOAD_CLASS")
_NOT_THERE = (
    "Connection refused",
    " refused. Check",
    "UnknownHost",
    "timed out",
    "Connection attempt failed",
)


def read_jdbc(spark: SparkSession, name: str, config: JdbcConfig) -> DataFrame:
    """Opens a table or query; nothing but its columns and the partitions' bounds is read.

    Raises:
        ConfigError: A credential is not there, the driver is missing, or the partition column is
            none of the columns.
        UpstreamNotReadyError: The database does not answer.
        InputDataError: It answers, and refuses.
    """
    options = _options(config)
    try:
        frame = spark.read.format("jdbc").options(**options).load()
        if config.partition_column is not None and config.partitions > 1:
            bounds = _bounds(spark, name, config, options, frame)
            if bounds:
                frame = spark.read.format("jdbc").options(**options, **bounds).load()
        return _as_written(spark, config, frame)
    except (PySparkException, Py4JJavaError) as error:
        # Without the cause: a driver may quote what it was given.
        raise _explain(name, config, _with_causes(error), options.get("password")) from None


def _options(config: JdbcConfig) -> dict[str, Any]:
    options: dict[str, Any] = {
        "url": config.url,
        "dbtable": config.table or f"({config.query}) source_rows",
        "fetchsize": config.fetch_rows,
        # Tells times without a zone from the others.
        "preferTimestampNTZ": "true",
        **_READ_ONLY.get(config.url.split(":")[1], {}),
    }
    if config.driver is not None:
        options["driver"] = config.driver
    if config.user_env is not None:
        options["user"] = _from_environment(config.user_env, "user_env")
    if config.password_env is not None:
        options["password"] = _from_environment(config.password_env, "password_env")
    if config.password_file is not None:
        options["password"] = _from_file(config.password_file)
    return options


# Winter and summer: a zone that is UTC in both is UTC.
_PROBES = ("2024-01-15 12:00:00.0", "2024-07-15 12:00:00.0")


def _as_written(spark: SparkSession, config: JdbcConfig, frame: DataFrame) -> DataFrame:
    """Gives times without a zone as the database shows them, whatever the zone of the machine.

    Drivers take them for times of Java's zone, and most dialects of Spark leave it at that.
    """
    zoneless = [f.name for f in frame.schema if isinstance(f.dataType, TimestampNTZType)]
    if not zoneless:
        return frame
    jvm: Any = spark._jvm
    dialect = jvm.org.apache.spark.sql.jdbc.JdbcDialects.get(config.url)
    times = [jvm.java.sql.Timestamp.valueOf(text) for text in _PROBES]
    read = [dialect.convertJavaTimestampToTimestampNTZ(time) for time in times]
    if all(one.equals(time.toLocalDateTime()) for one, time in zip(read, times, strict=True)):
        return frame
    zone = F.lit(jvm.java.time.ZoneId.systemDefault().getId())
    return frame.withColumns(
        {n: F.convert_timezone(F.lit("UTC"), zone, F.col(quote_name(n))) for n in zoneless}
    )


def _from_environment(variable: str, key: str) -> str:
    value = os.environ.get(variable)
    if value is None:
        raise ConfigError(
            f"jdbc.{key} names an environment variable that is not set",
            received=variable,
            fix=f"set {variable} where the build is started",
        )
    return value


def _from_file(name: str) -> str:
    try:
        lines = Path(name).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "jdbc.password_file cannot be read",
            received=name,
            allowed="a text file whose first line is the password",
            fix="correct the path, or give the build's user the right to read it",
        ) from error
    return lines[0] if lines else ""


def _bounds(
    spark: SparkSession, name: str, config: JdbcConfig, options: dict[str, Any], frame: DataFrame
) -> dict[str, Any] | None:
    """Where the partitions are cut; None where there is no row to cut."""
    wanted = (config.partition_column or "").lower()
    spelled = next((column for column in frame.columns if column.lower() == wanted), None)
    if spelled is None:
        raise ConfigError(
            f"source {name!r}: jdbc.partition_column is none of the columns",
            received=config.partition_column,
            allowed=", ".join(frame.columns),
        )
    dialect = spark._jvm.org.apache.spark.sql.jdbc.JdbcDialects.get(config.url)  # type: ignore[union-attr]
    column = dialect.quoteIdentifier(spelled)
    ends = f"(SELECT MIN({column}) AS low, MAX({column}) AS high FROM {options['dbtable']}) ends"  # noqa: S608 (quoted by the dialect)
    row = spark.read.format("jdbc").options(**{**options, "dbtable": ends}).load().collect()[0]
    if row[0] is None:
        return None
    return {
        "partitionColumn": spelled,
        # The end is left out, and the last partition open: this only places the cuts.
        "lowerBound": _cut_at(row[0]),
        "upperBound": _cut_at(row[1]),
        "numPartitions": config.partitions,
    }


def _cut_at(value: Any) -> str:
    return str(math.floor(value) if isinstance(value, Decimal) else value)


def _with_causes(error: BaseException | None) -> str:
    """The messages of an error and of what caused it, as Spark keeps them; each on its line."""
    messages = []
    while error is not None:
        messages.append(str(error))
        error = getattr(error, "_cause", None)
    return "\nCaused by: ".join(messages)


def _explain(name: str, config: JdbcConfig, text: str, password: str | None) -> SluiceError:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    causes = [line for line in lines if line.startswith(("Caused by:", ": "))]
    received = (causes or lines)[-1].removeprefix("Caused by:").removeprefix(":").strip()
    if password:
        received = received.replace(password, "***")
    if any(sign in text for sign in _NO_DRIVER):
        return ConfigError(
            f"source {name!r}: the session has no JDBC driver for this database",
            received=f"{config.url}: {received}",
            fix="bring the driver's jar by spark.conf.spark.jars or spark.jars.packages, and name "
            "its class in jdbc.driver",
        )
    if any(sign in text for sign in _NOT_THERE):
        return UpstreamNotReadyError(
            f"source {name!r}: the database does not answer",
            received=f"{config.url}: {received}",
            fix="try again when it is up, or correct jdbc.url",
        )
    return InputDataError(
        f"source {name!r}: the database refused",
        received=f"{config.url}: {received}",
        fix="check the table or query, and the rights of its user",
    )

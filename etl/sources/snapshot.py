"""The source snapshot: what a run reads, noted when it begins and compared when it ends.

A file counts by path, size and time; a table by the version that its catalogue gives; a query,
or a table without versions, by a checksum of its rows that does not depend on their order.
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import functions as F
from pyspark.sql import types as T

from conf.dates import DateRange
from conf.errors import InputDataError
from conf.etl.build import BuildConfig
from conf.etl.encodings import TokensConfig
from conf.etl.sources import SourceConfig
from conf.local_paths import local_path
from conf.manifest import InputFile, InputTable
from etl.sources.days import rows_of_days
from etl.sources.files import describe_input, find_changes
from etl.sources.frames import find_field
from etl.sources.read import read_source
from etl.sources.source import Source
from etl.sources.tables import read_catalogue_table, read_jdbc
from etl.tfrecord.spark.schema import quote_name

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row, SparkSession


_WIDE = "decimal(28,0)"  # of 64-bit numbers, 10**19 of which sum up within 38 digits


def checksum_rows(frame: DataFrame) -> str:
    """Counts rows and sums a 64-bit hash of each, in one scan.

    Two frames with the same rows have the same checksum, however they are stored; others differ
    but for one chance in 2**64.

    Args:
        frame: Rows with columns of any type.
    """
    hashed = [value for field in frame.schema for value in _hashed_values(field)]
    row: Any = frame.agg(
        F.count("*").alias("n"), F.sum(F.xxhash64(*hashed).cast(_WIDE)).alias("sum")
    ).collect()[0]
    return f"{row['n']}:{0 if row['sum'] is None else int(row['sum']) % 2**64:016x}"


def _hashed_values(field: T.StructField) -> list[Column]:
    """The hashed parts of a column: Spark's hash skips nulls and the ends of lists."""
    value = F.col(quote_name(field.name))
    kind = field.dataType
    if isinstance(kind, T.ArrayType):
        inner = kind.elementType
        entries = F.transform(value, lambda e: F.struct(e.isNull(), _plain(e, inner)))
        return [value.isNull(), F.size(value), entries]
    return [value.isNull(), _plain(value, kind)]


def _plain(value: Column, kind: T.DataType) -> Column:
    # Maps have no hash, and structs and vectors hold nulls and lists of their own.
    return value if isinstance(kind, T.AtomicType) else value.cast("string")


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
    return ".".join(quote_name(parts.apply(i)) for i in range(parts.size()))


def _find_provider(description: list[Row]) -> str:
    """The table's format, lower case; nothing of a view."""
    names = [row["col_name"] for row in description]
    # A column of the table may have that name too; the columns come first.
    details = description[names.index(_DETAILS) :] if _DETAILS in names else []
    found = (row["data_type"] for row in details if row["col_name"] == "Provider")
    return str(next(found, "")).lower()


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
    return (
        f"rows:{checksum_rows(_select_declared(_open_table(spark, name, config), config, dates))}"
    )


def _open_table(spark: SparkSession, name: str, config: SourceConfig) -> DataFrame:
    if config.jdbc is not None:
        return read_jdbc(spark, name, config.jdbc)
    return read_catalogue_table(spark, name, config.table or "")


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


_SHOWN_CHANGES = 10
_VOCABULARY = "vocabulary "  # No source has a name with a blank in it.


@dataclass(frozen=True)
class RunInputs:
    """What the sources of a run read, as it stands.

    Attributes:
        files: Every input file.
        tables: Every table and query.
    """

    files: tuple[InputFile, ...]
    tables: tuple[InputTable, ...] = ()

    @property
    def bytes(self) -> int | None:
        """Bytes of the files; None where tables are read too, whose size nothing tells."""
        return None if self.tables else sum(file.bytes for file in self.files)


def read_inputs(
    spark: SparkSession,
    config: BuildConfig,
    dates: DateRange | None,
    optional: Collection[str] = (),
) -> tuple[dict[str, Source], RunInputs]:
    """Opens every source that a build uses, and takes down what it reads.

    Args:
        spark: Session.
        config: The build's config.
        dates: The run's days, or None.
        optional: Columns of the log that may be null, or not there at all.

    Raises:
        ConfigError: The session cannot read a source.
        InputDataError: A source is missing, or does not fit its declaration.
        UpstreamNotReadyError: A database does not answer.
    """
    used = config.used_sources
    declared = {name: source for name, source in config.sources.items() if name in used}
    # Before any is opened: a change in between then shows as one, and is never taken for read.
    tables = read_states(spark, declared.items(), dates)
    sources = {
        name: read_source(
            spark, name, source, config.data_dir, dates,
            optional if name == config.events.source else (),
        )
        for name, source in declared.items()
    }  # fmt: skip
    files = tuple(file for source in sources.values() for file in source.files)
    return sources, RunInputs((*files, *find_token_files(config)), tables)


def find_token_files(config: BuildConfig) -> Iterator[InputFile]:
    """Finds the files of vocabularies that are not fitted: inputs like those of sources.

    Raises:
        InputDataError: There is no such file.
    """
    given = {
        feature.vocabulary: feature.encoding.path
        for feature in config.features
        if isinstance(feature.encoding, TokensConfig) and feature.encoding.path is not None
    }
    for name, path in given.items():
        file = (local_path(config.data_dir) / local_path(path)).resolve()
        if not file.is_file():
            raise InputDataError(
                f"vocabulary {name!r} has no file",
                received=file,
                fix="correct the `path` of its encoding, or give the folder by --data",
            )
        yield describe_input(f"{_VOCABULARY}{name}", file)


def check_inputs_unchanged(
    spark: SparkSession, config: BuildConfig, inputs: RunInputs, dates: DateRange | None
) -> None:
    """Refuses what was made of inputs that are no longer what they were when the run began.

    Spark reads an input more than once: a version of inputs that changed meanwhile would be of
    neither state, and say of itself that it is of the first.

    Args:
        spark: Session.
        config: The build's config.
        inputs: What was read, as it stood when the run began.
        dates: The run's days, or None.

    Raises:
        InputDataError: A file was written, added or removed, or a table or query has changed.
    """
    known = {table.source: config.sources[table.source] for table in inputs.tables if table.state}
    before, now = (
        {table.source: table for table in tables}
        for tables in (inputs.tables, read_states(spark, known.items(), dates))
    )
    changes = [
        f"{name}: {now[name].place} has changed" for name in now if now[name] != before[name]
    ]
    for name, source in config.used_sources.items():
        before_files = [file for file in inputs.files if file.source == name]
        changes += [
            f"{name}: {change}"
            for change in find_changes(name, source, config.data_dir, before_files, dates)
        ]
    given = [file for file in inputs.files if file.source.startswith(_VOCABULARY)]
    if given != list(find_token_files(config)):
        changes += [f"{file.source}: {file.path} was written" for file in given]
    if changes:
        shown = [*changes[:_SHOWN_CHANGES], *(["…"] if len(changes) > _SHOWN_CHANGES else [])]
        raise InputDataError(
            "the input has changed while it was read; nothing was published",
            received="\n            ".join(shown),
            allowed="inputs that stay as they are until the build has ended",
            fix="run the build again once the input is complete; of a query whose rows differ from "
            "one reading to the next, set change_check: null",
        )


def find_unwatched(inputs: RunInputs) -> list[str]:
    """Returns the sources of which nothing tells whether they have changed since an earlier run."""
    blind = {file.source for file in inputs.files if file.modified_ms <= 0}
    return sorted(blind | {table.source for table in inputs.tables if table.state is None})

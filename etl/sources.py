"""Declared-schema readers of text logs and dictionaries: every line is a row or a bad row."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as F

from conf.dates import DateRange
from conf.errors import InputDataError
from conf.etl import ColumnConfig, SourceConfig
from conf.manifest import InputFile
from etl.headers import escape_path, read_header
from etl.input_files import count_levels, find_files

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

ORDER_COLUMN = "__order"
REASON_COLUMN = "__reason"
LINE_COLUMN = "__line"
FILE_COLUMN = "__file"
REPEATED_HEADER = "repeated_header"
_FIELDS = "__fields"

_SPARK_TYPES = {
    "int64": "bigint",
    "float32": "float",
    "string": "string",
    "list<int64>": "array<bigint>",
    "list<string>": "array<string>",
}


@dataclass(frozen=True)
class Source:
    """A source as read: parsed rows, and why the others did not parse.

    Attributes:
        name: Its name in the config.
        rows: Declared columns plus `__order` (position in the input), `__reason` (null for good
            rows), `__line` and `__file`; each line that equals the header has the reason
            `repeated_header`, the header itself included.
        files: The input files, as they stood.
        headers: Number of header lines: one per file that has a line, or none.
    """

    name: str
    rows: DataFrame
    files: tuple[InputFile, ...]
    headers: int = 0

    @property
    def good(self) -> DataFrame:
        """Rows that fit the declared schema, without the bookkeeping but `__order`."""
        return self.rows.where(F.col(REASON_COLUMN).isNull()).drop(
            REASON_COLUMN, LINE_COLUMN, FILE_COLUMN
        )

    @property
    def bad(self) -> DataFrame:
        """Rows that do not: file, line, reason."""
        bad = self.rows.where(F.col(REASON_COLUMN).isNotNull())
        if self.headers:
            # The first of its kind is the header. Only bad rows are sorted for that.
            same = Window.partitionBy(FILE_COLUMN, REASON_COLUMN).orderBy(ORDER_COLUMN)
            header = (F.col(REASON_COLUMN) == REPEATED_HEADER) & (F.col("__rank") == 1)
            bad = bad.withColumn("__rank", F.row_number().over(same)).where(~header)
        return bad.select(
            F.col(FILE_COLUMN).alias("file"),
            F.col(LINE_COLUMN).alias("line"),
            F.col(REASON_COLUMN).alias("reason"),
        )


def read_source(
    spark: SparkSession,
    name: str,
    config: SourceConfig,
    data_dir: str,
    dates: DateRange | None = None,
) -> Source:
    """Reads a source lazily.

    Args:
        spark: Session.
        name: The source's name in the config.
        config: Its declaration.
        data_dir: Directory that a relative path starts from.
        dates: Days that the run covers, for sources that are split by day.

    Returns:
        The source; nothing has been scanned yet.

    Raises:
        InputDataError: No such file, nothing in it, or a header that does not fit.
    """
    files = find_files(name, config, data_dir)
    header = read_header(spark, name, config, files) if config.header else None
    paths = [escape_path(file.path) for file in files]
    lines = (
        spark.read.text(paths)
        .select("value", "_metadata")
        .withColumn(LINE_COLUMN, _decode(config))
        .withColumn(_FIELDS, _split_fields(config))
    )
    values = {column.name: _parse(column, i) for i, column in enumerate(config.columns)}
    parsed = lines.select(
        *[value.alias(column) for column, value in values.items()],
        F.col("_metadata.file_path").alias(FILE_COLUMN),
        LINE_COLUMN,
        _reason(config, values, header).alias(REASON_COLUMN),
        # Position in the input whatever the partitioning: the id grows with the line inside one
        # block, and blocks are ordered by where they start. Being non-deterministic it also keeps
        # Spark from parsing each line again to filter on the reason.
        F.struct(
            # No more of the path than tells files apart: every row carries it through each sort.
            F.substring_index("_metadata.file_path", "/", -count_levels(files)).alias("file"),
            F.col("_metadata.file_block_start").alias("block"),
            F.monotonically_increasing_id().alias("line"),
        ).alias(ORDER_COLUMN),
    )
    headers = sum(file.bytes > 0 for file in files) if config.header else 0
    return Source(name, parsed, files, headers)


def _decode(config: SourceConfig) -> Column:
    value = F.col("value")
    if config.encoding == "latin-1":
        return F.decode(value.cast("binary"), "ISO-8859-1")
    return F.make_valid_utf8(value)


def _split_fields(config: SourceConfig) -> Column:
    line = F.col(LINE_COLUMN)
    if config.pattern is None:
        return F.split(line, re.escape(config.separator), -1)
    pattern = f"^(?:{config.pattern})$"
    groups = [F.regexp_extract(line, pattern, i + 1) for i in range(len(config.columns))]
    return F.when(line.rlike(pattern), F.array(*groups)).otherwise(F.array().cast("array<string>"))


def _parse(column: ColumnConfig, index: int) -> Column:
    text = F.get(F.col(_FIELDS), F.lit(index))
    if not column.type.startswith("list<"):
        # A field left empty is null, for strings too: a log has no other way to write it.
        return F.when(text != "", text.try_cast(_SPARK_TYPES[column.type]))
    parts = F.when(text != "", F.split(text, re.escape(column.separator or ""), -1))
    return parts.try_cast(_SPARK_TYPES[column.type])


def _reason(config: SourceConfig, values: dict[str, Column], header: bytes | None) -> Column:
    """The first thing that is wrong with a row, or null."""
    empty = F.trim(F.col(LINE_COLUMN)) == ""
    if header is None:
        reason = F.when(empty, F.lit("empty_line"))
    else:
        is_header = F.col("value").cast("binary") == F.lit(header)
        reason = F.when(is_header, F.lit(REPEATED_HEADER)).when(empty, F.lit("empty_line"))
    if config.encoding == "utf-8":
        reason = reason.when(~F.is_valid_utf8("value"), F.lit("not_utf8"))
    wrong_shape = "wrong_field_count" if config.pattern is None else "pattern_mismatch"
    reason = reason.when(F.size(_FIELDS) != len(config.columns), F.lit(wrong_shape))
    for index, column in enumerate(config.columns):
        for condition, name in _column_faults(column, index, values[column.name]):
            reason = reason.when(condition, F.lit(f"{name}:{column.name}"))
    return reason


def _column_faults(column: ColumnConfig, index: int, value: Column) -> list[tuple[Column, str]]:
    text = F.get(F.col(_FIELDS), F.lit(index))
    unparsed = value.isNull() & (text != "")
    if column.type.startswith("list<"):
        unparsed = unparsed | F.exists(value, lambda element: element.isNull())
    faults = [(unparsed, f"not_{column.type}")]
    if not column.nullable:
        faults.append((value.isNull(), "null"))
    if column.type == "float32":
        faults.append((F.isnan(value) | (F.abs(value) == float("inf")), "not_finite"))
    # In the column's own precision: 0.1 read as float32 is not above 0.1.
    bound_type = "float" if column.type == "float32" else "double"
    if column.minimum is not None:
        faults.append((value < F.lit(column.minimum).cast(bound_type), "below_minimum"))
    if column.maximum is not None:
        faults.append((value > F.lit(column.maximum).cast(bound_type), "above_maximum"))
    if column.one_of is not None:
        faults.append((value.isNotNull() & ~text.isin(*column.one_of), "not_allowed"))
    return faults


@dataclass(frozen=True)
class SourceCounts:
    """Rows of a source: all, and the bad ones by reason."""

    read: int
    bad: dict[str, int]

    @property
    def bad_rows(self) -> int:
        """Number of bad rows."""
        return sum(self.bad.values())


def count_rows(source: Source) -> SourceCounts:
    """Scans a source once and counts its rows by what is wrong with them."""
    rows = source.rows.groupBy(REASON_COLUMN).count().collect()
    counts = {row[REASON_COLUMN]: row["count"] for row in rows}
    if source.headers:
        repeated = counts.pop(REPEATED_HEADER, 0) - source.headers
        counts |= {REPEATED_HEADER: repeated} if repeated > 0 else {}
    bad = {reason: n for reason, n in sorted(counts.items(), key=str) if reason is not None}
    return SourceCounts(sum(counts.values()), bad)


def check_bad_rows(source: Source, counts: SourceCounts, config: SourceConfig) -> None:
    """Refuses a source with more bad rows than its budget.

    Raises:
        InputDataError: No row is good, the policy is `fail` and a row is bad, or the share of
            bad rows is above `max_fraction`.
    """
    bad, policy = counts.bad_rows, config.bad_rows
    fraction = bad / counts.read if counts.read else 1.0
    over = fraction > policy.max_fraction
    if not (over or (policy.policy == "fail" and bad) or bad == counts.read):
        return
    by_reason = source.bad.groupBy("reason").agg(
        F.min("line").alias("line"), F.count("*").alias("n")
    )
    examples = by_reason.orderBy(F.desc("n"), "reason").limit(3).collect()
    shown = "; ".join(f"{row['reason']}: {row['line'][:120]!r}" for row in examples)
    reasons = ", ".join(f"{reason} {n}" for reason, n in counts.bad.items())
    budget = 0.0 if policy.policy == "fail" else policy.max_fraction
    raise InputDataError(
        f"source {source.name!r} has {bad:,} bad rows of {counts.read:,} ({fraction:.2%})",
        received=f"{reasons or 'no rows'}\n            {shown}",
        allowed=f"at most {budget:.2%} (sources.{source.name}.bad_rows)",
        fix=f"check the separator ({config.separator!r}), encoding and columns of the source, "
        "mend the input, or raise the budget",
    )

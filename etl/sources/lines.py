"""Text files by line: decoded, with the place of each line, and whether it is a header."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from conf.etl import SourceConfig
from conf.manifest import InputFile
from etl.sources.files import count_levels
from etl.sources.headers import escape_path
from etl.sources.source import FILE_COLUMN, LINE_COLUMN, REPEATED_HEADER

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

RAW_COLUMN = "__raw"
_METADATA = "_metadata"
_REPLACEMENT = "\ufffd"
# Names that Spark decodes by itself; the others are Java's, which it must be told to allow.
_SPARK_CHARSETS = {"latin-1": "ISO-8859-1", "us-ascii": "US-ASCII"}
_JAVA_CHARSETS = {
    "spark.sql.legacy.javaCharsets": "true",
    "spark.sql.legacy.codingErrorAction": "true",
}


def read_lines(spark: SparkSession, config: SourceConfig, files: Sequence[InputFile]) -> DataFrame:
    """Reads the lines of text files.

    Returns:
        A frame of `__raw` (the bytes), `__line` (the text), `__file` and Spark's `_metadata`.
    """
    paths = [escape_path(file.path) for file in files]
    lines = spark.read.text(paths).select(F.col("value").alias(RAW_COLUMN), _METADATA)
    with _java_charsets(spark, config):
        return lines.withColumn(LINE_COLUMN, _decode(config)).withColumn(
            FILE_COLUMN, F.col(f"{_METADATA}.file_path")
        )


def file_order(files: Sequence[InputFile]) -> Column:
    """Position in the input, whatever the partitioning.

    The id grows with the line inside one block, and blocks are ordered by where they start. Being
    non-deterministic it also keeps Spark from parsing each line again to filter on the reason.
    """
    return F.struct(
        # No more of the path than tells files apart: every row carries it through each sort.
        F.substring_index(f"{_METADATA}.file_path", "/", -count_levels(files)).alias("file"),
        F.col(f"{_METADATA}.file_block_start").alias("block"),
        F.monotonically_increasing_id().alias("line"),
    )


def line_faults(config: SourceConfig, header: bytes | None) -> list[tuple[Column, str]]:
    """What may be wrong with a line before it is taken apart."""
    faults = []
    if header is not None:
        is_header = F.col(RAW_COLUMN).cast("binary") == F.lit(header)
        faults.append((is_header, REPEATED_HEADER))
    faults.append((F.trim(F.col(LINE_COLUMN)) == "", "empty_line"))
    if config.encoding == "utf-8":
        faults.append((~F.is_valid_utf8(RAW_COLUMN), "not_utf8"))
    elif config.encoding != "latin-1":
        undecoded = F.contains(F.col(LINE_COLUMN), F.lit(_REPLACEMENT))
        faults.append((undecoded, f"not_{config.encoding}"))
    return faults


def _decode(config: SourceConfig) -> Column:
    raw = F.col(RAW_COLUMN)
    if config.encoding == "utf-8":
        return F.make_valid_utf8(raw)
    charset = _SPARK_CHARSETS.get(config.encoding, config.encoding)
    return F.decode(raw.cast("binary"), charset)


@contextmanager
def _java_charsets(spark: SparkSession, config: SourceConfig) -> Iterator[None]:
    """Lets Spark decode by any charset of Java while a plan is made.

    Spark takes these settings into the plan; afterwards the session is as it was. Bytes that the
    charset does not know become U+FFFD, which makes the row a bad row, not a failed task.
    """
    if config.encoding in ("utf-8", "latin-1"):
        yield
        return
    before = {key: spark.conf.get(key, None) for key in _JAVA_CHARSETS}
    try:
        for key, value in _JAVA_CHARSETS.items():
            spark.conf.set(key, value)
        yield
    finally:
        for key, old in before.items():
            if old is None:
                spark.conf.unset(key)
            else:
                spark.conf.set(key, old)

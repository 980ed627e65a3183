"""Text files by line: decoded, with the place of each line, and whether it is a header."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from conf.etl import SourceConfig
from conf.provenance import InputFile
from etl.sources.files import count_levels
from etl.sources.headers import escape_path
from etl.sources.source import FILE_COLUMN, LINE_COLUMN, REPEATED_HEADER

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

RAW_COLUMN = "__raw"
_METADATA = "_metadata"
_REPLACEMENT = "\ufffd"
# A URI writes these as they are, whoever makes it of a path.
_PLAIN_PATH = re.compile(r"/[\w/.=,@~+-]*", re.ASCII)
_ROOTS = ("file:", "file://")
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


def file_order(name: str, files: Sequence[InputFile]) -> Column:
    """Position in the input, whatever the partitioning.

    The id grows with the line inside one block, and blocks are ordered by where they start.

    Args:
        name: The source's name, which tells its rows from those of others.
        files: All its files.
    """
    return F.struct(
        _file_place(name, files).alias("file"),
        F.col(f"{_METADATA}.file_block_start").alias("block"),
        F.monotonically_increasing_id().alias("line"),
    )


def _file_place(name: str, files: Sequence[InputFile]) -> Column:
    """What orders files by their path: short, as every row carries it through each sort."""
    path = F.col(f"{_METADATA}.file_path")
    paths = sorted(file.path for file in files)
    if not all(map(_PLAIN_PATH.fullmatch, paths)):
        # No more of the path than tells files apart.
        tail = F.substring_index(path, "/", -count_levels(files))
        return F.concat(F.lit(f"{name}/"), tail)
    digits = len(str(len(paths)))
    places = {
        f"{root}{file}": f"{name}/{number:0{digits}d}"
        for number, file in enumerate(paths)
        for root in _ROOTS
    }
    found = F.try_element_at(F.from_json(F.lit(json.dumps(places)), "map<string,string>"), path)
    unknown = F.raise_error(F.concat(F.lit("not one of the input's files: "), path))
    return F.coalesce(found, unknown.cast("string"))


def line_faults(config: SourceConfig, header: bytes | None) -> list[tuple[Column, str]]:
    """What may be wrong with a line before it is taken apart."""
    faults = []
    if header is not None:
        is_header = F.col(RAW_COLUMN).cast("binary") == F.lit(header)
        faults.append((is_header, REPEATED_HEADER))
    # Spaces alone come before all that can be seen: few lines need to be trimmed.
    line = F.col(LINE_COLUMN)
    faults.append(((line < "!") & (F.trim(line) == ""), "empty_line"))
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

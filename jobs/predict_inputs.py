"""Rows that Spark reads for `sluice predict`: numbered, in partitions of one size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from conf.artefacts.export import LINE, PART, ROW, TIMES
from conf.errors import ConfigError, InputDataError
from conf.etl.sources import SourceConfig
from etl.sources.parquet_files import load_parquet
from etl.sources.text_files import escape_path
from etl.sources.text_formats import has_bad_quotes
from etl.tfrecord.spark.failures import describe_failure, known_failures
from etl.tfrecord.spark.schema import quote_name

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

JSON_FORMATS = ("jsonl", "ndjson", "json")
_SUFFIXES = {"csv": "csv", "tsv": "tsv", "parquet": "parquet", "orc": "orc", "avro": "avro",
             **dict.fromkeys(JSON_FORMATS, "jsonl")}  # fmt: skip
# How files are cut into partitions must not depend on the cluster: rows are numbered by it.
_READING = {
    "spark.sql.files.maxPartitionBytes": str(32 << 20),
    "spark.sql.files.openCostInBytes": str(4 << 20),
    "spark.sql.files.minPartitionNum": "1",
}
# As one machine reads text; a line that does not have the columns of the header is refused, and so
# is a file whose header is not that of the first. A field is missing where nothing stands: with an
# empty `nullValue`, quotes around nothing would be missing too, so it is what no text has.
_TEXT = {
    "header": "true", "escape": '"', "mode": "FAILFAST", "columnPruning": "false",
    "enforceSchema": "false", "nullValue": "\ufdd0", "emptyValue": "",
}  # fmt: skip
_WITH_COLUMNS = ("parquet", "orc", "avro")
_FILES_AT_ONCE = 8
_POSITION_BITS = 33


@dataclass(frozen=True)
class SparkInput:
    """Files, folders or globs; a format of Spark, `tsv` or `jsonl` (None: told by the name)."""

    paths: tuple[str, ...]
    kind: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)

    def find_kind(self) -> str:
        """Returns the format."""
        if self.kind is not None:
            return "jsonl" if self.kind in JSON_FORMATS else self.kind
        names = [path.rstrip("/").rpartition("/")[2].removesuffix(".gz") for path in self.paths]
        kinds = {_SUFFIXES.get(name.rpartition(".")[2].lower()) for name in names}
        [kind] = kinds if len(kinds) == 1 else [None]
        if kind is None:
            raise ConfigError(
                "the format of the input is not known by its name",
                received=", ".join(self.paths),
                allowed=f"a name that ends in {', '.join(f'.{s}' for s in _SUFFIXES)}",
                fix="say it by --format: any format that Spark reads",
            )
        return kind


@dataclass(frozen=True)
class NumberedInput:
    """Rows with numbers: path, bytes and time of each file, rows of each of Spark's partitions."""

    frame: DataFrame
    columns: tuple[str, ...]
    files: list[list[Any]]
    counts: list[int]
    source: SparkInput


def open_input(session: SparkSession, source: SparkInput) -> NumberedInput:
    """Opens an input and counts its rows."""
    from pyspark.sql import functions as F

    kind = source.find_kind()
    for name, value in _READING.items():
        session.conf.set(name, value)
    with input_failures():
        _refuse_bad_quotes(session, kind, source)
        frame = _read(session, kind, source)
        files = _list_files(session, frame)
        if not files:
            raise ConfigError(
                "a job goes on where it was killed only if its input is files",
                received=f"{', '.join(source.paths)} ({kind})",
                fix="write it as Parquet first, and name that",
            )
        part = F.spark_partition_id().alias("part")
        rows = {row["part"]: row["count"] for row in frame.groupBy(part).count().collect()}
    counts = [rows.get(part, 0) for part in range(max(rows, default=-1) + 1)]
    return NumberedInput(frame, tuple(frame.columns), files, counts, source)


def check_parts(found: NumberedInput, names: Iterable[str]) -> None:
    """Refuses files that lack a column which others have: Spark would read nulls."""
    kind, session = found.source.find_kind(), found.frame.sparkSession
    if kind not in _WITH_COLUMNS or len(found.files) < 2:
        return

    def find_lacking(uri: str) -> list[str]:
        path = escape_path(unquote(uri))
        part = replace(found.source, paths=(path,), kind=kind)
        there = {column.lower() for column in _read(session, kind, part).columns}
        # The folders of a partitioned table hold its columns.
        return [n for n in names if n.lower() not in there and f"/{n}=" not in path]

    uris = [uri for uri, *_ in found.files]
    with input_failures(), ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
        for uri, lacking in zip(uris, pool.map(find_lacking, uris), strict=True):
            if lacking:
                raise InputDataError(
                    "a part of the input lacks columns that others have",
                    received=f"{unquote(uri)}: no {', '.join(lacking)}",
                    fix="write the part again, or take it out",
                )


def _read(session: SparkSession, kind: str, source: SparkInput) -> DataFrame:
    options: dict[str, str] = {}
    if kind in ("csv", "tsv"):
        options = _TEXT | ({"sep": "\t", "quote": ""} if kind == "tsv" else {})
    names = {"tsv": "csv", "jsonl": "text"}
    reader = session.read.format(names.get(kind, kind)).options(**{**options, **source.options})
    if kind == "parquet":
        return load_parquet(session, reader, source.paths)
    return reader.load(list(source.paths))


def _refuse_bad_quotes(session: SparkSession, kind: str, source: SparkInput) -> None:
    """Refuses what one machine refuses: a quote that does not end, any that begins a tsv field."""
    if kind not in ("csv", "tsv") or source.options:
        return
    from pyspark.sql import functions as F

    form = {"format": "csv", "path": "-", "columns": [{"name": "x", "type": "string"}]}
    lines = session.read.text(list(source.paths)).select("value", "_metadata.file_path")
    if kind == "tsv":
        bad = F.col("value").rlike('(^|\t)"')
    else:
        bad = has_bad_quotes(F.col("value"), SourceConfig.model_validate(form))
    if (first := lines.where(bad).head()) is not None:
        raise InputDataError(
            "a line of the input has a quote that its format does not know",
            received=f"{unquote(first['file_path'])}: {first['value'][:200]!r}",
            fix=".tsv is read without quotes, and a quote of .csv ends in its line: a field with "
            "line breaks in it is read from Parquet",
        )


def _list_files(session: SparkSession, frame: DataFrame) -> list[list[Any]]:
    hadoop: Any = session._jsparkSession.sessionState().newHadoopConf()
    files = []
    for uri in sorted(frame.inputFiles()):
        path: Any = session._jvm.org.apache.hadoop.fs.Path(session._jvm.java.net.URI(uri))  # type: ignore[union-attr]
        status = path.getFileSystem(hadoop).getFileStatus(path)
        files.append([uri, status.getLen(), status.getModificationTime()])
    return files


def read_times(found: NumberedInput, inputs: Iterable[Any], read: Sequence[str]) -> DataFrame:
    """Returns the rows with text of Java's date patterns as milliseconds, as the build reads it.

    Those of lines of JSON stand in a column of their own, `TIMES`.
    """
    from pyspark.sql import functions as F

    patterns = {
        name: item.written.time
        for item in inputs
        if item.written is not None and item.written.time is not None
        for name in {item.name, item.column} & set(read)
        if item.written.time != "iso" and not item.written.time.startswith("epoch_")
    }
    frame, types = found.frame, dict(found.frame.dtypes)
    if found.source.find_kind() == "jsonl" and patterns:
        fields = ", ".join(f"{quote_name(name)} string" for name in patterns)
        row = F.from_json(LINE, fields)
        times = [_read_time(name, row[name], own).alias(name) for name, own in patterns.items()]
        return frame.withColumn(TIMES, F.struct(*times))
    for name, pattern in patterns.items():
        if types.get(name) == "string":
            frame = frame.withColumn(name, _read_time(name, F.col(quote_name(name)), pattern))
    return frame


def _read_time(name: str, text: Column, pattern: str) -> Column:
    from pyspark.sql import functions as F

    parsed = F.unix_millis(F.try_to_timestamp(text, F.lit(pattern)))
    time = F.coalesce(parsed, text.try_cast("bigint"))
    said = F.concat(F.lit(f"column {name!r}, text of {pattern!r}: "), text)
    is_wrong = time.isNull() & (F.trim(text) != "")
    return F.when(is_wrong, F.raise_error(said)).otherwise(time)


def choose_rows(
    found: NumberedInput, read: Sequence[str], part_rows: int, missing: Sequence[int]
) -> DataFrame:
    """Returns the rows of some partitions, each in one of Spark's partitions and in order."""
    from pyspark.sql import functions as F

    starts, total = [], 0
    for count in found.counts:
        starts.append(total)
        total += count
    position = F.monotonically_increasing_id()
    numbered = found.frame.select(*map(quote_name, read), position.alias(ROW))
    own = F.col(ROW).bitwiseAND(F.lit((1 << _POSITION_BITS) - 1))
    begin = F.element_at(F.lit(starts), _to_int(F.shiftright(ROW, _POSITION_BITS) + 1))
    numbered = numbered.withColumn(ROW, begin + own)
    part = F.floor(F.col(ROW) / F.lit(part_rows))
    place = F.array_position(F.lit(list(missing)).cast("array<bigint>"), F.col(PART)) - 1
    wanted = numbered.withColumn(PART, part).withColumn("__sluice_place", place)
    placed = wanted.where(F.col("__sluice_place") >= 0)
    spread = placed.repartitionById(len(missing), _to_int(F.col("__sluice_place")))
    return spread.drop("__sluice_place").sortWithinPartitions(ROW)


def _to_int(value: Column) -> Column:
    return value.cast("int")


def list_parts(session: SparkSession, missing: Sequence[int]) -> DataFrame:
    """Returns a row for each partition, in one of Spark's partitions each."""
    from pyspark.sql import functions as F

    place = _to_int(F.col("id") + 1)
    parts = F.lit(list(missing)).cast("array<bigint>")
    frame = session.range(0, len(missing), 1, len(missing))
    return frame.select(F.element_at(parts, place).alias(PART))


@contextmanager
def input_failures() -> Iterator[None]:
    """Raises the cause of what Spark raises: what a task said, or an input that is not readable."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        with known_failures():
            yield
    except InputDataError as error:
        file, _, cause = str(error.received).partition(": org.")
        if "CSV header does not conform to the schema" not in cause:
            raise
        raise InputDataError(
            "the files of the input have different headers",
            received=file,
            fix="write the file again, or predict it by itself",
        ) from error
    except (PySparkException, Py4JError) as error:
        if (known := _explain(str(error), describe_failure(error))) is not None:
            raise known from error
        raise


def _explain(text: str, said: str) -> ConfigError | InputDataError | None:
    if "PATH_NOT_FOUND" in text:
        return InputDataError("there is no such input", received=said)
    if "DATA_SOURCE_NOT_FOUND" in text:
        fix = "correct --format, or give Spark its package"
        return ConfigError("Spark does not have that format", received=said, fix=fix)
    if "MALFORMED_" in text:
        line = next(line for line in text.splitlines() if "MALFORMED_" in line)
        return InputDataError("a row of the input is damaged", received=line.strip()[:500])
    return None

"""Batch scoring on Spark: numbered rows in partitions of one size, and a function that is shipped.

The function goes to the executors by value, so that they need nothing of Sluice.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from conf.errors import ConfigError, InputDataError
from conf.etl.sources import SourceConfig
from etl.sources.parquet_files import load_parquet
from etl.sources.text_files import escape_path
from etl.sources.text_formats import has_bad_quotes
from etl.tfrecord.spark.failures import describe_failure, known_failures

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, SparkSession

SHIPPED_PACKAGES = ("conf", "training")
RESULT = "part bigint, rows bigint"
JSON_FORMATS = ("jsonl", "ndjson", "json")
_SUFFIXES = {"csv": "csv", "tsv": "tsv", "parquet": "parquet", "orc": "orc", "avro": "avro",
             **dict.fromkeys(JSON_FORMATS, "jsonl")}  # fmt: skip
# How files are cut into partitions must not depend on the cluster: rows are numbered by it.
_READING = {
    "spark.sql.files.maxPartitionBytes": str(32 << 20),
    "spark.sql.files.openCostInBytes": str(4 << 20),
    "spark.sql.files.minPartitionNum": "1",
}
# As `sluice predict` reads text; a line that does not have the columns of the header is refused,
# and so is a file whose header is not that of the first. A field is missing where nothing stands:
# with an empty `nullValue`, quotes around nothing would be missing too, so it is what no text has.
_TEXT = {
    "header": "true", "escape": '"', "mode": "FAILFAST", "columnPruning": "false",
    "enforceSchema": "false", "nullValue": "\ufdd0", "emptyValue": "",
}  # fmt: skip
_OTHER_HEADER = "CSV header does not conform to the schema"
_WITH_COLUMNS = ("parquet", "orc", "avro")
_FILES_AT_ONCE = 8
_JSON_SAMPLE = 10_000
_POSITION_BITS = 33

Score = Callable[[str, Iterable["pa.RecordBatch"]], Iterator["pa.RecordBatch"]]
"""From the directory of the model on an executor, and the rows of a partition, to its result."""


@dataclass(frozen=True)
class SparkInput:
    """An input that Spark reads.

    Attributes:
        paths: Files, folders or globs.
        kind: A format of Spark, or `tsv` or `jsonl`; None: told by the name.
        options: Of Spark's reader.
    """

    paths: tuple[str, ...]
    kind: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)

    def find_kind(self) -> str:
        """Returns the format.

        Raises:
            ConfigError: The names do not tell it.
        """
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
    """Rows with numbers.

    Attributes:
        frame: The rows.
        columns: Names of their columns.
        first_lines: Of JSON, the first lines.
        files: Path, bytes and time of the last change of each file, by path.
        counts: Rows of each of Spark's partitions.
        source: Where they come from.
    """

    frame: DataFrame
    columns: tuple[str, ...]
    first_lines: list[str]
    files: list[list[Any]]
    counts: list[int]
    source: SparkInput


def open_input(session: SparkSession, source: SparkInput) -> NumberedInput:
    """Opens an input and counts its rows.

    Raises:
        ConfigError: Its format is not known, or it is not made of files.
        InputDataError: It is missing or damaged.
    """
    from pyspark.sql import functions as F

    kind = source.find_kind()
    for name, value in _READING.items():
        session.conf.set(name, value)
    with input_failures():
        _refuse_bad_quotes(session, kind, source)
        frame = _read(session, kind, source)
        is_json = kind == "jsonl"
        sample = frame.limit(_JSON_SAMPLE).toArrow().column(0).to_pylist() if is_json else []
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
    return NumberedInput(frame, tuple(frame.columns), sample, files, counts, source)


def check_parts(found: NumberedInput, names: Iterable[str]) -> None:
    """Refuses files that lack a column which others have: Spark would read nulls.

    Args:
        found: The input.
        names: Columns that are read.

    Raises:
        InputDataError: A file lacks one; the message names both.
    """
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
                    allowed="the same columns in each part",
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
    """Refuses what `predict` refuses: a quote that does not end, any that begins a tsv field."""
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
            "a line of the input has a quote "
            + ("before a field" if kind == "tsv" else "that does not end in its field"),
            received=f"{unquote(first['file_path'])}: {first['value'][:200]!r}",
            fix=".tsv is read without quotes; name a file with quotes and commas .csv"
            if kind == "tsv"
            else "correct the line; a field with line breaks in it is read from Parquet",
        )


def _list_files(session: SparkSession, frame: DataFrame) -> list[list[Any]]:
    hadoop: Any = session._jsparkSession.sessionState().newHadoopConf()
    files = []
    for uri in sorted(frame.inputFiles()):
        path: Any = session._jvm.org.apache.hadoop.fs.Path(session._jvm.java.net.URI(uri))  # type: ignore[union-attr]
        status = path.getFileSystem(hadoop).getFileStatus(path)
        files.append([uri, status.getLen(), status.getModificationTime()])
    return files


def choose_rows(
    found: NumberedInput, names: Names, part_rows: int, missing: Sequence[int]
) -> DataFrame:
    """Returns the rows of partitions, each in one of Spark's partitions and in order.

    Args:
        found: The input.
        names: Names of the columns that are added, and of those that are read.
        part_rows: Rows of a partition.
        missing: Numbers of the partitions.
    """
    from pyspark.sql import functions as F

    starts, total = [], 0
    for count in found.counts:
        starts.append(total)
        total += count
    position = F.monotonically_increasing_id()
    numbered = found.frame.select(*map(_name_column, names.read), position.alias(names.row))
    own = F.col(names.row).bitwiseAND(F.lit((1 << _POSITION_BITS) - 1))
    begin = F.element_at(F.lit(starts), _to_int(F.shiftright(names.row, _POSITION_BITS) + 1))
    numbered = numbered.withColumn(names.row, begin + own)
    part = F.floor(F.col(names.row) / F.lit(part_rows))
    place = F.array_position(F.lit(list(missing)).cast("array<bigint>"), F.col(names.part)) - 1
    wanted = numbered.withColumn(names.part, part).withColumn("__sluice_place", place)
    placed = wanted.where(F.col("__sluice_place") >= 0)
    spread = placed.repartitionById(len(missing), _to_int(F.col("__sluice_place")))
    return spread.drop("__sluice_place").sortWithinPartitions(names.row)


@dataclass(frozen=True)
class Names:
    """Names of columns: number of the partition, number of the row, and those that are read."""

    part: str
    row: str
    read: tuple[str, ...]


def _name_column(name: str) -> Column:
    from pyspark.sql import functions as F

    return F.col("`" + name.replace("`", "``") + "`")


def _to_int(value: Column) -> Column:
    return value.cast("int")


def list_parts(session: SparkSession, name: str, missing: Sequence[int]) -> DataFrame:
    """Returns a row for each partition, in one of Spark's partitions each."""
    from pyspark.sql import functions as F

    place = _to_int(F.col("id") + 1)
    parts = F.lit(list(missing)).cast("array<bigint>")
    frame = session.range(0, len(missing), 1, len(missing))
    return frame.select(F.element_at(parts, place).alias(name))


def ship(function: Callable[..., Any]) -> bytes:
    """Pickles a function with all that it calls of Sluice, and nothing by a name of Sluice."""
    from pyspark import cloudpickle

    modules = [importlib.import_module(name) for name in SHIPPED_PACKAGES]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(function))
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def run_scoring(frame: DataFrame, shipped: bytes, model: Path) -> dict[int, int]:
    """Scores the rows of a frame.

    Args:
        frame: A partition of rows in each of Spark's partitions.
        shipped: A pickled `Score`.
        model: Archive of the model; each executor gets a copy.

    Returns:
        Rows by partition.

    Raises:
        SluiceError: What a task has raised.
    """
    frame.sparkSession.sparkContext.addArchive(f"{model}#{model.stem}")
    with input_failures():
        rows = frame.mapInArrow(_build_mapper(shipped, model.stem), RESULT).collect()
    return {row["part"]: row["rows"] for row in rows}


def _build_mapper(shipped: bytes, model: str) -> Any:
    # A function inside a function is pickled by value: executors do not have this module.
    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import os
        import pickle
        from itertools import chain

        from pyspark import SparkFiles

        filled = (batch for batch in batches if batch.num_rows)
        first = next(filled, None)
        if first is None:
            return
        shown = os.dup(2)
        if os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3") == "3":
            # TensorFlow, which this loads, writes notes before it reads its own log level.
            with open(os.devnull, "w") as nowhere:  # noqa: PTH123 - paths are not imported here
                os.dup2(nowhere.fileno(), 2)
        try:
            score: Score = pickle.loads(shipped)  # noqa: S301 - made by this job
        finally:
            os.dup2(shown, 2)
            os.close(shown)
        yield from score(SparkFiles.get(model), chain([first], filled))

    return run


@contextmanager
def input_failures() -> Iterator[None]:
    """Raises the cause of what Spark raises: what a task said, or that the input is not readable.

    Raises:
        SluiceError: The error to show the user.
    """
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        with known_failures():
            yield
    except InputDataError as error:
        file, _, cause = str(error.received).partition(": org.")
        if _OTHER_HEADER not in cause:
            raise
        raise InputDataError(
            "the files of the input have different headers",
            received=file,
            allowed="the same columns in the same order in each file",
            fix="write the file again, or score it by itself",
        ) from error
    except (PySparkException, Py4JError) as error:
        text = str(error)
        if "PATH_NOT_FOUND" in text:
            raise InputDataError(
                "there is no such input", received=describe_failure(error)
            ) from error
        if "DATA_SOURCE_NOT_FOUND" in text:
            raise ConfigError(
                "Spark does not have that format",
                received=describe_failure(error),
                fix="correct --format, or give Spark its package",
            ) from error
        if "MALFORMED_" in text:
            line = next(line for line in text.splitlines() if "MALFORMED_" in line)
            raise InputDataError(
                "a row of the input is damaged", received=line.strip()[:500]
            ) from error
        raise

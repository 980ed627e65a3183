"""`sluice predict --engine spark`: rows in partitions of one size, each computed by one task.

Rows are read and numbered, partitions without a file are cut out of them, and executors compute
these. They have Sluice, as those of a build do, and read the export where it lies or from an
archive.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import time
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from conf.artefacts.export import EXPORT_FILE, LINE, PART, ROW, TIMES, Give
from conf.errors import ConfigError, InputDataError
from conf.etl.sources import SourceConfig
from etl.sources.frames import load_parquet
from etl.sources.text_files import escape_path
from etl.sources.text_formats import has_bad_quotes
from etl.tfrecord.spark.failures import describe_failure, known_failures
from etl.tfrecord.spark.schema import quote_name
from jobs.support.spark_session import build_session, check_executors, is_on_this_machine
from jobs.support.terminal import quiet_tensorflow

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, SparkSession

    from training.apply.export import Export
    from training.apply.parts import Job, RowSource
    from training.raw_inputs.inputs import InputColumn

_log = logging.getLogger("sluice.predict")
_SHIPPED = (EXPORT_FILE, "saved_model.pb", "fingerprint.pb", "variables", "assets",
            "users.parquet", "items.parquet", "embeddings/items.parquet")  # fmt: skip
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
_JSON_SAMPLE = 10_000


def find_kind(paths: Sequence[str], named: str | None = None) -> str:
    """Returns the format of an input: a format of Spark, `tsv` or `jsonl`; told by its name."""
    if named is not None:
        return "jsonl" if named in JSON_FORMATS else named
    names = [path.rstrip("/").rpartition("/")[2].removesuffix(".gz") for path in paths]
    kinds = {_SUFFIXES.get(name.rpartition(".")[2].lower()) for name in names}
    [kind] = kinds if len(kinds) == 1 else [None]
    if kind is None:
        raise ConfigError(
            "the format of the input is not known by its name",
            received=", ".join(paths),
            allowed=f"a name that ends in {', '.join(f'.{s}' for s in _SUFFIXES)}",
            fix="say it by --format: any format that Spark reads",
        )
    return kind


def run_job(export: Export, job: Job, spark: Mapping[str, str]) -> tuple[Job, int, float]:
    """Runs a job in a Spark session of its own, or the submitter's.

    Returns the job with its rows, how many partitions were computed now, and in how many seconds.
    """
    session = build_session(spark, "sluice predict")
    try:
        check_executors(session)
        return _run(session, export, job)
    finally:
        with contextlib.suppress(Exception):
            session.stop()


def _run(session: SparkSession, export: Export, job: Job) -> tuple[Job, int, float]:
    job = replace(job, threads=int(session.sparkContext.getConf().get("spark.task.cpus", "1")))
    found = None
    if job.source is None:
        job = replace(job, rows=int(export.card["users"]["rows"]))
    else:
        found = open_input(session, job.source)
        source = job.source.complete(found.frame.columns, _sample_lines(found, job.source))
        job = replace(job, source=source, rows=sum(found.counts))
    if not job.rows:
        raise InputDataError("the input has no rows", received=job.source and job.source.place)
    if found is not None and job.source is not None:
        found = _choose_columns(export, job.source, job.answers.give, found)
    status, missing = job.open(export, found.files if found else ()), job.find_missing()
    begun = time.monotonic()
    if missing:
        _log.info("%s of %s partitions to compute", len(missing), job.parts)
        if found is None:
            frame = list_parts(session, missing)
        else:
            frame = choose_rows(found, job.part_rows, missing)
        with tempfile.TemporaryDirectory() as folder:
            run_parts(frame, job, _bring_model(session, export, Path(folder)))
    elif status == "finished":
        _log.info("nothing to do: %s is finished", job.output)
    if missing or status != "finished":
        job.finish()
    return job, len(missing), time.monotonic() - begun


@dataclass(frozen=True)
class NumberedInput:
    """Rows with numbers: path, bytes and time of each file, rows of each of Spark's partitions."""

    frame: DataFrame
    files: list[list[Any]]
    counts: list[int]


def open_input(session: SparkSession, source: RowSource) -> NumberedInput:
    """Opens an input and counts its rows."""
    from pyspark.sql import functions as F

    for name, value in _READING.items():
        session.conf.set(name, value)
    with input_failures():
        _refuse_bad_lines(session, source)
        frame = _read(session, source)
        files = _list_files(session, frame)
        if not files:
            raise ConfigError(
                "a job goes on where it was killed only if its input is files",
                received=f"{source.place} ({source.kind})",
                fix="write it as Parquet first, and name that",
            )
        part = F.spark_partition_id().alias("part")
        rows = {row["part"]: row["count"] for row in frame.groupBy(part).count().collect()}
    counts = [rows.get(part, 0) for part in range(max(rows, default=-1) + 1)]
    return NumberedInput(frame, files, counts)


def _read(session: SparkSession, source: RowSource) -> DataFrame:
    options: dict[str, str] = {}
    if source.is_delimited:
        options = _TEXT | ({"sep": "\t", "quote": ""} if source.kind == "tsv" else {})
    kind = {"tsv": "csv", "jsonl": "text"}.get(source.kind, source.kind)
    reader = session.read.format(kind).options(**{**options, **source.options})
    if kind == "parquet":
        return load_parquet(session, reader, source.paths)
    return reader.load(list(source.paths))


def _refuse_bad_lines(session: SparkSession, source: RowSource) -> None:
    """Refuses what one machine refuses: a quote that does not end, any that begins a tsv field.

    And bytes that are no UTF-8, each of which Spark would read as U+FFFD.
    """
    if not source.is_delimited or source.options:
        return
    from pyspark.sql import functions as F

    form = {"format": "csv", "path": "-", "columns": [{"name": "x", "type": "string"}]}
    lines = session.read.text(list(source.paths)).select("value", "_metadata.file_path")
    bad = has_bad_quotes(F.col("value"), SourceConfig.model_validate(form))
    if source.kind == "tsv":
        bad = F.col("value").rlike('(^|\t)"')
    is_text = F.is_valid_utf8("value")
    wrong = lines.where(bad | ~is_text).select("*", is_text.alias("is_text"))
    if (first := wrong.head()) is not None:
        what, fix = "is no UTF-8", "write the file again as UTF-8"
        if first["is_text"]:
            what = "has a quote that its format does not know"
            fix = (
                ".tsv is read without quotes, and a quote of .csv ends in its line: a field with "
                "line breaks in it is read from Parquet"
            )
        raise InputDataError(
            f"a line of the input {what}",
            received=f"{unquote(first['file_path'])}: {first['value'][:200]!r}",
            fix=fix,
        )


def _list_files(session: SparkSession, frame: DataFrame) -> list[list[Any]]:
    hadoop: Any = session._jsparkSession.sessionState().newHadoopConf()
    files = []
    for uri in sorted(frame.inputFiles()):
        path: Any = session._jvm.org.apache.hadoop.fs.Path(session._jvm.java.net.URI(uri))  # type: ignore[union-attr]
        status = path.getFileSystem(hadoop).getFileStatus(path)
        files.append([uri, status.getLen(), status.getModificationTime()])
    return files


def _sample_lines(found: NumberedInput, source: RowSource) -> list[str]:
    """Returns lines of JSON, whose columns nothing else tells."""
    if source.kind != "jsonl":
        return []
    with input_failures():
        lines: list[str] = found.frame.limit(_JSON_SAMPLE).toArrow().column(0).to_pylist()
    return lines


def _choose_columns(
    export: Export, source: RowSource, give: Give, found: NumberedInput
) -> NumberedInput:
    """Returns the rows with what executors read of them: some columns, or lines of JSON."""
    if len(found.files) > 1 and source.id_column is None:
        raise ConfigError(
            "rows of several files have no numbers that name them",
            received=f"{len(found.files)} files",
            fix="name them by --id COLUMN",
        )
    columns, read = source.choose(export, give)
    if unread := [name for name in source.columns if name not in read]:
        _log.info("%s: columns that the model does not read: %s", source.place, ", ".join(unread))
    check_parts(found, source, read)
    frame = read_times(found.frame, source, columns.inputs, read)
    if source.kind == "jsonl":
        read = [name for name in (LINE, TIMES) if name in frame.columns]
    return replace(found, frame=frame.select(*map(quote_name, read)))


def check_parts(found: NumberedInput, source: RowSource, names: Iterable[str]) -> None:
    """Refuses files that lack a column which others have: Spark would read nulls."""
    if source.kind not in _WITH_COLUMNS or len(found.files) < 2:
        return

    def find_lacking(uri: str) -> list[str]:
        path = escape_path(unquote(uri))
        part = _read(found.frame.sparkSession, replace(source, paths=(path,)))
        there = {column.lower() for column in part.columns}
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


def read_times(
    frame: DataFrame, source: RowSource, inputs: Iterable[InputColumn], read: Sequence[str]
) -> DataFrame:
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
    if source.kind == "jsonl" and patterns:
        fields = ", ".join(f"{quote_name(name)} string" for name in patterns)
        row = F.from_json(LINE, fields)
        times = [_read_time(name, row[name], own).alias(name) for name, own in patterns.items()]
        return frame.withColumn(TIMES, F.struct(*times))
    types = dict(frame.dtypes)
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


def choose_rows(found: NumberedInput, part_rows: int, missing: Sequence[int]) -> DataFrame:
    """Returns the rows of some partitions, each in one of Spark's partitions and in order."""
    from pyspark.sql import functions as F

    starts = list(accumulate(found.counts, initial=0))
    placed = found.frame.withColumn(ROW, F.monotonically_increasing_id())
    own = F.col(ROW).bitwiseAND(F.lit((1 << _POSITION_BITS) - 1))
    begin = F.element_at(F.lit(starts), (F.shiftright(ROW, _POSITION_BITS) + 1).cast("int"))
    numbered = placed.withColumn(ROW, begin + own)
    wanted = numbered.withColumn(PART, F.floor(F.col(ROW) / F.lit(part_rows)))
    place = F.array_position(F.lit(list(missing)).cast("array<bigint>"), F.col(PART)) - 1
    kept = wanted.withColumn("__sluice_place", place).where(F.col("__sluice_place") >= 0)
    spread = kept.repartitionById(len(missing), F.col("__sluice_place").cast("int"))
    return spread.drop("__sluice_place").sortWithinPartitions(ROW)


def list_parts(session: SparkSession, missing: Sequence[int]) -> DataFrame:
    """Returns a row for each partition, in one of Spark's partitions each."""
    from pyspark.sql import functions as F

    place = (F.col("id") + 1).cast("int")
    parts = F.lit(list(missing)).cast("array<bigint>")
    frame = session.range(0, len(missing), 1, len(missing))
    return frame.select(F.element_at(parts, place).alias(PART))


def _bring_model(session: SparkSession, export: Export, folder: Path) -> str:
    """Returns where executors find the export; to those of other machines an archive is sent."""
    context = session.sparkContext
    if is_on_this_machine(str(context.master)):
        return str(export.path)
    archive = folder / f"sluice-{export.card['fingerprint'][:16]}.zip"
    pack_export(export, archive)
    context.addArchive(f"{archive}#{archive.stem}")
    return f"archive:{archive.stem}"


def pack_export(export: Export, archive: Path) -> None:
    """Writes what executors read of an export as a zip file."""
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as packed:
        for name in (EXPORT_FILE, *sorted(export.card["files"])):
            if name in _SHIPPED or name.partition("/")[0] in _SHIPPED:
                packed.write(export.path / name, name)


def run_parts(frame: DataFrame, job: Job, directory: str) -> None:
    """Computes the rows of a frame that has a partition of rows in each of Spark's partitions."""

    from pyspark.serializers import CPickleSerializer

    packed = CPickleSerializer().dumps(job)  # To read it is to import TensorFlow.

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import SparkFiles

        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # Tasks of a machine would share its cards.
        with quiet_tensorflow():
            job = CPickleSerializer().loads(packed)
        scheme, _, name = directory.partition(":")
        found = SparkFiles.get(name) if scheme == "archive" else directory
        yield from job.compute(found, batches)

    with input_failures():
        frame.mapInArrow(run, "part bigint, rows bigint").collect()


@contextlib.contextmanager
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

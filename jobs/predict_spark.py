"""`sluice predict --engine spark`: rows in partitions of one size, each computed by one task.

Executors have Sluice, as those of a build do, and read the export where it lies or from an archive.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
import time
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from conf.artefacts.export import EXPORT_FILE
from conf.errors import ConfigError, InputDataError
from conf.etl.sources import SourceConfig
from conf.etl.spark_session import SparkConfig
from etl.sources.parquet_files import load_parquet
from etl.sources.text_files import escape_path
from etl.sources.text_formats import has_bad_quotes
from etl.tfrecord.spark.failures import describe_failure, known_failures
from jobs.support.spark_session import build_session, check_executors, is_on_this_machine
from jobs.support.terminal import quiet_tensorflow

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, SparkSession

    from jobs.predict import Model
    from training.apply.answers import Asked
    from training.apply.export import Export
    from training.apply.parts import Job, RowSource
    from training.reader.training_data import TrainingData

_log = logging.getLogger("sluice.predict")
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
_SHIPPED = (EXPORT_FILE, "saved_model.pb", "fingerprint.pb", "variables", "assets",
            "users.parquet", "items.parquet", "embeddings/items.parquet")  # fmt: skip
_FILES_AT_ONCE = 8
_JSON_SAMPLE = 10_000
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


@dataclass(frozen=True)
class SparkRequest:
    """What is asked of a job, beside what rows get; `suffix` is the format of the files."""

    output: Path
    suffix: str | None = None
    part_rows: int = 1 << 17
    id_column: str | None = None
    list_separator: str | None = None


@dataclass(frozen=True)
class Finished:
    """What a job has done: partitions of the whole output, and those that were computed now."""

    job: Job
    computed: int
    seconds: float


def predict_in_spark(
    model: Model, asked: Asked, request: SparkRequest, rows: SparkInput | None, spark: SparkConfig
) -> Finished:
    """Runs a job in a Spark session of its own, or the submitter's."""
    export = model.export  # Wrong options are refused before Spark starts.
    job = plan_job(export, asked, request, rows, model.data)
    session = build_session(spark, "sluice predict")
    try:
        check_executors(session)
        return _run(session, export, job, rows)
    finally:
        with contextlib.suppress(Exception):
            session.stop()


def plan_job(
    export: Export,
    asked: Asked,
    request: SparkRequest,
    rows: SparkInput | None,
    data: TrainingData | None = None,
) -> Job:
    """Returns the job, without its rows."""
    from conf.artefacts.export import Give
    from training.apply.answers import Source, plan_answers
    from training.apply.parts import Job, RowSource
    from training.apply.ranker import Ranker
    from training.apply.rows import choose_items, find_users_inputs
    from training.raw_inputs.files import RawFile

    source = None
    if rows is not None:
        kind, place = rows.find_kind(), ", ".join(rows.paths)
        source = RowSource(place, kind, (), request.id_column, request.list_separator)
    told = Source(file=None if rows is None else RawFile(Path(rows.paths[0])))
    answers = plan_answers(export, asked, told)
    Ranker(export, answers.task)
    if source is None:
        find_users_inputs(export, answers)
    suffix = request.suffix or ("json.gz" if answers.give is Give.LISTS else "parquet")
    items = None
    if answers.give is Give.LISTS and (asked.candidates or data):
        items = choose_items(export, asked.candidates, data)
        if items is export.items:  # Executors have it.
            items = None
    part_rows = -(-request.part_rows // export.batch_size) * export.batch_size
    output = str(request.output.absolute())
    return Job(output, suffix, answers, source, items, part_rows)


def _run(session: SparkSession, export: Export, job: Job, rows: SparkInput | None) -> Finished:
    found, inputs = None, {}
    job = replace(job, threads=int(session.sparkContext.getConf().get("spark.task.cpus", "1")))
    if rows is None or job.source is None:
        job = replace(job, rows=int(export.card["users"]["rows"]))
    else:
        found = open_input(session, rows)
        inputs = {"format": rows.find_kind(), "options": dict(rows.options), "files": found.files}
        columns = find_columns(found, job.source)
        job = replace(job, source=replace(job.source, columns=columns), rows=sum(found.counts))
    if not job.rows:
        raise InputDataError("the input has no rows", received=job.source and job.source.place)
    frame_of = _plan_frame(session, export, job, found)
    status, missing = job.open(export, inputs), job.find_missing()
    begun = time.monotonic()
    if missing:
        _log.info("%s of %s partitions to compute", len(missing), job.parts)
        with tempfile.TemporaryDirectory() as folder:
            directory = _bring_model(session, export, Path(folder))
            run_parts(frame_of(missing), job, directory)
    elif status == "finished":
        _log.info("nothing to do: %s is finished", job.directory)
    if missing or status != "finished":
        job.finish()
    return Finished(job, len(missing), time.monotonic() - begun)


def _plan_frame(
    session: SparkSession, export: Export, job: Job, found: NumberedInput | None
) -> Any:
    """Returns what gives the rows of some partitions, a partition of Spark each."""
    from training.apply.parts import LINE, TIMES
    from training.raw_inputs.files import log_unread

    if found is None or job.source is None:
        return lambda missing: list_parts(session, missing)
    if len(found.files) > 1 and job.source.id_column is None:
        raise ConfigError(
            "rows of several files have no numbers that name them",
            received=f"{len(found.files)} files",
            fix="name them by --id COLUMN",
        )
    columns, read = job.source.choose(export, job.answers.give)
    log_unread(job.source.place, job.source.columns, read)
    check_parts(found, read)
    frame = read_times(found, columns.inputs, read)
    chosen, taken = replace(found, frame=frame), read
    if job.source.kind == "jsonl":
        taken = [name for name in (LINE, TIMES) if name in frame.columns]
    return lambda missing: choose_rows(chosen, taken, job.part_rows, missing)


def find_columns(found: NumberedInput, source: RowSource) -> tuple[str, ...]:
    """Returns the columns of an input; those of JSON are found in its first lines."""
    from training.raw_inputs.files import parse_line

    if source.kind != "jsonl":
        return found.columns
    with input_failures():
        lines = found.frame.limit(_JSON_SAMPLE).toArrow().column(0).to_pylist()
    rows = [parse_line(source.place, number, line) for number, line in enumerate(lines, 1)]
    return tuple(dict.fromkeys(name for row in rows for name in row))


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

    from training.apply.parts import LINE, TIMES

    patterns = {
        name: item.written.time
        for item in inputs
        if item.written is not None and item.written.time is not None
        for name in {item.name, item.column} & set(read)
        if item.written.time != "iso" and not item.written.time.startswith("epoch_")
    }
    frame, types = found.frame, dict(found.frame.dtypes)
    if found.source.find_kind() == "jsonl" and patterns:
        fields = ", ".join(f"`{name.replace('`', '``')}` string" for name in patterns)
        row = F.from_json(LINE, fields)
        times = [_read_time(name, row[name], own).alias(name) for name, own in patterns.items()]
        return frame.withColumn(TIMES, F.struct(*times))
    for name, pattern in patterns.items():
        if types.get(name) == "string":
            frame = frame.withColumn(name, _read_time(name, _name_column(name), pattern))
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

    from training.apply.parts import PART, ROW

    starts, total = [], 0
    for count in found.counts:
        starts.append(total)
        total += count
    position = F.monotonically_increasing_id()
    numbered = found.frame.select(*map(_name_column, read), position.alias(ROW))
    own = F.col(ROW).bitwiseAND(F.lit((1 << _POSITION_BITS) - 1))
    begin = F.element_at(F.lit(starts), _to_int(F.shiftright(ROW, _POSITION_BITS) + 1))
    numbered = numbered.withColumn(ROW, begin + own)
    part = F.floor(F.col(ROW) / F.lit(part_rows))
    place = F.array_position(F.lit(list(missing)).cast("array<bigint>"), F.col(PART)) - 1
    wanted = numbered.withColumn(PART, part).withColumn("__sluice_place", place)
    placed = wanted.where(F.col("__sluice_place") >= 0)
    spread = placed.repartitionById(len(missing), _to_int(F.col("__sluice_place")))
    return spread.drop("__sluice_place").sortWithinPartitions(ROW)


def _name_column(name: str) -> Column:
    from pyspark.sql import functions as F

    return F.col("`" + name.replace("`", "``") + "`")


def _to_int(value: Column) -> Column:
    return value.cast("int")


def list_parts(session: SparkSession, missing: Sequence[int]) -> DataFrame:
    """Returns a row for each partition, in one of Spark's partitions each."""
    from pyspark.sql import functions as F

    from training.apply.parts import PART

    place = _to_int(F.col("id") + 1)
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

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return _compute(job, directory, batches)

    with input_failures():
        frame.mapInArrow(run, "part bigint, rows bigint").collect()


def _compute(
    job: Job, directory: str, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    from itertools import chain

    from pyspark import SparkFiles

    filled = (batch for batch in batches if batch.num_rows)
    if (first := next(filled, None)) is None:
        return
    with quiet_tensorflow():
        from training.apply.parts import compute_part

    scheme, _, name = directory.partition(":")
    found = SparkFiles.get(name) if scheme == "archive" else directory
    yield from compute_part(job, found, chain([first], filled))


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

"""`sluice predict --engine spark`: rows in partitions of one size, each computed by one task.

Executors have Sluice, as those of a build do, and read the export where it lies or from an archive.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.artefacts.export import EXPORT_FILE, LINE, TIMES, Give
from conf.errors import ConfigError, InputDataError
from conf.etl.spark_session import SparkConfig
from jobs.predict_inputs import (
    NumberedInput,
    SparkInput,
    check_parts,
    choose_rows,
    input_failures,
    list_parts,
    open_input,
    read_times,
)
from jobs.support.spark_session import build_session, check_executors, is_on_this_machine
from jobs.support.terminal import quiet_tensorflow

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from jobs.predict import Model
    from training.apply.answers import Asked
    from training.apply.export import Export
    from training.apply.parts import Job, RowSource
    from training.reader.training_data import TrainingData

_log = logging.getLogger("sluice.predict")
_SHIPPED = (EXPORT_FILE, "saved_model.pb", "fingerprint.pb", "variables", "assets",
            "users.parquet", "items.parquet", "embeddings/items.parquet")  # fmt: skip


_JSON_SAMPLE = 10_000


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

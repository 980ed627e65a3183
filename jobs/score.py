"""`sluice score`: an exported model over rows in Spark, past one machine.

Executors need TensorFlow, NumPy and PyArrow; Sluice is not installed there. What is written is
what `sluice predict` writes, a file per partition; a killed job goes on with those that lack one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conf.artefacts.export import Give
from conf.errors import ConfigError
from conf.etl.spark_session import SparkConfig
from conf.local_paths import local_path
from jobs.support.spark_scoring import (
    Names,
    NumberedInput,
    SparkInput,
    check_parts,
    choose_rows,
    list_parts,
    open_input,
    run_scoring,
    ship,
)
from jobs.support.spark_session import build_session
from jobs.support.terminal import (
    DeclaredSeparator,
    IdColumn,
    ListLength,
    LogFormat,
    LogFormatOption,
    quiet_tensorflow,
    setup_logging,
    show_progress,
)
from jobs.support.trained_run import override_section

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from training.scoring.executor import RowSource, ScoringTask
    from training.scoring.plan import Exported, Job, ScoringRequest

app = typer.Typer(add_completion=False)
_log = logging.getLogger("sluice.score")
APP_NAME = "sluice score"
WATCH_SECONDS = 2.0


class RowFormat(StrEnum):
    """Formats of lists and scores."""

    PARQUET = "parquet"
    JSON = "json"
    JSON_LINES = "jsonl"
    PACKED_JSON = "json.gz"
    PACKED_JSON_LINES = "jsonl.gz"


@dataclass(frozen=True)
class Finished:
    """What a job has done.

    Attributes:
        directory: Its output.
        gives: `scores`, `lists` or `embeddings`.
        rows: Rows of the whole output.
        parts: Partitions of the whole output.
        computed: Partitions that were computed now.
        seconds: How long these took.
    """

    directory: Path
    gives: str
    rows: int
    parts: int
    computed: int
    seconds: float


@app.command()
def main(
    model: Annotated[str, typer.Option(help="An exported model, or one of its versions.")],
    to: Annotated[str, typer.Option(help="Output directory, which all executors see.")],
    source: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            help="Rows of raw values; repeat for several. Default: all users of the export.",
        ),
    ] = None,
    kind: Annotated[
        str | None, typer.Option("--format", help="Format of the input; default: by its name.")
    ] = None,
    options: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="KEY=VALUE", help="Option of Spark's reader."),
    ] = None,
    id_column: IdColumn = None,
    list_separator: DeclaredSeparator = None,
    give: Annotated[
        Give | None,
        typer.Option(help="What a row gets; default: scores by a ranking model, else a list."),
    ] = None,
    k: ListLength = None,
    task: Annotated[
        str | None, typer.Option(help="Task of a ranking model whose score ranks.")
    ] = None,
    candidates: Annotated[
        Path | None,
        typer.Option(parser=local_path, help="Items to rank: a file with their raw ids."),
    ] = None,
    keep_seen: Annotated[
        bool, typer.Option("--keep-seen", help="Keep items in a list that the user has met.")
    ] = False,
    written_as: Annotated[
        RowFormat | None,
        typer.Option("--as", help="Format of the files; default: json.gz of lists, else parquet."),
    ] = None,
    part_rows: Annotated[
        int, typer.Option(min=1, help="Rows per partition, rounded up to whole batches.")
    ] = 1 << 17,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key of `spark`."),
    ] = None,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> int:
    """Write scores, ranked lists or embeddings of rows, by Spark."""
    from training.export.stored_models import bring_version, find_place

    setup_logging(log_format)
    spark = override_section("spark", SparkConfig(), overrides or ())
    rows = _read_input(source, kind, options, id_column)
    version = bring_version(find_place(model))
    place = None if rows is None else _describe_rows(rows, id_column, list_separator)
    with quiet_tensorflow():
        from training.scoring.plan import ScoringRequest

    request = ScoringRequest(local_path(to), give, place, k, task, candidates, keep_seen,
                             written_as and str(written_as), part_rows)  # fmt: skip
    done = score(version, request, rows, spark)
    print_summary(done, log_format)
    return 0


def _read_input(
    paths: Sequence[str] | None,
    kind: str | None,
    options: Sequence[str] | None,
    id_column: str | None,
) -> SparkInput | None:
    pairs = [option.partition("=") for option in options or ()]
    wrong = [key for key, equals, _ in pairs if not equals]
    if wrong:
        raise ConfigError("an option of the reader has a value", received=wrong[0],
                          allowed="KEY=VALUE")  # fmt: skip
    if paths:
        return SparkInput(tuple(paths), kind, {key.strip(): value for key, _, value in pairs})
    if id_column is not None or kind is not None or options:
        raise ConfigError("--id, --format and --option are about rows", fix="add --input PATH")
    return None


def _describe_rows(
    rows: SparkInput, id_column: str | None, list_separator: str | None
) -> RowSource:
    with quiet_tensorflow():
        from training.scoring.executor import RowSource

    kind = rows.find_kind()
    return RowSource(
        ", ".join(rows.paths),
        id_column=id_column,
        list_separator=list_separator if kind in ("csv", "tsv") else None,
        is_delimited=kind in ("csv", "tsv"),
        is_json=kind == "jsonl",
    )


def score(
    version: Path, request: ScoringRequest, rows: SparkInput | None, spark: SparkConfig
) -> Finished:
    """Runs a job in a Spark session of its own, or the submitter's.

    Args:
        version: A version of an exported model.
        request: What is asked of it.
        rows: The input that `request.source` is about.
        spark: The session, where it is started here.

    Raises:
        ConfigError: Options do not fit, or the output directory holds something else.
        InputDataError: A row is refused, or the input is missing or damaged.
    """
    from training.scoring.plan import plan_task, read_export

    exported = read_export(version)
    task = plan_task(exported, request)  # Wrong options are refused before Spark starts.
    session = build_session(spark, APP_NAME)
    try:
        return _run(session, exported, task, rows)
    finally:
        with contextlib.suppress(Exception):
            session.stop()


def _run(
    session: SparkSession, exported: Exported, task: ScoringTask, rows: SparkInput | None
) -> Finished:
    from training.scoring.plan import build_job, count_users, set_rows

    threads = int(session.sparkContext.getConf().get("spark.task.cpus", "1") or 1)
    found = None if rows is None else open_input(session, rows)
    if rows is None or found is None:
        task, inputs = set_rows(task, count_users(exported)), {}
    else:
        task = _fit_columns(task, found)
        inputs = {"format": rows.find_kind(), "options": dict(rows.options), "files": found.files}
        task = set_rows(task, sum(found.counts))
    job = build_job(exported, replace(task, threads=threads), inputs)
    status, missing = job.open(), job.find_missing()
    begun = time.monotonic()
    if missing:
        _log.info("%s of %s partitions to compute", len(missing), job.task.parts)
        frame = _choose(session, job, found, missing)
        with tempfile.TemporaryDirectory() as folder, _watched(job, len(missing)):
            _compute(exported, job, frame, Path(folder))
    elif status == "finished":
        _log.info("nothing to do: %s is finished", job.directory)
    if missing or status != "finished":
        job.finish()
    seconds = time.monotonic() - begun
    return Finished(job.directory, task.gives, task.rows, task.parts, len(missing), seconds)


def _fit_columns(task: ScoringTask, found: NumberedInput) -> ScoringTask:
    """Returns the task with the columns of the input.

    Raises:
        ConfigError: Rows of several files have no ids.
        InputDataError: A column is missing, or missing in one of the files.
    """
    from training.raw_inputs.files import log_unread, parse_line
    from training.scoring.executor import choose_columns

    if len(found.files) > 1 and task.source.id_column is None:
        raise ConfigError(
            "rows of several files have no numbers that name them",
            received=f"{len(found.files)} files",
            fix="name them by --id COLUMN",
        )
    columns = found.columns
    if task.source.is_json:
        lines = enumerate(found.first_lines, 1)
        rows = [parse_line(task.source.place, number, line) for number, line in lines]
        columns = tuple(dict.fromkeys(name for row in rows for name in row))
    task = replace(task, source=replace(task.source, columns=columns))
    _, read = choose_columns(task)
    log_unread(task.source.place, columns, read)
    check_parts(found, read)
    return task


def _choose(
    session: SparkSession, job: Job, found: NumberedInput | None, missing: Sequence[int]
) -> DataFrame:
    from training.scoring.executor import LINE, PART, ROW, choose_columns

    if found is None:
        return list_parts(session, PART, missing)
    _, read = choose_columns(job.task)
    names = Names(PART, ROW, (LINE,) if job.task.source.is_json else tuple(read))
    return choose_rows(found, names, job.task.part_rows, missing)


def _compute(exported: Exported, job: Job, frame: DataFrame, folder: Path) -> None:
    from training.scoring.executor import score_partition
    from training.scoring.plan import pack_model

    model = folder / f"sluice-{exported.card['fingerprint'][:16]}.zip"
    pack_model(exported, job.task, model)
    run_scoring(frame, ship(partial(score_partition, job.task)), model)


@contextlib.contextmanager
def _watched(job: Job, total: int) -> Iterator[None]:
    """Shows how many partitions are done."""
    ended = threading.Event()

    def watch(advance: Any) -> None:
        left = total
        while not ended.wait(WATCH_SECONDS):
            now = len(job.find_missing())
            advance(left - now)
            left = now

    with show_progress(total) as advance:
        thread = threading.Thread(target=watch, args=(advance,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def print_summary(done: Finished, log_format: LogFormat) -> None:
    """Prints what was computed, and where it is."""
    if log_format is LogFormat.JSON:
        counts = {"rows": done.rows, "partitions": done.parts, "computed": done.computed}
        print(json.dumps({done.gives: str(done.directory), **counts}))
        return
    if not done.computed:
        print(f"nothing to do: {done.rows:,} rows in {done.parts:,} partitions are finished")
    else:
        before = done.parts - done.computed
        there = f", {before:,} were there" if before else ""
        print(f"{done.rows:,} rows in {done.parts:,} partitions{there}; {done.seconds:.1f} s")
    print(f"{done.gives}: {done.directory}")


if __name__ == "__main__":
    from jobs.support.run_app import run_app

    raise SystemExit(run_app(app))

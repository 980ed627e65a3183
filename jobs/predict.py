"""`sluice predict`: ranked lists, scores and vectors of rows, by a run or an exported model.

Rows are those of a run's dataset, of the users of an export, or of files. On one machine a file is
written, by Spark one for each partition; both hold the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from pydantic import Field

from conf.artefacts.export import Give
from conf.artefacts.run import RECOMMENDATIONS_FILE, SCORES_FILE, update_run_card
from conf.config_base import Strict
from conf.errors import ConfigError
from conf.etl.spark_session import SparkSettings
from conf.load import load_config
from conf.local_paths import local_path
from jobs.support.terminal import (
    DeclaredSeparator,
    IdColumn,
    ListLength,
    LogFormat,
    LogFormatOption,
    quiet_tensorflow,
    setup_logging,
)
from jobs.support.trained_run import CheckpointChoice, CheckpointOption, timed

if TYPE_CHECKING:
    from training.apply.answers import Asked, Source
    from training.apply.export import Export
    from training.apply.parts import Job
    from training.apply.predict import Predicted
    from training.reader.training_data import TrainingData

app = typer.Typer(add_completion=False)


class _Spark(Strict):
    spark: SparkSettings = Field(default_factory=dict)


class AsOf(StrEnum):
    """The split at whose end users are ranked."""

    TRAIN = "train"
    VALIDATION = "validation"
    TEST = "test"


class Engine(StrEnum):
    """Where rows are computed."""

    LOCAL = "local"
    SPARK = "spark"


class RowFormat(StrEnum):
    """Formats of the files that Spark writes."""

    PARQUET = "parquet"
    JSON = "json"
    JSON_LINES = "jsonl"
    PACKED_JSON = "json.gz"
    PACKED_JSON_LINES = "jsonl.gz"


@app.command()
def main(
    run: Annotated[
        str | None, typer.Option(help="A run, or a series: its last finished run.")
    ] = None,
    export: Annotated[
        str | None, typer.Option(help="An exported model, or one of its versions; also in a store.")
    ] = None,
    source: Annotated[
        list[str] | None,
        typer.Option("--input", help="Rows of raw values; with --engine spark several."),
    ] = None,
    id_column: IdColumn = None,
    list_separator: DeclaredSeparator = None,
    split: Annotated[str | None, typer.Option(help="Rows of a split of the run's dataset.")] = None,
    as_of: Annotated[
        AsOf | None,
        typer.Option(help="Users as things stood at the end of this split; default: now."),
    ] = None,
    users: Annotated[
        Path | None,
        typer.Option(parser=local_path, help="Users that get lists: a file with their raw ids."),
    ] = None,
    candidates: Annotated[
        Path | None,
        typer.Option(
            parser=local_path, help="Items to rank: a file with their raw ids, or all their inputs."
        ),
    ] = None,
    give: Annotated[
        Give | None, typer.Option(help="What a row gets; default: what fits model and rows.")
    ] = None,
    k: ListLength = None,
    task: Annotated[
        str | None, typer.Option(help="Task of a ranking model whose score ranks.")
    ] = None,
    keep_seen: Annotated[
        bool, typer.Option("--keep-seen", help="Keep items in a list that the user has met.")
    ] = False,
    to: Annotated[
        Path | None,
        typer.Option(
            parser=local_path, help="File to write, default: in the run; of Spark a directory."
        ),
    ] = None,
    checkpoint: CheckpointOption = CheckpointChoice.BEST,
    engine: Annotated[Engine, typer.Option(help="Spark: past one machine.")] = Engine.LOCAL,
    kind: Annotated[
        str | None, typer.Option("--format", help="Of Spark: format of the input.")
    ] = None,
    options: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="KEY=VALUE", help="Option of Spark's reader."),
    ] = None,
    written_as: Annotated[
        RowFormat | None,
        typer.Option("--as", help="Of Spark: format of the files; default: json.gz or parquet."),
    ] = None,
    part_rows: Annotated[
        int, typer.Option(min=1, help="Of Spark: rows per file, rounded up to whole batches.")
    ] = 1 << 17,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key of `spark`."),
    ] = None,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> int:
    """Write ranked lists, scores or vectors of rows."""
    setup_logging(log_format)
    spark = load_config(_Spark, "training", None, overrides or ()).spark
    if (run is None) == (export is None):
        raise ConfigError("one model predicts", fix="give --run or --export")
    _refuse_two_sources({"--input": source, "--split": split, "--as-of": as_of, "--users": users})
    if not source and (id_column or kind or options):
        raise ConfigError("--id, --format and --option are about rows", fix="add --input PATH")
    with quiet_tensorflow():
        from training.apply.answers import Asked, Source
        from training.raw_inputs.files import RawFile

    def read(path: Path | None, name: str | None = None) -> RawFile | None:
        return None if path is None else RawFile(path, name, list_separator)

    asked = Asked(give, k, task, read(candidates), keep_seen)
    if engine is Engine.SPARK:
        from jobs.predict_spark import find_kind, run_job
        from training.apply.parts import RowSource, plan_job

        if to is None or split or as_of or users:
            raise ConfigError(
                "Spark predicts the rows of --input, or the users of an export, into a directory",
                fix="give --to DIR, and leave --split, --as-of and --users out",
            )
        rows = None
        if source:
            found, given = find_kind(source, kind), _parse_options(options)
            rows = RowSource(tuple(source), found, id_column, list_separator, given)
        model = open_model(run, export, checkpoint)
        suffix = None if written_as is None else str(written_as)
        job = plan_job(model.export, asked, rows, to, suffix, part_rows, model.data)
        print_job(*run_job(model.export, job, spark), log_format)
        return 0
    if len(source or ()) > 1 or kind or options or written_as or overrides:
        raise ConfigError("several inputs, --format, --option, --as and --set are of Spark",
                          fix="leave them out, or add --engine spark")  # fmt: skip
    file = read(local_path(source[0]), id_column) if source else None
    wanted = Source(split, as_of and str(as_of), read(users), file)
    model = open_model(run, export, checkpoint)
    print_done(*write(model, wanted, asked, to), log_format)
    return 0


def _refuse_two_sources(named: Mapping[str, Any]) -> None:
    """Refuses options that each say which rows are meant; --users goes with --as-of alone."""
    given = [option for option, value in named.items() if value]
    if len(given) > 1 and given != ["--as-of", "--users"]:
        raise ConfigError("these options both say which rows are meant",
                          received=" ".join(given), fix="leave one of them out")  # fmt: skip


def _parse_options(options: Sequence[str] | None) -> dict[str, str]:
    pairs = [option.partition("=") for option in options or ()]
    if wrong := [key for key, equals, _ in pairs if not equals]:
        raise ConfigError("an option of the reader has a value", received=wrong[0],
                          allowed="KEY=VALUE")  # fmt: skip
    return {key.strip(): value for key, _, value in pairs}


@dataclass(frozen=True)
class Model:
    """A model, and of a run what it was trained on; None: only its export is known."""

    export: Export
    checkpoint: str
    run_dir: Path | None = None
    data: TrainingData | None = None


def open_model(
    run: str | Path | None, export: str | None = None, checkpoint: str = CheckpointChoice.BEST
) -> Model:
    """Opens the export of a run's checkpoint, or a version in its place."""
    from training.checkpoint.stored_runs import find_run

    run_dir = None if run is None else find_run(run)  # Said before TensorFlow starts.
    with quiet_tensorflow():
        from training.apply.export import Export
        from training.apply.predict import find_export, read_data
        from training.export.stored_models import bring_export

    if run_dir is None:
        return Model(Export(bring_export(str(export))), checkpoint)
    which: Literal["best", "last"] = "last" if checkpoint == CheckpointChoice.LAST else "best"
    return Model(Export(find_export(run_dir, which)), which, run_dir, read_data(run_dir))


def predict(
    run: str | Path,
    source: Source | None = None,
    asked: Asked | None = None,
    *,
    to: Path | None = None,
    checkpoint: str = CheckpointChoice.BEST,
) -> tuple[Give, Path]:
    """Writes what rows get of a run's model, as the command does; returns that, and the file."""
    from training.apply.answers import Asked, Source

    return write(open_model(run, None, checkpoint), source or Source(), asked or Asked(), to)


def write(model: Model, source: Source, asked: Asked, to: Path | None) -> tuple[Give, Path]:
    """Writes what rows get, of a run also into its card."""
    from training.apply.answers import plan_answers
    from training.apply.predict import predict_rows

    if model.run_dir is None:
        if to is None:
            raise ConfigError("an export holds no predictions", fix="give --to FILE")
        return predict_rows(model.export, source, asked, to).answers.give, to
    names = {Give.LISTS: RECOMMENDATIONS_FILE, Give.SCORES: SCORES_FILE}
    with timed(model.run_dir, "predict"):
        give = plan_answers(model.export, asked, source).give
        target = to or model.run_dir / names.get(give, f"{give}.parquet")
        done = predict_rows(model.export, source, asked, target, model.data)
        update_run_card(model.run_dir, **_describe(done, asked, target, model.checkpoint))
    return give, target


def _describe(done: Predicted, asked: Asked, target: Path, checkpoint: str) -> dict[str, Any]:
    """What the run card says; values of None take away what an earlier command has left."""
    answers, source = done.answers, done.source
    common = {
        "split": source.split,
        "input": source.file and str(source.file.path),
        "checkpoint": checkpoint,
    }
    if answers.give is not Give.LISTS:
        return {str(answers.give): {"rows": done.rows, **common}}
    lists = {
        "users": done.rows,
        "users_outside_vocabulary": done.left_out,
        "file": str(target.absolute()),
        "k": answers.k,
        "mask_seen": answers.mask_seen,
        "as_of": source.as_of,
        "only_users": source.users and str(source.users.path),
        "candidates": asked.candidates and str(asked.candidates.path),
    }
    return {"recommendations": {**lists, **common}}


def print_done(give: Give, target: Path, log_format: LogFormat) -> None:
    """Prints where the file is, and the first lists."""
    from training.evaluation.prediction_files import read_entries

    if log_format is LogFormat.JSON:
        print(json.dumps({"recommendations" if give is Give.LISTS else str(give): str(target)}))
        return
    if give is Give.LISTS:
        print("first lists:")
        for _, entry in islice(read_entries(target), 3):
            print(f"  {json.dumps(entry, ensure_ascii=False)[:120]} …")
    print(f"{give}: {target}")


def print_job(job: Job, computed: int, seconds: float, log_format: LogFormat) -> None:
    """Prints what was computed, and where it is."""
    if log_format is LogFormat.JSON:
        counts = {"rows": job.rows, "partitions": job.parts, "computed": computed}
        print(json.dumps({str(job.answers.give): str(job.output), **counts}))
        return
    print(f"{job.rows:,} rows in {job.parts:,} partitions, {computed:,} computed now; "
          f"{seconds:.1f} s")  # fmt: skip
    print(f"{job.answers.give}: {job.output}")


if __name__ == "__main__":
    from jobs.support.run_app import run_app

    raise SystemExit(run_app(app))

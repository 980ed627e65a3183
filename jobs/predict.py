"""`sluice predict`: ranked lists of items, and scores of rows.

Lists are of every user by a retrieval model, of the candidates of a split's rows (or the whole
catalogue) by a ranking model, or of the rows of a file; of the catalogue or of the candidates of a
file. Scores are of the rows of a split by any model, or of a file by a ranking model. Both are
written as Parquet or as JSON lines, as the file's name says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conf.artefacts.export import Give
from conf.artefacts.run import SCORES_FILE, update_run_card
from conf.errors import ConfigError
from conf.local_paths import local_path
from conf.splits import TEST
from jobs.support.terminal import (
    DeclaredSeparator,
    IdColumn,
    ListLength,
    LogFormat,
    LogFormatOption,
    setup_logging,
)
from jobs.support.trained_run import (
    CheckpointChoice,
    CheckpointOption,
    RunOption,
    override_section,
    restore_run,
    timed,
)
from training.prediction.result_files import ROW_FORMATS, check_format
from training.raw_inputs.files import RawFile

if TYPE_CHECKING:
    from training.checkpoint.restore import TrainedModel

app = typer.Typer(add_completion=False)


class AsOf(StrEnum):
    """The split at whose end users are ranked."""

    TRAIN = "train"
    VALIDATION = "validation"
    TEST = "test"


@dataclass(frozen=True)
class RowsToPredict:
    """Rows that are ranked or scored, and the file that is written.

    Attributes:
        split: Rows of a split; None: those of the users, or of `test`.
        as_of: Every user as things stood at the end of this split instead.
        file: Rows of a file instead.
        users: File of the users that get lists; None: all.
        candidates: File of the items that are ranked; None: the catalogue.
        output: File to write; None: in the run.
        lists: Whether rows of a split or file get lists instead of scores.
    """

    split: str | None = None
    as_of: str | None = None
    file: RawFile | None = None
    users: RawFile | None = None
    candidates: RawFile | None = None
    output: Path | None = None
    lists: bool = False

    @property
    def asks_for_lists(self) -> bool:
        """Whether an option is about lists alone."""
        given = (self.as_of, self.users, self.candidates)
        return self.lists or any(value is not None for value in given)


@app.command()
def main(
    run: RunOption,
    k: ListLength = None,
    as_of: Annotated[
        AsOf | None,
        typer.Option(help="Rank users as things stood at the end of this split; default: now."),
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
    source: Annotated[
        Path | None,
        typer.Option(
            "--input", parser=local_path, help="Rows of raw values: .csv, .jsonl or .parquet."
        ),
    ] = None,
    id_column: IdColumn = None,
    list_separator: DeclaredSeparator = None,
    lists: Annotated[
        bool, typer.Option("--lists", help="A list for each row of the split or input, no score.")
    ] = False,
    split: Annotated[
        str | None, typer.Option(help="Split whose rows are scored; with --lists, ranked.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            parser=local_path, help=f"File to write: {', '.join(ROW_FORMATS)}; default: in the run."
        ),
    ] = None,
    checkpoint: CheckpointOption = CheckpointChoice.BEST,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key of `predict`."),
    ] = None,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> int:
    """Write the best items for every user of the vocabulary, or the scores of rows."""
    setup_logging(log_format)
    settings = [*(overrides or ()), *([] if k is None else [f"predict.k={k}"])]
    if source is None and id_column is not None:
        raise ConfigError("--id is about the rows of a file", fix="add --input FILE")
    if lists and source is None and split is None:
        raise ConfigError(
            "--lists is about the rows of a split or a file",
            fix="add --split NAME or --input FILE, or leave it out: users get lists anyway",
        )

    def read(path: Path | None, name: str | None = None) -> RawFile | None:
        return None if path is None else RawFile(path, name, list_separator)

    rows = RowsToPredict(
        split, as_of, read(source, id_column), read(users), read(candidates), output, lists
    )
    _refuse_two_sources(rows)
    kind, target = predict(run, rows, checkpoint=checkpoint, overrides=settings)
    if log_format is LogFormat.JSON:
        print(json.dumps({kind: str(target)}))
    elif kind == SCORES:
        print(f"scores: {target}")
    else:
        print_sample(target)
    return 0


SCORES, LISTS = "scores", "recommendations"


def predict(
    run_dir: str | Path,
    rows: RowsToPredict | None = None,
    *,
    checkpoint: str = CheckpointChoice.BEST,
    overrides: Sequence[str] = (),
) -> tuple[str, Path]:
    """Writes the lists or the scores of a run; an earlier file is replaced whole.

    Args:
        run_dir: A run's directory, or a series' (its last finished run).
        rows: The rows and the file; None: those of the users, in the run.
        checkpoint: `best` or `last`.
        overrides: `predict.key=value` each.

    Returns:
        `recommendations` or `scores`, and the file.

    Raises:
        ConfigError: An override does not fit, or the dataset does not carry seen items.
        UpstreamNotReadyError: There is no such run or checkpoint.
        InputDataError: The run's data or checkpoint is damaged, or a row of the input is refused.
    """
    rows = rows or RowsToPredict()
    trained = restore_run(run_dir, checkpoint)
    section = override_section("predict", trained.config.predict, overrides)
    give = _plan_answers(trained, rows, section.task, overrides)
    if rows.output is not None:
        check_format(rows.output)
    with timed(trained.run_dir, "predict"):
        kind, target, card = (
            _write_scores(trained, rows)
            if give is Give.SCORES
            else _write_lists(trained, rows, section)
        )
        update_run_card(trained.run_dir, **{kind: {**card, "checkpoint": str(checkpoint)}})
    return kind, target


def _refuse_two_sources(rows: RowsToPredict) -> None:
    """Refuses options that each say which rows are ranked."""
    named = {"--input": rows.file, "--split": rows.split, "--as-of": rows.as_of}
    given = [option for option, value in named.items() if value is not None]
    if len(given) > 1 or (rows.users is not None and (rows.file or rows.split)):
        raise ConfigError(
            "these options both say which rows get lists",
            received=" ".join(given if rows.users is None else [*given, "--users"]),
            fix="leave one of them out; --users goes with --as-of alone",
        )


def _plan_answers(
    trained: TrainedModel, rows: RowsToPredict, task: str | None, overrides: Sequence[str]
) -> Give:
    """Returns whether rows get lists or scores.

    Raises:
        ConfigError: The model cannot give it, or an option would be ignored.
    """
    from training.prediction.answer_plan import Answerer, Asked, plan_answers
    from training.reader.feature_columns import ROLE_OF_SPLIT

    model = Answerer(
        trained.config.model.kind == "ranking", has_items=trained.manifest.keys.item is not None
    )
    asked = Asked(
        for_lists=rows.asks_for_lists,
        has_rows=rows.file is not None,
        holds_items=rows.split is not None and rows.split not in ROLE_OF_SPLIT,
        task=task,
        list_options=tuple(f"--set {one}" for one in overrides),
    )
    return plan_answers(model, asked)


def _write_scores(
    trained: TrainedModel, rows: RowsToPredict
) -> tuple[str, Path, Mapping[str, Any]]:
    from training.prediction.scores import write_scores

    split = rows.split or TEST
    target = rows.output or trained.run_dir / SCORES_FILE
    count = write_scores(trained, target, split, rows.file)
    return SCORES, target, {"rows": count, **_describe_source(rows, split)}


def _write_lists(
    trained: TrainedModel, rows: RowsToPredict, section: Any
) -> tuple[str, Path, Mapping[str, Any]]:
    from training.prediction.predict import write_recommendations
    from training.prediction.rows_to_rank import ListSource

    source = ListSource(rows.split, rows.as_of, rows.file, rows.users).resolve(trained)
    target, counts = write_recommendations(
        trained, section.k, section.mask_seen, source,
        task=section.task, candidates=rows.candidates, target=rows.output,
    )  # fmt: skip
    card = {
        "users": counts.users,
        "users_outside_vocabulary": counts.users_outside_vocabulary,
        "file": str(target.absolute()),
        "k": section.k,
        "mask_seen": section.mask_seen,
    }
    # Those that are None take away what an earlier command has left.
    others = {
        "split": source.split,
        "as_of": source.as_of and str(source.as_of),
        "input": source.file and str(source.file.path),
        "only_users": source.users and str(source.users.path),
        "candidates": rows.candidates and str(rows.candidates.path),
    }
    return LISTS, target, card | others


def _describe_source(rows: RowsToPredict, split: str) -> dict[str, str | None]:
    """What scores are of; None takes away what an earlier command has left."""
    if rows.file is None:
        return {"split": split, "input": None}
    return {"split": None, "input": str(rows.file.path)}


_SHOWN_USERS, _SHOWN_ITEMS = 3, 10


def print_sample(target: Path) -> None:
    """Prints the first lists, and where all of them are."""
    from rich.console import Console
    from rich.table import Table

    from training.evaluation.prediction_files import read_entries

    rows = [entry for _, entry in islice(read_entries(target), _SHOWN_USERS)]
    table = Table(title="first lists", title_justify="left")
    key = next(iter(rows[0])) if rows else "user"
    table.add_column(key)
    table.add_column("items, best first")
    for row in rows:
        more = " …" if len(row["items"]) > _SHOWN_ITEMS else ""
        table.add_row(str(row[key]), " ".join(map(str, row["items"][:_SHOWN_ITEMS])) + more)
    console = Console(highlight=False, markup=False)
    console.print(table)
    console.print(f"lists: {target}", soft_wrap=True)


if __name__ == "__main__":
    from jobs.support.run_app import run_app

    raise SystemExit(run_app(app))

"""`sluice predict`: top-k lists for every user, as gzip'ed JSON lines."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from conf.run import update_run_card
from jobs.support.terminal import LogFormat, LogFormatOption, setup_logging
from jobs.support.trained_run import CheckpointChoice, override_section, restore_run, timed

app = typer.Typer(add_completion=False)


@app.command()
def main(
    run: Annotated[str, typer.Option(help="A run, or a series: its last finished run.")],
    k: Annotated[
        int | None, typer.Option(min=1, help="Items per user; default: the run's predict.k.")
    ] = None,
    checkpoint: Annotated[
        CheckpointChoice, typer.Option(help="The best epoch's weights, or the last one's.")
    ] = CheckpointChoice.BEST,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key of `predict`."),
    ] = None,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> int:
    """Write the best items for every user, best first, without those already met."""
    setup_logging(log_format)
    settings = [*(overrides or ()), *([] if k is None else [f"predict.k={k}"])]
    target = predict(Path(run), checkpoint=checkpoint, overrides=settings)
    if log_format is LogFormat.JSON:
        print(json.dumps({"recommendations": str(target)}))
    else:
        print_sample(target)
    return 0


def predict(
    run_dir: Path, *, checkpoint: str = CheckpointChoice.BEST, overrides: Sequence[str] = ()
) -> Path:
    """Writes `recommendations.json.gz` of a run; an earlier file is replaced whole.

    Args:
        run_dir: A run's directory, or a series' (its last finished run).
        checkpoint: `best` or `last`.
        overrides: `predict.key=value` each.

    Returns:
        The file.

    Raises:
        ConfigError: An override does not fit, or the dataset does not carry seen items.
        UpstreamNotReadyError: There is no such run or checkpoint.
        InputDataError: The run's data or checkpoint is damaged.
    """
    trained = restore_run(run_dir, checkpoint)
    from training.export.predict import write_recommendations

    section = override_section("predict", trained.config.predict, overrides)
    with timed(trained.run_dir, "predict"):
        target, counts = write_recommendations(trained, section.k, section.mask_seen)
        update_run_card(
            trained.run_dir,
            recommendations={
                "users": counts.users,
                "users_outside_vocabulary": counts.users_outside_vocabulary,
                "k": section.k,
                "mask_seen": section.mask_seen,
                "checkpoint": str(checkpoint),
            },
        )
    return target


def print_sample(target: Path, users: int = 3, items: int = 10) -> None:
    """Prints the first lists, and where all of them are."""
    from rich.console import Console
    from rich.table import Table

    with gzip.open(target, "rt", encoding="utf-8") as lines:
        rows: list[dict[str, Any]] = [json.loads(line) for line in islice(lines, users)]
    table = Table(title="first lists", title_justify="left")
    table.add_column("user")
    table.add_column("items, best first")
    for row in rows:
        more = " …" if len(row["items"]) > items else ""
        table.add_row(str(row["user"]), " ".join(map(str, row["items"][:items])) + more)
    console = Console(highlight=False, markup=False)
    console.print(table)
    console.print(f"lists: {target}", soft_wrap=True)


if __name__ == "__main__":
    from jobs.cli import run_app

    raise SystemExit(run_app(app))

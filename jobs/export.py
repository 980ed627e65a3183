"""`sluice export`: SavedModels and embeddings of a trained run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from conf.run import read_json
from jobs.support.terminal import LogFormat, LogFormatOption, setup_logging
from jobs.support.trained_run import CheckpointChoice, restore_run, timed

app = typer.Typer(add_completion=False)


@app.command()
def main(
    run: Annotated[str, typer.Option(help="A run, or a series: its last finished run.")],
    checkpoint: Annotated[
        CheckpointChoice, typer.Option(help="The best epoch's weights, or the last one's.")
    ] = CheckpointChoice.BEST,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> int:
    """Write SavedModels with raw inputs, and all embeddings as Parquet and text."""
    setup_logging(log_format)
    target = export(Path(run), checkpoint=checkpoint)
    if log_format is LogFormat.JSON:
        print(json.dumps({"export": str(target)}))
    else:
        print_summary(target)
    return 0


def export(run_dir: Path, *, checkpoint: str = CheckpointChoice.BEST) -> Path:
    """Writes `export/` of a run; an earlier export is replaced when the new one is complete.

    Args:
        run_dir: A run's directory, or a series' (its last finished run).
        checkpoint: `best` or `last`.

    Returns:
        Directory of the export.

    Raises:
        UpstreamNotReadyError: There is no such run or checkpoint, or it is being exported now.
        InputDataError: The run's data or checkpoint is damaged.
    """
    trained = restore_run(run_dir, checkpoint)
    from training.export.saved_model import write_export

    with timed(trained.run_dir, "export"):
        return write_export(trained)


def print_summary(target: Path) -> None:
    """Prints what was written, and where."""
    from rich.console import Console

    card = read_json(target / "export.json")
    embeddings = card["embeddings"]
    total_bytes = sum(info["bytes"] for info in card["files"].values())
    console = Console(highlight=False)
    console.print(
        f"{card['model']}, {embeddings['dim']} dimensions: {embeddings['items']['rows']:,} items, "
        f"{embeddings['users']['rows']:,} users, {total_bytes / 1e6:.1f} MB"
    )
    unknown = embeddings["users"]["users_outside_vocabulary"]
    if unknown:
        console.print(f"left out: {unknown:,} users outside the vocabulary")
    console.print(f"export: {target}", soft_wrap=True)


if __name__ == "__main__":
    from jobs.cli import run_app

    raise SystemExit(run_app(app))

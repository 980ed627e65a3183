"""`sluice skew`: features that serving logged against those that the build recomputes."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from conf.artefacts.dataset import read_manifest, resolve_version
from conf.errors import ConfigError
from conf.local_paths import local_path

app = typer.Typer(add_completion=False)
FORMATS = ("parquet", "json", "tfrecord")


@dataclass(frozen=True)
class Logged:
    """A serving log.

    Attributes:
        path: File, or directory of files.
        file_format: One of `FORMATS`, or None to tell by the name.
        encoded: Whether it holds features as the records do, else raw columns.
        keys: Features that are the key; none for user and item.
    """

    path: str
    file_format: str | None = None
    encoded: bool = False
    keys: tuple[str, ...] = ()


@app.command()
def main(
    dataset: Annotated[str, typer.Option(help="A dataset, or one of its versions.")],
    logged: Annotated[str, typer.Option(help="Serving log: Parquet, JSON lines, TFRecord.")],
    split: Annotated[str, typer.Option(help="Split that holds the recomputed rows.")] = "train",
    key: Annotated[
        list[str] | None, typer.Option(help="Key feature; repeat for several. User and item.")
    ] = None,
    encoded: Annotated[
        bool, typer.Option("--encoded", help="The log holds encoded features, not raw columns.")
    ] = False,
    log_format: Annotated[
        str | None, typer.Option("--format", help="parquet, json or tfrecord; told by the name.")
    ] = None,
    max_mismatch: Annotated[
        float, typer.Option(min=0, max=1, help="Greatest share of differing rows per feature.")
    ] = 0.01,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Compare logged serving features with recomputed ones, by key."""
    from etl.quality.skew import refuse_skew

    if log_format is not None and log_format not in FORMATS:
        raise ConfigError("no such format", received=log_format, allowed=", ".join(FORMATS))
    source = Logged(logged, log_format, encoded, tuple(key or ()))
    report = compare(resolve_version(local_path(dataset)), split, source)
    print(json.dumps(report, indent=1)) if as_json else print_report(report)
    refuse_skew(report, max_mismatch)
    return 0


def compare(version: Path, split: str, logged: Logged) -> dict[str, Any]:
    """Compares a serving log with a split of a dataset version."""
    import pyarrow as pa

    from conf.artefacts.encoder_files import read_plan_file
    from conf.encoders import ENCODERS_DIR
    from etl.quality.skew import (
        compare_features,
        encode_logged,
        find_features,
        plan_skew,
        read_logged,
        read_split,
        wire_types,
    )

    manifest, plan = read_manifest(version), read_plan_file(version / ENCODERS_DIR)
    inputs = [raw for column in plan.columns for raw in column.inputs]
    names = {*(column.column for column in plan.columns), *(raw.name for raw in inputs)}
    names -= {raw.name for raw in inputs if not raw.is_served}
    types = wire_types(manifest) if logged.encoded else dict.fromkeys(sorted(names), pa.null())
    rows = read_logged(logged.path, logged.file_format, types)
    features, left_out = find_features(plan, rows.schema.names, logged.encoded, split)
    for name, reason in left_out.items():
        print(f"{name} is not compared: {reason}", file=sys.stderr)
    config = plan_skew(plan, manifest, features, logged.keys)
    if not logged.encoded:
        rows = encode_logged(rows, version, features)
    records = read_split(version, manifest, split, (*config.keys, *config.features))
    return compare_features(rows, records, config)


def print_report(report: Mapping[str, Any]) -> None:
    """Prints how many rows differ by feature, with an example."""
    from rich.console import Console
    from rich.table import Table

    title = f"{report['compared']:,} of {report['logged']:,} logged rows compared"
    if report["ambiguous"]:
        title += f"; {report['ambiguous']:,} keys stand in several rows"
    table = Table(title=title, title_justify="left")
    for name in ("feature", "differ", "share", "key", "logged", "recomputed"):
        table.add_column(name, justify="right" if name in ("differ", "share") else "left")
    for skew in report["features"]:
        shown = ["", "", ""]
        for example in skew["examples"][:1]:
            values = str(example["logged"]), str(example["recomputed"])
            shown = ["/".join(example["key"]), *values]
        table.add_row(skew["name"], f"{skew['mismatched']:,}", f"{skew['rate']:.4%}", *shown)
    Console().print(table)


if __name__ == "__main__":
    from jobs.support.run_app import run_app

    raise SystemExit(run_app(app))

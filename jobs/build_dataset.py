"""`sluice build`: logs and dictionaries to a published TFRecord dataset version."""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Annotated

import typer

from conf.etl import BuildConfig
from conf.load import load_config
from conf.manifest import Manifest
from jobs.logs import LogFormat, setup_logging

app = typer.Typer(add_completion=False)


@app.command()
def main(
    config: Annotated[str, typer.Argument(help="Preset name, or path of a YAML file.")],
    data: Annotated[
        str | None, typer.Option(help="Folder that the sources' paths start from.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved plan; touch nothing.")
    ] = False,
    log_format: Annotated[LogFormat, typer.Option(help="How to log.")] = LogFormat.TEXT,
) -> int:
    """Build a dataset version: ETL, encoders, TFRecord shards, manifest, publish."""
    setup_logging(log_format)
    settings = list(overrides or [])
    if data is not None:
        settings.insert(0, f"data_dir={json.dumps(data, ensure_ascii=False)}")
    resolved = load_config(BuildConfig, "etl", config, settings)
    if dry_run:
        print(json.dumps(plan(resolved), indent=1))
        return 0
    version, manifest = build(resolved)
    if log_format is LogFormat.JSON:
        print(json.dumps({"version": str(version), "kept": dict(manifest.counts.kept)}))
    else:
        print_summary(version, manifest)
    return 0


def plan(config: BuildConfig) -> dict[str, object]:
    """Returns what a build would do, from the config and the input files' sizes alone.

    Raises:
        ConfigError: The features do not fit the declared columns.
        InputDataError: A source file is missing or empty.
    """
    from etl.features import plan_features
    from etl.records import shard_counts
    from etl.sources import find_files

    features = plan_features(config)
    return {
        "config": config.resolved(),
        "inputs": [
            {"source": file.source, "path": file.path, "bytes": file.bytes}
            for name, source in config.sources.items()
            for file in find_files(name, source, config.data_dir)
        ],
        "features": [feature.name for feature in features.features],
        "vocabularies": [vocabulary.name for vocabulary in features.vocabularies],
        "shards": shard_counts(config),
        "output": str(Path(config.output.root) / config.name),
    }


def build(config: BuildConfig) -> tuple[Path, Manifest]:
    """Runs the build in a Spark session of its own, or the submitter's.

    Raises:
        SluiceError: The build was refused or failed for a known reason.
    """
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    from etl.build import build_dataset
    from etl.failures import translate_failure
    from etl.features import plan_features
    from etl.sources import find_files
    from jobs.spark import build_session

    # What is wrong with the config or the paths is said before a JVM is started.
    plan_features(config)
    for name, source in config.sources.items():
        find_files(name, source, config.data_dir)
    session = build_session(config.spark, f"sluice build {config.name}")
    try:
        result = build_dataset(session, config, lambda: _peak_memory(session))
    except (PySparkException, Py4JError) as error:
        known = translate_failure(error)
        if known is None:
            raise
        raise known from error
    finally:
        # After a crash of the JVM this fails too, and would hide what happened.
        with contextlib.suppress(Exception):
            session.stop()
    return result.version, result.manifest


def _peak_memory(session: object) -> dict[str, int]:
    """Peak resident bytes of the driver's JVM and of this process, where the kernel tells."""
    jvm_pid = session._jvm.java.lang.ProcessHandle.current().pid()  # type: ignore[attr-defined]
    peaks = {"driver_jvm": _peak_of(jvm_pid), "driver_python": _peak_of(os.getpid())}
    return {name: peak for name, peak in peaks.items() if peak is not None}


def _peak_of(pid: int) -> int | None:
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    except OSError:
        return None
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(found[1]) * 1024 if found else None


def print_summary(version: Path, manifest: Manifest) -> None:
    """Prints what was read, dropped and written."""
    from rich.console import Console
    from rich.table import Table

    counts = manifest.counts
    table = Table(title=f"dataset {manifest.dataset_name}", title_justify="left")
    table.add_column("rows")
    table.add_column("count", justify="right")
    for source, rows in counts.read.items():
        table.add_row(f"read from {source}", f"{rows:,}")
        for reason, bad in counts.quarantined[source].items():
            table.add_row(f"  bad: {reason}", f"{bad:,}")
    for reason, rows in counts.dropped.items():
        table.add_row(f"dropped: {reason}", f"{rows:,}")
    table.add_row("joined", f"{counts.joined:,}")
    for name, rows in counts.drawn.items():
        table.add_row(f"negatives drawn for {name}", f"{rows:,}")
    for split in manifest.splits:
        table.add_row(
            f"written to {split.name} ({len(split.shards)} shards, {split.bytes / 1e6:.1f} MB)",
            f"{split.rows:,}",
        )
    console = Console()
    console.print(table)
    console.print(f"version: {version}", soft_wrap=True)


if __name__ == "__main__":
    from jobs.cli import run_app

    raise SystemExit(run_app(app))

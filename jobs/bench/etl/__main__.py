"""The whole build on generated logs, per stage, against a bare Spark job of the same data."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from rich.console import Console

from jobs.bench.command import build_command, check_positive, describe_arguments, run_command
from jobs.bench.etl.logs import LogSize
from jobs.bench.etl.scale import (
    BAR,
    BUILD,
    EtlSettings,
    build_growth_table,
    build_stage_table,
    measure_size,
)
from jobs.bench.tfrecord.report import Report, build_table, describe_machine, judge, print_report

# Logs, the version, its shuffle files, and the bare job's Parquet, per event.
_BYTES_PER_ROW = 1200
_DISK_SHARE = 0.8


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = build_command("etl", __doc__)
    add = parser.add_argument
    add("--rows", type=int, nargs="+", default=[1_000_000], metavar="ROWS",
        help="events of each log, e.g. 1000000 10000000")  # fmt: skip
    add("--skewed-rows", type=int, nargs="*", default=[], metavar="ROWS",
        help="the same with one user who has 5 %% of the events")  # fmt: skip
    add("--repeats", type=int, default=1, help="runs of each, the fastest counts")
    add("--master", default="local[2]", help="Spark's master")
    add("--driver-memory", default="2g")
    add("--shuffle-partitions", type=int, default=8)
    add("--conf", action="append", default=[], metavar="KEY=VALUE", help="further Spark setting")
    add("--work-dir", type=Path, help="folder for logs and versions; a temporary one if not given")
    return parser


def check_arguments(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Ends with a message where a value makes no sense."""
    if any(rows < 1000 for rows in (*arguments.rows, *arguments.skewed_rows)):
        parser.error("--rows and --skewed-rows take numbers from 1000 on")
    check_positive(parser, arguments, ("repeats", "shuffle_partitions"))
    if any("=" not in setting for setting in arguments.conf):
        parser.error("--conf takes KEY=VALUE")


def run(arguments: argparse.Namespace, console: Console) -> Report:
    """Measures what the command line asks for and prints it."""
    report = Report({**describe_arguments(arguments), **describe_machine()})
    sizes = [LogSize(rows) for rows in sorted(arguments.rows)]
    skewed = [LogSize(rows, is_skewed=True) for rows in sorted(arguments.skewed_rows)]
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
        work_dir = arguments.work_dir or Path(folder)
        work_dir.mkdir(parents=True, exist_ok=True)
        etl = EtlSettings(
            work_dir.resolve(), arguments.master, arguments.driver_memory,
            arguments.shuffle_partitions, tuple(tuple(s.split("=", 1)) for s in arguments.conf),
            arguments.repeats,
        )  # fmt: skip
        for size in (*sizes, *skewed):
            _measure(size, etl, report, console)
    for group in (sizes, skewed):
        names = {size.name for size in group}
        found = [m for m in report.measurements if m.shape in names]
        if found:
            console.print(build_growth_table(found))
    print_report(report, console)
    return report


def _measure(size: LogSize, settings: EtlSettings, report: Report, console: Console) -> None:
    free = shutil.disk_usage(settings.work_dir).free
    needed = size.rows * _BYTES_PER_ROW
    if needed > free * _DISK_SHARE:
        report.skip(f"{size.name}: about {needed / 1e9:.0f} GB, {free / 1e9:.0f} GB are free")
        return
    found = list(measure_size(size, settings))
    report.measurements += found
    report.verdicts += judge(size.name, found, (BAR,))
    console.print(build_table(size.name, found))
    console.print(build_stage_table(next(m for m in found if m.name == BUILD)))


def main() -> None:
    """Parses the command line and runs."""
    run_command(build_parser(), check_arguments, run)


if __name__ == "__main__":
    main()

"""What the command lines of the benchmarks have in common."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from rich.console import Console


class WritableReport(Protocol):
    """Figures that can be written as JSON."""

    def write(self, path: Path) -> None:
        """Writes all of them."""


def build_command(name: str, description: str | None) -> argparse.ArgumentParser:
    """Returns the parser of `python -m jobs.bench.NAME`, with what all of them take."""
    parser = argparse.ArgumentParser(
        prog=f"python -m jobs.bench.{name}", description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    return parser


def check_positive(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, names: Iterable[str]
) -> None:
    """Ends with a message where one of these arguments is not 1 or more."""
    for name in names:
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more")


def run_command(
    parser: argparse.ArgumentParser,
    check_arguments: Callable[[argparse.ArgumentParser, argparse.Namespace], None],
    run: Callable[[argparse.Namespace, Console], WritableReport],
) -> None:
    """Parses the command line, runs, and writes the report where `--json` asks for it."""
    arguments = parser.parse_args()
    check_arguments(parser, arguments)
    # Before minutes of measuring, not after them.
    if arguments.json is not None and not arguments.json.absolute().parent.is_dir():
        parser.error(f"--json: no folder {arguments.json.absolute().parent}")
    # A pipe or file has no width of its own, and the tables are wide.
    report = run(arguments, Console(width=None if sys.stdout.isatty() else 160))
    if arguments.json is not None:
        report.write(arguments.json)


def describe_arguments(arguments: argparse.Namespace) -> dict[str, object]:
    """Returns the arguments as JSON values."""
    return {k: str(v) if isinstance(v, Path) else v for k, v in vars(arguments).items()}

"""What the command lines of the benchmarks have in common."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from rich.console import Console


class WritableReport(Protocol):
    """Figures that can be written as JSON."""

    def write(self, path: Path) -> None:
        """Writes all of them."""


def run_command(
    parser: argparse.ArgumentParser,
    check_arguments: Callable[[argparse.ArgumentParser, argparse.Namespace], None],
    run: Callable[[argparse.Namespace, Console], WritableReport],
) -> None:
    """Parses the command line, runs, and writes the report where `--json` asks for it."""
    arguments = parser.parse_args()
    check_arguments(parser, arguments)
    # A pipe or file has no width of its own, and the tables are wide.
    report = run(arguments, Console(width=None if sys.stdout.isatty() else 160))
    if arguments.json is not None:
        report.write(arguments.json)


def describe_arguments(arguments: argparse.Namespace) -> dict[str, object]:
    """Returns the arguments as JSON values."""
    return {k: str(v) if isinstance(v, Path) else v for k, v in vars(arguments).items()}

"""Training steps: what large and dynamic tables cost, and the gain over stock Keras."""

from __future__ import annotations

import argparse
import os

from rich.console import Console

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow is imported

from tests.bench.measurements import (
    BenchReport,
    Measurement,
    build_bench_parser,
    build_table,
    check_positive,
    describe_arguments,
    describe_machine,
    print_report,
    run_bench,
)
from tests.bench.train_step.sections import (
    NUMBERS_PER_WEIGHT,
    StepSettings,
    build_profile_table,
    measure_against_keras,
    measure_dynamic,
    measure_growth,
    profile_steps,
)
from tests.bench.train_step.trainings import BatchShape, SluiceTraining, build_static_table

SECTIONS = ("growth", "keras", "dynamic", "profile")
PROFILED_STEPS = 20


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = build_bench_parser("train_step", __doc__)
    add = parser.add_argument
    add("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    add("--batch", type=int, default=2048, help="rows of a batch")
    add("--length", type=int, default=50, help="items of a history")
    add("--repeats", type=int, default=5, help="rounds of each, in turns; the fastest counts")
    add("--small-rows", type=int, default=100_000, help="growth: rows of the small table")
    add("--large-rows", type=int, default=100_000_000, help="growth: rows of the large table")
    add("--growth-dim", type=int, default=8, help="growth: numbers of a row")
    add("--sparse", choices=sorted(NUMBERS_PER_WEIGHT), default="adagrad",
        help="growth, dynamic: optimizer of the tables")  # fmt: skip
    add("--rows", type=int, default=1_000_000, help="keras, dynamic, profile: rows of the table")
    add("--dim", type=int, default=32, help="keras, dynamic, profile: numbers of a row")
    return parser


def check_arguments(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Ends with a message where a value makes no sense."""
    check_positive(parser, arguments, ("batch", "length", "repeats", "growth_dim", "dim"))
    if min(arguments.small_rows, arguments.large_rows, arguments.rows) < 1000:
        parser.error("tables have 1000 rows or more")
    if arguments.large_rows < arguments.small_rows:
        parser.error("--large-rows is below --small-rows")


def run(arguments: argparse.Namespace, console: Console) -> BenchReport:
    """Measures what the command line asks for and prints it."""
    report = BenchReport({**describe_arguments(arguments), **describe_machine()})
    settings = StepSettings(
        arguments.batch, arguments.length, arguments.sparse, arguments.repeats
    )  # fmt: skip
    if "growth" in arguments.sections:
        sizes = arguments.small_rows, arguments.large_rows, arguments.growth_dim
        _print(console, measure_growth(report, settings, *sizes))
    if "keras" in arguments.sections:
        size = arguments.rows, arguments.dim
        _print(console, measure_against_keras(report, settings, *size))
    if "dynamic" in arguments.sections:
        _print(console, measure_dynamic(report, settings, arguments.rows, arguments.dim))
    if "profile" in arguments.sections:
        shape = BatchShape(arguments.batch, arguments.length, arguments.rows)
        training = SluiceTraining(build_static_table(arguments.rows, arguments.dim), shape.build())
        ops = profile_steps(training, PROFILED_STEPS)
        report.settings["profile"] = {op.kind: op.ms_per_step for op in ops}
        title = f"a step on {arguments.rows:,} x {arguments.dim}, all threads together"
        console.print(build_profile_table(title, ops))
    print_report(report, console, "bars (wall time per example)")
    return report


def _print(console: Console, found: list[Measurement]) -> None:
    if found:
        console.print(build_table(f"{found[0].section}: {found[0].shape}, per step", found))


def main() -> None:
    """Parses the command line and runs."""
    run_bench(build_parser(), check_arguments, run)


if __name__ == "__main__":
    main()

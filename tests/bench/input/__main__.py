"""`python -m tests.bench.input`: the trainer's input against tf.data, on the same files in one run.

Every pipeline of TensorFlow is drained by a compiled loop, as a training loop does it; batches of
NumPy arrays, the same rows by `open_batches`, by a loop of Python. Rounds of all pipelines
take turns, and of each the best round counts. The bars are in CPU time per row, which other work
on the machine does not change; the wall ratio stands beside it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
from rich.console import Console

from tests.bench.clock import time_best
from tests.bench.measurements import (
    Bar,
    BenchReport,
    Measurement,
    build_bench_parser,
    build_table,
    check_positive,
    describe_arguments,
    describe_machine,
    judge,
    print_report,
    run_bench,
)
from tests.bench.shapes import SHAPES

MEMORY = "memory: copy of the decoded rows"
_SHAPES = ("ctr", "history2", "history")
_COPY_BYTES = 256 << 20


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = build_bench_parser("input", __doc__)
    add = parser.add_argument
    add("--shapes", nargs="+", choices=_SHAPES, default=list(_SHAPES))
    add(
        "--rows",
        type=int,
        default=1_000_000,
        help="records per shape; an epoch takes 25 ms to start",
    )
    add("--shards", type=int, default=4)
    add("--batch-size", type=int, default=2048)
    add("--shuffle-buffer", type=int, default=100_000)
    add("--threads", type=int, nargs="+", default=[1, 2], help="of this project's own input")
    add("--repeats", type=int, default=5, help="rounds, of which the best counts")
    add("--slow-rows", type=int, default=40_000, help="records for the per-record pipeline")
    add("--work-dir", type=Path, help="folder for the shards; a temporary one if not given")
    return parser


def check_arguments(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Ends with a message where a value makes no sense."""
    check_positive(parser, arguments, ("shards", "batch_size", "shuffle_buffer", "repeats"))
    if min(arguments.rows, arguments.slow_rows) < arguments.batch_size:
        parser.error("--rows and --slow-rows must be at least --batch-size")
    if min(arguments.threads) < 1:
        parser.error("--threads takes numbers, 1 or more")


def measure_shape(name: str, arguments: argparse.Namespace, directory: Path) -> list[Measurement]:
    """Measures all pipelines on one shape."""
    # TensorFlow takes seconds to load, which --help need not wait for.
    from tests.bench.input import pipelines

    settings = arguments.batch_size, arguments.shuffle_buffer, tuple(arguments.threads)
    shards = pipelines.write_shards(name, arguments.rows, arguments.shards, directory)
    files = pipelines.InputFiles(SHAPES[name], directory, shards)
    built = pipelines.build_pipelines(files, *settings)
    datasets = {key: build() for key, build in built.items()}
    rows = {
        key: (min(arguments.slow_rows, files.rows) if key == pipelines.PER_RECORD else files.rows)
        // arguments.batch_size
        * arguments.batch_size
        for key in datasets
    }
    best: dict[str, list[float]] = {}
    for _ in range(arguments.repeats + 1):  # the first round warms up
        for key, dataset in datasets.items():
            wall, cpu = time.perf_counter(), time.process_time()
            pipelines.drain(dataset, rows[key] // arguments.batch_size)
            times = time.perf_counter() - wall, time.process_time() - cpu
            best.setdefault(key, [np.inf, np.inf])
            best[key] = [min(a, b) for a, b in zip(best[key], times, strict=True)]
    measured = [_measure_memory(name, arguments.rows)]
    for key, (wall, cpu) in best.items():
        size = files.bytes * rows[key] // files.rows
        measured.append(Measurement("input", name, key, wall, cpu, rows[key], size))
    return measured


def build_bars(threads: int) -> tuple[Bar, ...]:
    """What the input is held against."""
    from tests.bench.input import pipelines as names

    own = names.BLOCK.format(threads)
    return (
        Bar(own, names.BATCHED, 5),
        Bar(own, names.BATCHED_SHUFFLED, 5),
        Bar(own, names.BATCHED_RAGGED, None),
        Bar(own, names.PER_RECORD, 40),
        Bar(names.ARRAYS.format(threads), own, 0.9),
        Bar(own, names.RAW, None),
        Bar(own, MEMORY, None),
    )


def _measure_memory(name: str, rows: int) -> Measurement:
    """Copies as many bytes as the decoded rows take, from and to cold memory."""
    values = sum((column.length or 1) * (4 if column.kind == "float32" else 8)
                 for column in SHAPES[name].columns)  # fmt: skip
    source, target = np.ones(_COPY_BYTES, np.uint8), np.ones(_COPY_BYTES, np.uint8)
    times = time_best(lambda: np.copyto(target, source), 3)
    scale = rows * values / _COPY_BYTES
    return Measurement(
        "input", name, MEMORY, times.wall_s * scale, times.cpu_s * scale, rows, rows * values
    )


def run(arguments: argparse.Namespace, console: Console) -> BenchReport:
    """Measures what the command line asks for and prints it."""
    report = BenchReport({**describe_arguments(arguments), **describe_machine()})
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
        work_dir = (arguments.work_dir or Path(folder)).resolve()
        work_dir.mkdir(parents=True, exist_ok=True)
        for name in arguments.shapes:
            found = measure_shape(name, arguments, work_dir)
            report.measurements += found
            report.verdicts += judge(name, found, build_bars(max(arguments.threads)))
            title = f"input, batches of {arguments.batch_size}: {SHAPES[name].title}"
            console.print(build_table(title, found))
    print_report(report, console)
    return report


def main() -> None:
    """Parses the command line and runs."""
    run_bench(build_parser(), check_arguments, run)


if __name__ == "__main__":
    main()

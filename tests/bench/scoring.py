"""Batch scoring beside calls of the same SavedModel row by row, on one core.

The model is DeepFM with three layers of 400 over five features, as exported; its weights are first
ones. `partition` is what an executor does with the Arrow batches that Spark brings: raw values to
tensors, the model, the file; loading the model is counted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow is imported

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console

from tests.bench.clock import pin_to_one_core, run_driver_process, time_tree
from tests.bench.measurements import (
    BenchReport,
    Measurement,
    build_bench_parser,
    build_table,
    check_positive,
    describe_arguments,
    describe_machine,
    run_bench,
)

MODEL = {
    "kind": "ranking", "network": "deepfm", "embedding_dim": 10,
    "features": ["user_id", "gender", "history", "movie_id", "genres"],
    "params": {"hidden_units": [400, 400, 400]},
}  # fmt: skip
ROW_CALLS = 2000
Job = dict[str, Any]


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = build_bench_parser("scoring", __doc__)
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--aim", type=float, default=3.0, help="rows per second of row by row")
    return parser


def check_arguments(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Ends with a message where a value makes no sense."""
    check_positive(parser, arguments, ("rows", "aim"))


def run(arguments: argparse.Namespace, console: Console) -> BenchReport:
    """Measures every way and prints it."""
    report = BenchReport({**describe_arguments(arguments), **describe_machine()})
    with tempfile.TemporaryDirectory() as folder, pin_to_one_core():
        job = {"folder": folder, "rows": arguments.rows}
        for way in WAYS:
            done = run_driver_process("tests.bench.scoring", {**job, "way": way})
            if done.returncode:
                report.skip(f"{way}: {done.errors.splitlines()[-1]}")
            elif found := done.value:
                figures = (found["wall_s"], found["cpu_s"], found["rows"])
                report.measurements.append(Measurement("scoring", "deepfm", way, *figures))
    if report.measurements:
        console.print(build_table("scores of rows", report.measurements))
        print_ratios(report, arguments.aim, console)
    return report


def print_ratios(report: BenchReport, aim: float, console: Console) -> None:
    """Prints how many times the rows of row-wise calls each way scores in a CPU second."""
    rates = {found.name: found.rows_per_cpu_s for found in report.measurements}
    for way in rates.keys() - {"row by row"}:
        ratio = rates[way] / rates["row by row"]
        console.print(f"{way}: {ratio:.1f} x row by row, aim at least {aim:g}")


def prepare(job: Job) -> Callable[[], int] | None:
    """Writes the exported model and the rows."""
    from conf.artefacts.export import ExportOptions
    from jobs.export import export
    from tests.jobs.runs import write_tiny_run
    from tests.training.tiny_dataset import TinyConfig

    folder = Path(job["folder"])
    run_dir = write_tiny_run(folder / "run", MODEL, TinyConfig(users=5000, items=2000))
    export(run_dir, options=ExportOptions(folder / "models"))
    rng, rows = np.random.default_rng(1), job["rows"]
    lengths = rng.integers(0, 9, rows)
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    history = pa.array(rng.integers(100, 2100, offsets[-1]))
    table = pa.table({
        "user_id": rng.integers(1000, 6100, rows), "gender": rng.choice(["F", "M"], rows),
        "history": pa.ListArray.from_arrays(offsets, history),
        "movie_id": rng.integers(100, 2100, rows),
        "genres": [[f"genre_{n % 4}"] for n in range(rows)],
    })  # fmt: skip
    pq.write_table(table, folder / "rows.parquet")
    return None


def read_task(job: Job, output: str) -> Any:
    """Returns the export, and what an executor does with the rows."""
    from conf.artefacts.export import find_version
    from training.apply.answers import Asked, Source, plan_answers
    from training.apply.export import Export
    from training.apply.parts import JOB_FILE, RowSource
    from training.apply.parts import Job as Parts
    from training.raw_inputs.files import RawFile

    folder = Path(job["folder"])
    export = Export(find_version(folder / "models"), threads=1)
    columns = tuple(pq.read_schema(folder / "rows.parquet").names)
    answers = plan_answers(export, Asked(), Source(file=RawFile(folder / "rows.parquet")))
    (folder / output).mkdir()
    (folder / output / JOB_FILE).write_text("{}")
    source = RowSource(("rows",), "parquet", columns=columns)
    count = job["rows"]
    return export, Parts(folder / output, "parquet", answers, source, None, count, count)


def score_row_by_row(job: Job) -> Callable[[], int]:
    """Calls the signature with one row each."""
    import tensorflow as tf

    from training.apply.parts import read_part

    export, parts = read_task(job, "rows")
    batch = next(read_batches(job))
    first = next(read_part(parts, export, None, 0, iter([batch])))
    function = tf.saved_model.load(str(export.path)).signatures["serving_default"]
    specs = function.structured_input_signature[1]
    calls = [
        {name: tf.constant(values[row : row + 1], specs[name].dtype)
         for name, values in first.inputs.arrays.items()}
        for row in range(len(first.names))
    ]  # fmt: skip
    function(**calls[0])

    def work() -> int:
        for number in range(ROW_CALLS):
            function(**calls[number % len(calls)])
        return ROW_CALLS

    return work


def score_by_partition(job: Job) -> Callable[[], int]:
    """Scores all rows as an executor does."""
    export, parts = read_task(job, "partition")

    def work() -> int:
        [done] = parts.compute(str(export.path), read_batches(job))
        return int(done.column("rows")[0].as_py())

    return work


def read_batches(job: Job) -> Iterator[pa.RecordBatch]:
    """Yields the rows as Spark brings them."""
    with pq.ParquetFile(Path(job["folder"]) / "rows.parquet") as file:
        for batch in file.iter_batches(10_000):
            yield batch.append_column("__sluice_part", pa.array([0] * batch.num_rows, pa.int64()))


WAYS: dict[str, Callable[[Job], Callable[[], int] | None]] = {
    "prepare": prepare,
    "row by row": score_row_by_row,
    "partition": score_by_partition,
}


def drive(job: Job, way: str) -> None:
    """Runs one way and prints its figures as JSON."""
    work = WAYS[way](job)
    if work is None:
        print("{}")
        return
    rows: list[int] = []
    times = time_tree(lambda: rows.append(work()))
    figures = {"wall_s": times.wall_s, "cpu_s": times.cpu_s, "rows": rows[0]}
    print(json.dumps(figures))


def main() -> None:
    """Parses the command line, or a job of one way, and runs."""
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        job = json.loads(sys.argv[1])
        drive(job, job.pop("way"))
    else:
        run_bench(build_parser(), check_arguments, run)


if __name__ == "__main__":
    main()

"""A dynamic table whose rows several workers share: memory of each, time of a step, bytes sent.

Each worker is a process of this machine, so the steps of several share its cores: CPU time of all
workers together is what can be compared.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import time
from dataclasses import asdict, dataclass
from multiprocessing.queues import Queue

import psutil
from rich.console import Console

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow is imported

import numpy as np

from tests.bench.clock import read_own_memory, read_peak_rss, release_free_memory
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

WHOLE, SHARED = "whole", "shared"
STEP_SHARE, WARM_UP = 1.5, 5
NUMBER_BYTES = 4


@dataclass(frozen=True)
class Setting:
    """What the workers of one run do.

    Attributes:
        workers: How many there are; 1: one process without a strategy.
        is_shared: Whether they share the rows.
        rows: Rows of the table, all known.
        dim: Length of a row.
        batch: Rows of the global batch.
        length: Items of a history.
        steps: Steps that are timed.
        sparse: Kind of the table's optimizer.
    """

    workers: int
    is_shared: bool
    rows: int
    dim: int
    batch: int
    length: int
    steps: int
    sparse: str = "adam"

    @property
    def name(self) -> str:
        """What it is called in tables."""
        return f"{self.workers} worker(s), {SHARED if self.is_shared else WHOLE}"


@dataclass(frozen=True)
class Outcome:
    """What one worker has measured.

    Attributes:
        table_bytes: Memory that the process took for table, state and index.
        matrix_bytes: Of these, rows and optimizer state.
        wall_s: Wall seconds of a step.
        cpu_s: CPU seconds of a step.
        distinct: Distinct rows of a batch, in the mean.
        sent: Rows that the worker sent in a step, in the mean; gradients as often.
        batches: That the last two are the mean of; the input runs ahead of the steps.
        loopback_bytes: That all processes of this network namespace sent each other in a step.
        peak_bytes: Largest resident size of the process.
    """

    table_bytes: int
    matrix_bytes: int
    wall_s: float
    cpu_s: float
    distinct: float
    sent: float
    batches: int
    loopback_bytes: float
    peak_bytes: int


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = build_bench_parser("shared_rows", __doc__)
    add = parser.add_argument
    add("--rows", type=int, default=10_000_000, help="rows of the table")
    add("--dim", type=int, default=32, help="numbers of a row; its optimizer is Adam")
    add("--batch", type=int, default=2048, help="rows of the global batch")
    add("--length", type=int, default=50, help="items of a history")
    add("--workers", type=int, nargs="+", default=[1, 2, 4], help="numbers of workers")
    add("--whole", type=int, nargs="*", default=[2],
        help="numbers of workers that each hold all rows, to compare with")  # fmt: skip
    add("--steps", type=int, default=20, help="timed steps")
    return parser


def check_arguments(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Ends with a message where a value makes no sense."""
    check_positive(parser, arguments, ("rows", "dim", "batch", "length", "steps"))
    if min([*arguments.workers, *arguments.whole], default=0) < 1:
        parser.error("--workers and --whole must be 1 or more")
    if any(arguments.batch % count for count in (*arguments.workers, *arguments.whole)):
        parser.error("--batch must be a multiple of each number of workers")


def measure_worker(setting: Setting, index: int, addresses: list[str], told: Queue) -> None:
    """Builds the table, times steps, and tells what was measured; a process of its own."""
    task = {"type": "worker", "index": index}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
    import tensorflow as tf

    from conf.schema import FIRST_TOKEN_ID
    from conf.training.optimizer import OptimizerConfig
    from conf.training.tables import DynamicTableConfig
    from conf.training.train import DevicesConfig
    from tests.bench.train_step.trainings import BatchShape, HistoryModel
    from training.distribution.strategy import build_run_steps, build_strategy, distribute_batches
    from training.embedding.dynamic_table import DynamicTable
    from training.embedding.key_mapping import map_keys, plan_keyed_features
    from training.embedding.key_space import KeySpace
    from training.embedding.worker_rows import RowExchange, find_owners
    from training.loop.optimizers import Optimizers
    from training.loop.step import StepOptions, TrainStep
    from training.objectives.objective import BinaryCrossEntropy

    strategy = build_strategy(DevicesConfig(strategy="multi_worker"))
    dataset = BatchShape(setting.batch, setting.length, setting.rows).build()
    owners = find_owners(strategy) if setting.is_shared else None
    exchange = None if owners is None else RowExchange(owners, 0)
    release_free_memory()
    before = read_own_memory()
    with strategy.scope():
        keys = KeySpace("item", DynamicTableConfig(capacity=setting.rows), exchange=exchange)
        table = DynamicTable("item", keys, setting.dim, seed=1)
        keys.set_keys(np.arange(FIRST_TOKEN_ID, setting.rows))
        model = HistoryModel(table, setting.length)
        config = OptimizerConfig.model_validate({"sparse": {"kind": setting.sparse}})
        optimizers = Optimizers(config, model, 1_000_000)
    taken = read_own_memory() - before
    keyed = plan_keyed_features(model.embedded_features, model.tables)
    step = TrainStep(
        model, BinaryCrossEntropy("label"), optimizers, StepOptions(seed=1), None, keyed
    )
    run_steps = build_run_steps(strategy, step)
    batches = iter(distribute_batches(map_keys(dataset, keyed), strategy))
    run_steps(batches, tf.constant(WARM_UP))
    wall, cpu, loopback = time.perf_counter(), time.process_time(), read_loopback_bytes()
    losses = run_steps(batches, tf.constant(setting.steps)).losses.numpy()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    loopback = read_loopback_bytes() - loopback
    if len(losses) < setting.steps or not np.isfinite(losses[-1]):
        raise ArithmeticError("the loss is not finite: the figures would mean nothing")
    distinct, sent, planned = 0.0, 0.0, 0
    if exchange is not None:
        found, planned = exchange.describe(), exchange.batches
        distinct, sent = found["distinct"] / planned, found["exchanged"] / planned
    told.put(
        Outcome(
            taken, keys.matrix_bytes, wall / setting.steps, cpu / setting.steps, distinct, sent,
            planned, loopback / setting.steps, read_peak_rss(os.getpid()) or 0,
        )
    )  # fmt: skip


def read_loopback_bytes() -> int:
    """Returns the bytes that this machine's processes have sent each other by its network."""
    counters = psutil.net_io_counters(pernic=True)
    return int(counters["lo"].bytes_sent) if "lo" in counters else 0


def measure(setting: Setting) -> list[Outcome]:
    """Runs the workers of a setting to their end.

    Raises:
        ChildProcessError: A worker has ended without a result.
    """
    held = [socket.socket() for _ in range(setting.workers)]
    for each in held:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        each.bind(("127.0.0.1", 0))
    addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in held]
    context = multiprocessing.get_context("spawn")
    told: Queue = context.Queue()
    processes = [
        context.Process(target=measure_worker, args=(setting, index, addresses, told))
        for index in range(setting.workers)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    for each in held:
        each.close()
    if any(process.exitcode for process in processes):
        raise ChildProcessError(f"{setting.name}: a worker ended without a result")
    return [told.get() for _ in processes]


def describe(setting: Setting, found: list[Outcome]) -> Measurement:
    """Returns what the workers of a setting have measured together."""
    shape = f"{setting.batch:,} x {setting.length}, {setting.rows:,} x {setting.dim}, adam, step"
    measurement = Measurement(
        "shared_rows", shape, setting.name,
        max(each.wall_s for each in found), sum(each.cpu_s for each in found), setting.batch,
    )  # fmt: skip
    distinct, sent = found[0].distinct, found[0].sent
    measurement.details.update(
        workers=[asdict(each) for each in found],
        table_mb=max(each.table_bytes for each in found) / 1e6,
        matrix_mb=max(each.matrix_bytes for each in found) / 1e6,
        # A row's numbers; a gradient's, and one that says that it was named.
        sent_mb=sent * (2 * setting.dim + 1) * NUMBER_BYTES / 1e6,
        # Each worker's share of the distinct rows to all others, and as many gradients back.
        least_mb=(
            2 * setting.dim * NUMBER_BYTES * distinct * (setting.workers - 1) / setting.workers
        )
        / 1e6,
    )
    return measurement


def run(arguments: argparse.Namespace, console: Console) -> BenchReport:
    """Measures what the command line asks for and prints it."""
    report = BenchReport({**describe_arguments(arguments), **describe_machine()})
    sizes = (arguments.rows, arguments.dim, arguments.batch, arguments.length, arguments.steps)
    settings = [Setting(count, False, *sizes) for count in arguments.whole]
    settings += [Setting(count, count > 1, *sizes) for count in arguments.workers]
    for setting in settings:
        found = describe(setting, measure(setting))
        report.measurements.append(found)
        shown = {k: round(v, 2) for k, v in found.details.items() if isinstance(v, float)}
        console.print(f"{setting.name}: {shown}")
    console.print(build_table("a step, CPU of all workers", report.measurements))
    names = {measurement.name for measurement in report.measurements}
    bars = [
        Bar(shared.name, whole.name, STEP_SHARE, at_least=False)
        for whole in settings
        for shared in settings
        if shared.is_shared and not whole.is_shared and shared.workers == whole.workers
        if {shared.name, whole.name} <= names
    ]
    report.verdicts += judge(report.measurements[0].shape, report.measurements, bars)
    print_report(report, console, "bars (steps: CPU time)")
    return report


def main() -> None:
    """Parses the command line and runs."""
    run_bench(build_parser(), check_arguments, run)


if __name__ == "__main__":
    main()

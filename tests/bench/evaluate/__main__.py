"""Evaluation of a large catalogue: time and peak memory beside the exact search of faiss.

Vectors are drawn; what is measured is the ranking: blocks of users by blocks of items, seen items
left out, metrics of ten relevant items per user. Each way runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow is imported

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from tests.bench.clock import read_peak_rss, run_driver_process
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
from training.evaluation.item_index import MISSING, ItemIndex, Pairs, rank_top_k
from training.evaluation.metrics import RankMeasures, measure
from training.evaluation.scored_rows import GroupSums
from training.evaluation.users import rank_in_lists

BLOCK_USERS = 1024
RELEVANT = 10
CHECKED_USERS = 64


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = build_bench_parser("evaluate", __doc__)
    parser.add_argument("--users", type=int, default=100_000)
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--k", type=int, default=50, help="longest list")
    parser.add_argument("--seen", type=int, default=50, help="items of each user left out")
    return parser


def check_arguments(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Ends with a message where a value makes no sense."""
    check_positive(parser, arguments, ("users", "items", "dim", "k", "seen"))
    if arguments.items <= arguments.k + arguments.seen:
        parser.error("--items leaves no list of --k without --seen")


def run(arguments: argparse.Namespace, console: Console) -> BenchReport:
    """Measures every way and prints it."""
    report = BenchReport({**describe_arguments(arguments), **describe_machine()})
    job = {name: getattr(arguments, name) for name in ("users", "items", "dim", "k", "seen")}
    for way in WAYS:
        done = run_driver_process("tests.bench.evaluate", {**job, "way": way})
        if done.returncode:
            report.skip(f"{way}: {done.errors.splitlines()[-1]}")
            continue
        found = done.value
        report.measurements.append(
            Measurement("evaluate", "vectors", way, found["wall_s"], found["cpu_s"],
                        arguments.users, details=found)
        )  # fmt: skip
        console.print(
            f"{way}: {found['wall_s']:.1f} s, peak {found['peak_bytes'] / 2**30:.2f} GiB, of which "
            f"vectors {found['vector_bytes'] / 2**30:.2f} GiB"
        )
    if report.measurements:
        console.print(build_table("ranking, per user", report.measurements))
    print_report(report, console)
    return report


Job = dict[str, int]


def draw_items(job: Job) -> NDArray[np.float32]:
    """Returns the item vectors, `[items, dim]`."""
    rng = np.random.default_rng(1)
    return rng.standard_normal((job["items"], job["dim"]), np.float32)


def draw_users(job: Job) -> Iterator[NDArray[np.float32]]:
    """Yields user vectors block by block, `[at most 1024, dim]`."""
    rng = np.random.default_rng(2)
    for start in range(0, job["users"], BLOCK_USERS):
        rows = min(BLOCK_USERS, job["users"] - start)
        yield rng.standard_normal((rows, job["dim"]), np.float32)


def draw_cells(job: Job, rows: int, count: int, rng: np.random.Generator) -> Pairs:
    """Returns distinct items of each row."""
    codes = rng.integers(0, job["items"], (rows, count)) + np.arange(rows)[:, None] * job["items"]
    return Pairs(*np.divmod(np.unique(codes), job["items"]))


def rank_by_sluice(job: Job, *, evaluates: bool) -> Callable[[], NDArray[np.int64]]:
    """Ranks as `sluice evaluate` with rows per user does, or the bare lists."""
    vectors = draw_items(job)
    index = ItemIndex(np.arange(2, job["items"] + 2), vectors)

    def work() -> NDArray[np.int64]:
        rng, first = np.random.default_rng(3), None
        means, measures = GroupSums(), RankMeasures((10, job["k"]))
        for users in draw_users(job):
            seen = draw_cells(job, len(users), job["seen"], rng) if evaluates else None
            lists = rank_top_k(users, index, job["k"] + int(evaluates), seen)
            if evaluates:
                relevant = draw_cells(job, len(users), RELEVANT, rng)
                columns = np.where(lists.ids == 0, MISSING, lists.ids - 2)
                ranks = rank_in_lists(lists.scores, columns, relevant, job["k"])
                means.add(measure(ranks, measures, "user"))
            if first is None:
                first = lists.ids[:CHECKED_USERS, : job["k"]] - 2
        assert first is not None
        return first

    return work


def rank_by_faiss(job: Job) -> Callable[[], NDArray[np.int64]]:
    """Ranks by `IndexFlatIP`, which leaves nothing out and measures nothing."""
    import faiss

    index = faiss.IndexFlatIP(job["dim"])
    index.add(draw_items(job))

    def work() -> NDArray[np.int64]:
        first = None
        for users in draw_users(job):
            _, columns = index.search(users, job["k"])
            first = columns[:CHECKED_USERS] if first is None else first
        assert first is not None
        return np.asarray(first)

    return work


WAYS: dict[str, Callable[[Job], Callable[[], NDArray[np.int64]]]] = {
    "evaluate per user": lambda job: rank_by_sluice(job, evaluates=True),
    "lists alone": lambda job: rank_by_sluice(job, evaluates=False),
    "faiss IndexFlatIP": rank_by_faiss,
}


def drive(job: Job, way: str) -> None:
    """Runs one way and prints its figures as JSON."""
    work = WAYS[way](job)
    wall, cpu = time.perf_counter(), time.process_time()
    first = work()
    figures = {
        "wall_s": time.perf_counter() - wall,
        "cpu_s": time.process_time() - cpu,
        "peak_bytes": read_peak_rss(os.getpid()),
        "vector_bytes": 4 * job["dim"] * (job["items"] + BLOCK_USERS),
        "first_lists": first[:4].tolist(),
    }
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

"""Matrix products of a step: their share of its time, and their speed beside the fastest one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import tensorflow as tf
from rich.console import Console
from rich.table import Table

from tests.bench.measurements import BenchReport
from tests.bench.train_step.sections import (
    WARM_UP_STEPS,
    OpTime,
    build_profile_table,
    profile_steps,
)

PEAK_SIZE, PEAK_ROUNDS = 2048, 8
_PRODUCTS = ("MatMul", "MatMulV2", "Einsum")
"""Ends of the names of kernels, those of oneDNN among them."""


def sum_products(ops: Sequence[OpTime]) -> float:
    """Returns the share of matrix products in the time of all kernels, fused ones among them."""
    products = [op for op in ops if op.kind.endswith(_PRODUCTS)]
    return sum(op.ms_per_step for op in products) / sum(op.ms_per_step for op in ops)


def measure_peak() -> float:
    """Returns the fastest product of two square float32 matrices, FLOP for each CPU-second."""
    matrix = tf.random.stateless_normal([PEAK_SIZE, PEAK_SIZE], [1, 2])
    best = float("inf")
    for _ in range(PEAK_ROUNDS):
        start = time.process_time()
        tf.matmul(matrix, matrix).numpy()
        best = min(best, time.process_time() - start)
    return 2.0 * PEAK_SIZE**3 / best


@dataclass(frozen=True)
class ProductSpeed:
    """Matrix products of a network's step.

    Attributes:
        network: Its name, and what it is measured on.
        flop: Of a step, counted by hand.
        cpu_s: CPU-seconds of a step.
        share: Of matrix products in the time of its kernels.
        peak: FLOP of the fastest product for each CPU-second.
    """

    network: str
    flop: float
    cpu_s: float
    share: float
    peak: float

    @property
    def of_peak_in_products(self) -> float:
        """Speed of the products beside the fastest one."""
        return self.flop / (self.cpu_s * self.share) / self.peak

    @property
    def of_peak(self) -> float:
        """Speed of the whole step beside the fastest product."""
        return self.flop / self.cpu_s / self.peak


def measure_products(
    network: str, train: Callable[[int], None], flop: float, steps: int, peak: float
) -> tuple[ProductSpeed, list[OpTime]]:
    """Times steps by their CPU time, then runs as many under the profiler.

    Args:
        network: Its name.
        train: Runs a number of steps.
        flop: Of a step.
        steps: Steps of a round; the fastest of three counts.
        peak: See `measure_peak`.
    """
    train(WARM_UP_STEPS)
    best = float("inf")
    for _ in range(3):
        start = time.process_time()
        train(steps)
        best = min(best, time.process_time() - start)
    ops = profile_steps(train, steps)
    return ProductSpeed(network, flop, best / steps, sum_products(ops), peak), ops


def report_products(
    report: BenchReport,
    console: Console,
    trainings: Mapping[str, tuple[Callable[[int], None], float]],
    steps: int,
) -> None:
    """Measures the products of some networks, notes them down and prints them.

    Args:
        report: Where figures go.
        console: Where tables go.
        trainings: What runs a number of steps, and the FLOP of one, by name of the network.
        steps: Steps of a round.
    """
    peak = measure_peak()
    report.settings["peak of a product, FLOP for each CPU-second"] = peak
    console.print(f"products of two square matrices: {peak / 1e9:.0f} GFLOP for a CPU-second")
    found = []
    for network, (train, flop) in trainings.items():
        speed, ops = measure_products(network, train, flop, steps, peak)
        report.settings[f"profile of {network}"] = {o.kind: o.ms_per_step for o in ops}
        report.settings[f"products of {network}"] = {
            "flop": flop, "cpu_s": speed.cpu_s, "share": speed.share,
            "of peak": speed.of_peak_in_products, "step of peak": speed.of_peak,
        }  # fmt: skip
        console.print(build_profile_table(f"a step of {network}, all threads", ops))
        found.append(speed)
    console.print(_build_table(found))


def _build_table(found: Sequence[ProductSpeed]) -> Table:
    table = Table(title="matrix products of a step", title_justify="left")
    table.add_column("network")
    for column in ("GFLOP", "CPU ms", "share", "speed of peak", "step of peak"):
        table.add_column(column, justify="right")
    for speed in found:
        table.add_row(
            speed.network, f"{speed.flop / 1e9:.2f}", f"{1e3 * speed.cpu_s:.1f}",
            f"{speed.share:.0%}", f"{speed.of_peak_in_products:.0%}", f"{speed.of_peak:.0%}",
        )  # fmt: skip
    return table

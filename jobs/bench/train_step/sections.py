"""Does a step's cost grow with the table, what is gained over Keras, what do keys cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jobs.bench.tfrecord.report import Bar, Measurement, Report, Verdict
from jobs.bench.train_step.batches import BatchShape
from jobs.bench.train_step.clock import time_in_turns
from jobs.bench.train_step.keras_peer import KerasTraining
from jobs.bench.train_step.sluice import (
    SluiceTraining,
    build_dynamic_table,
    build_static_table,
)

MEMORY_SHARE = 0.8
"""Of the memory that is free, how much the large table may take."""
NUMBERS_PER_WEIGHT = {"sgd": 1, "adagrad": 2, "adam": 3, "ftrl": 3}
"""The weight itself and what its optimizer keeps."""
GROWTH_LIMIT, KERAS_SPEEDUP = 1.2, 5.0
NEW_SHARE = 0.1
"""Of the items of a batch, how many were never met before."""
DYNAMIC_CAPACITY = 65_536


@dataclass(frozen=True)
class StepSettings:
    """What the sections have in common.

    Attributes:
        batch: Rows per batch.
        length: Items per history.
        sparse: Kind of the tables' optimizer.
        repeats: Rounds of each training; the fastest counts.
    """

    batch: int
    length: int
    sparse: str
    repeats: int


def measure_growth(
    report: Report, settings: StepSettings, small: int, large: int, dim: int
) -> list[Measurement]:
    """Steps on a small and on a large table; the same batches, and batches spread all over it."""
    state = NUMBERS_PER_WEIGHT[settings.sparse]
    needed, free = 4 * state * dim * (small + large), _available_bytes()
    if needed > MEMORY_SHARE * free:
        report.skip(
            f"growth: tables of {small:,} and {large:,} rows of {dim} with {settings.sparse} take "
            f"{needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"
        )
        return []
    shape = BatchShape(settings.batch, settings.length, small)
    batches = shape.build()
    small_table = SluiceTraining(build_static_table(small, dim), batches, settings.sparse)
    large_table = SluiceTraining(build_static_table(large, dim), batches, settings.sparse)
    same_batches = large_table.iterator
    large_table.read(shape.build(spread=large // small))
    spread_batches = large_table.iterator

    def spread(steps: int) -> None:
        large_table.iterator = spread_batches
        large_table(steps)
        large_table.iterator = same_batches

    names = [f"{small:,} rows", f"{large:,} rows, same batches", f"{large:,} rows, ids all over it"]
    found = time_in_turns(
        "growth",
        f"{settings.batch} x {settings.length}, dim {dim}, {settings.sparse}",
        dict(zip(names, (small_table, large_table, spread), strict=True)),
        batch_rows=settings.batch,
        steps=dict.fromkeys(names, 20),
        repeats=settings.repeats,
    )
    found[1].details["table_bytes"] = large_table.table_bytes
    report.measurements += found
    bars = [
        Bar(names[1], names[0], GROWTH_LIMIT, at_least=False),
        Bar(names[2], names[0], None, at_least=False),
    ]
    report.verdicts += judge_wall_time(found, bars)
    return found


def measure_against_keras(
    report: Report, settings: StepSettings, rows: int, dim: int
) -> list[Measurement]:
    """Steps with lazy Adam against `fit` with Adam, as it comes and without XLA."""
    shape = BatchShape(settings.batch, settings.length, rows)
    batches = shape.build()
    ours, peer, peer_no_xla = "Sluice, lazy Adam", "Keras fit, Adam", "Keras fit, no XLA"
    trainings: dict[str, Callable[[int], None]] = {
        ours: SluiceTraining(build_static_table(rows, dim), batches),
        peer: KerasTraining(rows, dim, batches),
        peer_no_xla: KerasTraining(rows, dim, batches, jit_compile=False),
    }
    found = time_in_turns(
        "keras",
        f"{settings.batch} x {settings.length}, {rows:,} x {dim}",
        trainings,
        batch_rows=settings.batch,
        steps={ours: 20, peer: 4, peer_no_xla: 4},
        repeats=settings.repeats,
    )
    found[0].details["unique_ids"] = shape.count_unique()
    report.measurements += found
    bars = [Bar(ours, reference, KERAS_SPEEDUP) for reference in (peer, peer_no_xla)]
    report.verdicts += judge_wall_time(found, bars)
    return found


def measure_dynamic(
    report: Report, settings: StepSettings, rows: int, dim: int
) -> list[Measurement]:
    """Steps on a dynamic table against a static one: with all keys known, and with new ones."""
    shape = BatchShape(settings.batch, settings.length, rows)
    batches = shape.build()
    growing = SluiceTraining(
        build_dynamic_table(dim, DYNAMIC_CAPACITY), shape.build_arriving(NEW_SHARE), settings.sparse
    )
    static, known = "static", "dynamic, all keys known"
    new = f"dynamic, {NEW_SHARE:.0%} of the items of a batch are new keys"
    found = time_in_turns(
        "dynamic",
        f"{settings.batch} x {settings.length}, {rows:,} x {dim}, {settings.sparse}",
        {
            static: SluiceTraining(build_static_table(rows, dim), batches, settings.sparse),
            # As large as the static one, and met once by the time that counts.
            known: SluiceTraining(build_dynamic_table(dim, rows), batches, settings.sparse),
            new: growing,
        },
        batch_rows=settings.batch,
        steps=dict.fromkeys((static, known, new), 20),
        repeats=settings.repeats,
    )
    found[2].details["rows"] = growing.table_rows
    report.measurements += found
    bars = [Bar(name, static, None, at_least=False) for name in (known, new)]
    report.verdicts += judge_wall_time(found, bars)
    return found


def judge_wall_time(measurements: Sequence[Measurement], bars: Sequence[Bar]) -> list[Verdict]:
    """Holds examples per second of wall time against bars, best round against best round."""
    by_name = {m.name: m for m in measurements}
    verdicts = []
    for bar in bars:
        measured, reference = by_name[bar.name], by_name[bar.reference]
        speedup = measured.rows_per_s / reference.rows_per_s
        wall = speedup if bar.at_least else 1 / speedup
        cpu = bar.ratio(measured, reference)
        verdicts.append(Verdict(measured.shape, bar, cpu, wall, bar.is_met(wall)))
    return verdicts


def _available_bytes() -> int:
    """Memory that can be had without swapping, caches of files included."""
    for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0

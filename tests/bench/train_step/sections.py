"""Parts of the step bench: growing tables, dynamic tables, stock Keras, profile by operation.

Trainings take turns, so that what else the machine does meets all of them alike.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import tensorflow as tf
from rich.table import Table

from tests.bench.measurements import Bar, BarVerdict, BenchReport, Measurement
from tests.bench.train_step.trainings import (
    BatchShape,
    KerasTraining,
    SluiceTraining,
    build_dynamic_table,
    build_static_table,
)

WARM_UP_STEPS = 3


def time_in_turns(
    section: str,
    shape: str,
    trainings: Mapping[str, Callable[[int], float | None]],
    *,
    batch_rows: int,
    steps: Mapping[str, int],
    repeats: int,
) -> list[Measurement]:
    """Times each training several times, one after the other; the fastest round counts.

    Args:
        section: Section of the benchmark.
        shape: What is trained on.
        trainings: Runs a number of steps, by name; returns the CPU-seconds of another process
            that ran them, else None.
        batch_rows: Rows of a step.
        steps: Steps of a round, by name.
        repeats: Rounds of each.
    """
    for train in trainings.values():
        train(WARM_UP_STEPS)
    rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in trainings}
    for _ in range(repeats):
        for name, train in trainings.items():
            wall, cpu = time.perf_counter(), time.process_time()
            elsewhere = train(steps[name]) or 0.0
            cpu = time.process_time() - cpu + elsewhere
            rounds[name].append((time.perf_counter() - wall, cpu))
    found = []
    for name, times in rounds.items():
        wall_s, cpu_s = (min(column) / steps[name] for column in zip(*times, strict=True))
        all_ms = sorted(1e3 * wall / steps[name] for wall, _ in times)
        details = {"median_ms": all_ms[len(all_ms) // 2], "rounds_ms": all_ms}
        found.append(Measurement(section, shape, name, wall_s, cpu_s, batch_rows, None, details))
    return found


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
    report: BenchReport, settings: StepSettings, small: int, large: int, dim: int
) -> list[Measurement]:
    """Steps on a small and on a large table; the same batches, and batches spread all over it."""
    state = NUMBERS_PER_WEIGHT[settings.sparse]
    needed, free = 4 * state * dim * (small + large), psutil.virtual_memory().available
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
    report: BenchReport, settings: StepSettings, rows: int, dim: int
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
    report: BenchReport, settings: StepSettings, rows: int, dim: int
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


def judge_wall_time(measurements: Sequence[Measurement], bars: Sequence[Bar]) -> list[BarVerdict]:
    """Holds examples per second of wall time against bars, best round against best round."""
    by_name = {m.name: m for m in measurements}
    verdicts = []
    for bar in bars:
        measured, reference = by_name[bar.name], by_name[bar.reference]
        speedup = measured.rows_per_s / reference.rows_per_s
        wall = speedup if bar.at_least else 1 / speedup
        cpu = bar.ratio(measured, reference)
        verdicts.append(BarVerdict(measured.shape, bar, cpu, wall, bar.is_met(wall)))
    return verdicts


# Loops and calls, which hold the others' time, and waiting for the input.
_CONTAINERS = {"While", "StatelessWhile", "PartitionedCall", "StatefulPartitionedCall"}


@dataclass(frozen=True)
class OpTime:
    """All runs of one kind of operation.

    Attributes:
        kind: TensorFlow's name of the operation.
        ms_per_step: Milliseconds of a step that kernels of it ran, over all threads.
        count_per_step: How many of them a step runs.
    """

    kind: str
    ms_per_step: float
    count_per_step: float


def profile_steps(train: Callable[[int], None], steps: int) -> list[OpTime]:
    """Runs steps under the profiler; returns the kinds of operations, the longest first.

    Args:
        train: Runs a number of steps.
        steps: Number of them.
    """
    train(2)
    with tempfile.TemporaryDirectory(prefix="sluice-profile-") as folder:
        tf.profiler.experimental.start(folder)
        train(steps)
        tf.profiler.experimental.stop()
        file = next(Path(folder).rglob("*.xplane.pb"))
        seconds, counts = _sum_by_kind(file.read_bytes())
    found = [
        OpTime(kind, 1e3 * value / steps, counts[kind] / steps) for kind, value in seconds.items()
    ]
    return sorted(found, key=lambda op: -op.ms_per_step)


def build_profile_table(title: str, ops: list[OpTime], top: int = 14) -> Table:
    """A table of the longest kinds of operations."""
    table = Table(title=title, title_justify="left")
    table.add_column("operation")
    for column in ("ms/step", "share", "runs/step"):
        table.add_column(column, justify="right")
    total = sum(op.ms_per_step for op in ops)
    for op in ops[:top]:
        share = f"{op.ms_per_step / total:.0%}"
        table.add_row(op.kind, f"{op.ms_per_step:.2f}", share, f"{op.count_per_step:.0f}")
    table.add_row("all", f"{total:.2f}", "", "")
    return table


def _sum_by_kind(content: bytes) -> tuple[Counter[str], Counter[str]]:
    """Seconds and runs by kind: kernels' events are named `node:Kind` on the host's threads."""
    # Part of TensorFlow's wheel, though of no public module: the benchmark alone needs it.
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace()
    space.ParseFromString(content)
    seconds, counts = Counter[str](), Counter[str]()
    for plane in space.planes:
        names = {key: value.name for key, value in plane.event_metadata.items()}
        for line in plane.lines:
            for event in line.events:
                node, colon, kind = names[event.metadata_id].rpartition(":")
                if not colon or not node or kind in _CONTAINERS or not _is_operation(kind):
                    continue
                seconds[kind] += event.duration_ps / 1e12
                counts[kind] += 1
    return seconds, counts


def _is_operation(kind: str) -> bool:
    """Whether it is an operation, and not a part of the runtime; `_` begins those of oneDNN."""
    return kind.startswith("_") or hasattr(tf.raw_ops, kind)

"""Where the time of a step goes, by kind of operation, from TensorFlow's own profiler."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tensorflow as tf
from rich.table import Table

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

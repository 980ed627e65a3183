"""Trainings timed in turns, so that what else the machine does meets all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from jobs.bench.tfrecord.report import Measurement

WARM_UP_STEPS = 3


def time_in_turns(
    section: str,
    shape: str,
    trainings: Mapping[str, Callable[[int], None]],
    *,
    batch_rows: int,
    steps: Mapping[str, int],
    repeats: int,
) -> list[Measurement]:
    """Times each training several times, one after the other; the fastest round counts.

    Args:
        section: Section of the benchmark.
        shape: What is trained on.
        trainings: Runs a number of steps, by name.
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
            train(steps[name])
            rounds[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    found = []
    for name, times in rounds.items():
        wall_s, cpu_s = (min(column) / steps[name] for column in zip(*times, strict=True))
        all_ms = sorted(1e3 * wall / steps[name] for wall, _ in times)
        details = {"median_ms": all_ms[len(all_ms) // 2], "rounds_ms": all_ms}
        found.append(Measurement(section, shape, name, wall_s, cpu_s, batch_rows, None, details))
    return found

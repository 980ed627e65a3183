"""Wall and CPU time of a function, of a tree of processes, of a driver in a fresh process.

A driver prints its result as one line of JSON, the last of its output.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

_MIN_ROUND_S = 0.02
_SAMPLE_S = 2.0  # a look at every process costs milliseconds, which would count as work


@dataclass(frozen=True)
class Times:
    """Seconds of one run.

    Attributes:
        wall_s: By the clock on the wall.
        cpu_s: Of the processor, user and system.
    """

    wall_s: float
    cpu_s: float


def time_best(work: Callable[[], Any], repeats: int) -> Times:
    """Least CPU and wall time of several runs in this process, after one that warms up.

    Work that is shorter than the clock's grain is run several times per round.

    Args:
        work: What to time.
        repeats: Timed rounds, 1 or more.
    """
    work()
    start = time.perf_counter()
    work()
    calls = max(1, int(_MIN_ROUND_S / max(time.perf_counter() - start, 1e-9)))
    rounds = []
    gc.collect()
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(calls):
            work()
        rounds.append((time.perf_counter() - wall, time.process_time() - cpu))
    return Times(min(w for w, _ in rounds) / calls, min(c for _, c in rounds) / calls)


@contextlib.contextmanager
def pin_to_one_core() -> Iterator[None]:
    """Keeps this process, and those that it starts, to one core while the block runs."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def process_tree(root: int) -> dict[int, psutil.Process]:
    """A process and all that descend from it, by their numbers."""
    process = psutil.Process(root)
    return {found.pid: found for found in (process, *process.children(recursive=True))}


def tree_cpu_s(root: int) -> float:
    """CPU seconds so far, user and system, of a process and its descendants.

    Descendants that have ended count too: they are part of the children's time of the process
    that waited for them.
    """
    total = 0.0
    for process in process_tree(root).values():
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def time_tree(work: Callable[[], Any]) -> Times:
    """Wall time of a run, and the CPU time that this process and its descendants spent on it."""
    gc.collect()
    cpu, wall = tree_cpu_s(os.getpid()), time.perf_counter()
    work()
    wall_s = time.perf_counter() - wall
    return Times(wall_s, tree_cpu_s(os.getpid()) - cpu)


@dataclass
class PeakMemory:
    """Samples the peak resident size of this process's descendants, by kind, while a block runs.

    Attributes:
        bytes: Largest peak of any one process: `python_worker`, `jvm`, `other`.
    """

    bytes: dict[str, int] = field(default_factory=dict)

    def __enter__(self) -> PeakMemory:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()

    def _watch(self) -> None:
        while not self._stop.wait(_SAMPLE_S):
            self._sample()

    def _sample(self) -> None:
        for pid, process in process_tree(os.getpid()).items():
            peak = read_peak_rss(pid)
            if pid != os.getpid() and peak is not None:
                kind = _kind_of(process)
                self.bytes[kind] = max(self.bytes.get(kind, 0), peak)


def read_peak_rss(pid: int) -> int | None:
    """Peak resident bytes of a process, None where it has ended; psutil tells no peak on Linux."""
    return _read_status(pid, "VmHWM")


def read_own_memory() -> int:
    """Resident bytes of this process that are no file's.

    Pages of libraries come and go with what else the machine does; these stay.
    """
    own = _read_status(os.getpid(), "RssAnon")
    return psutil.Process().memory_info().rss if own is None else own


def _read_status(pid: int, name: str) -> int | None:
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(rf"{name}:\s+(\d+) kB", status)
    return int(found[1]) * 1024 if found else None


def release_free_memory() -> None:
    """Gives the system back what this process has freed, so that it is not taken twice."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # of glibc alone
        ctypes.CDLL(None).malloc_trim(0)


def _kind_of(process: psutil.Process) -> str:
    try:
        command = process.cmdline()
    except psutil.NoSuchProcess:
        return "other"
    if any("pyspark.daemon" in part or "pyspark.worker" in part for part in command):
        return "python_worker"
    return "jvm" if command and "java" in command[0] else "other"


REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class DriverResult:
    """How a process ended.

    Attributes:
        returncode: Its exit code.
        stdout: What it printed.
        errors: The same on standard error.
    """

    returncode: int
    stdout: str
    errors: str

    @property
    def value(self) -> dict[str, Any]:
        """The last line of what it printed."""
        return dict(json.loads(self.stdout.splitlines()[-1]))


def run_driver_process(module: str, job: dict[str, Any]) -> DriverResult:
    """Runs `python -m module JOB_JSON` and waits for it.

    Args:
        module: Module of this code.
        job: What it is to do, as JSON values.
    """
    # In a file: a job that fails may have printed more than a pipe holds.
    with tempfile.TemporaryFile("w+") as errors:
        done = subprocess.run(
            [sys.executable, "-m", module, json.dumps(job)],
            stdout=subprocess.PIPE, stderr=errors, text=True, check=False, cwd=REPOSITORY,
        )  # fmt: skip
        errors.seek(0)
        return DriverResult(done.returncode, done.stdout, errors.read())

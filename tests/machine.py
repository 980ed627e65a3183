"""What tests need of the machine: disks that are easily filled; and how work grows with input."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

# Set by `make test-all`.
IS_EXHAUSTIVE = bool(os.environ.get("SLUICE_TEST_ALL"))
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def examples(exhaustive: int) -> int:
    """How many examples a property is tried with: all in `make test-all`, a sixth elsewhere."""
    return exhaustive if IS_EXHAUSTIVE else max(1, exhaustive // 6)


def some_of(rows: Iterable[tuple[Any, ...]], kept: Collection[tuple[Any, ...]]) -> list[Any]:
    """Rows of a matrix: `make test` tries those to keep, `make test-all` the others too."""
    return [pytest.param(*row, marks=() if row in kept else pytest.mark.exhaustive) for row in rows]


@contextmanager
def mount_small_disk(directory: Path, size_bytes: int) -> Iterator[Path]:
    """Mounts a file system of its own; skips the test where that is not allowed.

    At the end it goes out of sight at once, whoever has a file there open still: what a failed
    run has left to the garbage collector is not what the test is about.
    """
    disk = directory / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a file system of a few megabytes cannot be mounted here (needs root)")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(disk: Path, leave_bytes: int) -> Path:
    """Fills a disk but for some bytes and returns the file that does so."""
    free = os.statvfs(disk)
    filler = disk / "filler"
    filler.write_bytes(b"\0" * max(0, free.f_bavail * free.f_frsize - leave_bytes))
    return filler


def growth(prepare: Callable[[int], Callable[[], Any]], few: int, many: int) -> float:
    """Returns how many times Python's instructions of some work grow from `few` to `many`.

    Args:
        prepare: Makes the work of a given size; its own instructions do not count.
        few: A size.
        many: A larger one.
    """
    return _count_instructions(prepare(many)) / _count_instructions(prepare(few))


def _count_instructions(work: Callable[[], Any]) -> int:
    count, before = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count

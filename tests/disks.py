"""Disks that are easily filled."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


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

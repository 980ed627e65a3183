"""TensorFlow's runtime: its seeds, the memory it holds, full disks and memory as errors of ours."""

from __future__ import annotations

import random
import re
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import tensorflow as tf

from conf.errors import InternalError

# What TensorFlow writes around the words of an error: the node before, the operation after.
_NODE = re.compile(r"^\{\{[^}]*\}\}\s*|\s*\[Op:\w+\]")


def seed_everything(seed: int) -> None:
    """Seeds Python, NumPy and TensorFlow."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    tf.random.set_seed(seed)


@contextmanager
def disk_errors(what: str, fix: str) -> Iterator[None]:
    """Turns a write that failed inside the block into an error that names what was written.

    TensorFlow raises its own errors, not `OSError`, where a disk is full or a path is not
    writable.

    Args:
        what: The write that failed, one sentence.
        fix: The remedy.

    Raises:
        InternalError: The disk is full, or there is no permission.
    """
    try:
        yield
    except (tf.errors.OpError, OSError) as error:
        raise InternalError(what, received=describe_error(error), fix=fix) from error


def describe_error(error: Exception) -> str:
    """Returns the first line of an error's message, or its type where it has none."""
    lines = str(error).splitlines()
    return (lines and _NODE.sub("", lines[0])) or type(error).__name__


# TensorFlow raises one error for memory and for disks.
_FULL_DISK = "No space left on device"


def peak_memory_bytes() -> int:
    """Returns the most memory that this process has held, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts kibibytes.


def free_memory_bytes() -> int | None:
    """Returns the memory that the machine has left, its container allowing; None: not known."""
    meminfo, limit = Path("/proc/meminfo"), Path("/sys/fs/cgroup/memory.max")
    if not meminfo.exists():
        return None
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    allowed = limit.read_text().strip() if limit.exists() else "max"
    return free if allowed == "max" else min(free, int(allowed))


def peak_device_memory_bytes(kind: str = "GPU") -> dict[str, int]:
    """Returns the most memory that TensorFlow has held on each device of this process, in bytes.

    Args:
        kind: Kind of device. The memory of GPUs is always counted, that of CPUs (else 0) once
            something such as a profile has asked TensorFlow for it.

    Returns:
        Bytes by device, such as `gpu 0`; empty where there is none.
    """
    names = [
        device.name.removeprefix("/device:") for device in tf.config.list_logical_devices(kind)
    ]
    return {name.lower().replace(":", " "): _read_peak_bytes(name) for name in names}


def _read_peak_bytes(device: str) -> int:
    try:
        return int(tf.config.experimental.get_memory_info(device)["peak"])
    except ValueError:  # Some allocators of CPUs do not count.
        return 0


@contextmanager
def memory_errors() -> Iterator[None]:
    """Turns a lack of memory inside the block into an error that says what takes less.

    Raises:
        InternalError: A device, or the machine, has too little memory.
    """
    try:
        yield
    except (tf.errors.ResourceExhaustedError, MemoryError) as error:
        if _FULL_DISK in str(error):
            raise
        raise InternalError(
            "there is too little memory for this model and its batches",
            received=describe_error(error),
            fix="lower input.batch_size, or raise optimizer.accumulate_steps (a batch in parts); "
            "for tables, lower model.embedding_dim or the capacity of dynamic ones, set their "
            "device_rows, or share them between workers by shard=workers; with more memory, "
            "--resume goes on",
        ) from error

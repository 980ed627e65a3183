"""A lock on a file of this machine, or of a shared file system that carries `flock` between them.

The kernel frees it when its process ends, however it ends. The lock file stays: removing it would
let two processes lock two different files.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from conf.errors import SluiceError


@contextmanager
def hold_file_lock(file: Path, refusal: SluiceError | None = None) -> Iterator[None]:
    """Holds a lock while the block runs.

    Args:
        file: Lock file, made where it is not there; its directory must exist.
        refusal: Error for the case that another holder has it; None waits for that one to end.

    Raises:
        SluiceError: `refusal`.
        OSError: The file system has no locks, or the file cannot be made.
    """
    # Imported late: Spark's executors import `conf` and need not have the library.
    from filelock import FileLock, Timeout

    # A soft lock, its answer to a file system without locks, would outlive a killed process.
    lock = FileLock(file, fallback_to_soft=False)
    try:
        lock.acquire(blocking=refusal is None)
    except Timeout as error:
        if refusal is None:
            raise
        raise refusal from error
    try:
        yield
    finally:
        lock.release()

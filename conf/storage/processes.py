"""Which process something belongs to, whether it is dead, and the sweep of what the dead left."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from conf.errors import SluiceError

STALE_S = 24 * 3600.0
"""Age from which the leftovers of a process that nobody can ask are taken for a dead one's."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

logger = logging.getLogger("sluice.publication")


@dataclass(frozen=True)
class Owner:
    """The process without which a job cannot commit: the driver's JVM, or its Python."""

    boot_id: str
    pid_namespace: str
    pid: int
    start_ticks: int


def find_this_process() -> Owner | None:
    """Describes this process; None where the host does not tell."""
    with suppress(OSError):
        return describe_process(os.getpid())
    return None


def describe_self() -> dict[str, Any] | None:
    """Describes this process as JSON values."""
    owner = find_this_process()
    return None if owner is None else asdict(owner)


def find_jvm() -> Owner | None:
    """Finds the driver's JVM among this process's ancestors; None: only age can show a dead job."""
    pid = os.getpid()
    with suppress(OSError):
        while pid > 1:
            if _executable(pid) == "java":
                return describe_process(pid)
            pid = int(_stat_fields(pid)[1])
    return None


def describe_process(pid: int) -> Owner:
    """Describes a live process of this host."""
    boot_id, namespace = _BOOT_ID.read_text().strip(), Path("/proc/self/ns/pid").readlink()
    return Owner(boot_id, str(namespace), pid, int(_stat_fields(pid)[19]))


def is_dead(owner: Owner) -> bool:
    """Whether a process has certainly ended; False where that cannot be known from here."""
    here = describe_process(os.getpid())
    if (here.boot_id, here.pid_namespace) != (owner.boot_id, owner.pid_namespace):
        return False
    try:
        fields = _stat_fields(owner.pid)
    except FileNotFoundError:
        return True
    return fields[0] == "Z" or int(fields[19]) != owner.start_ticks


def _executable(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def _stat_fields(pid: int) -> list[str]:
    """Fields of `/proc/<pid>/stat` from the state on; the name before may hold anything."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def is_abandoned(owner: object, moved_s: float, after_s: float = STALE_S) -> bool:
    """Whether an owner has ended on this host, or nothing of it has moved for long."""
    with suppress(OSError, TypeError):
        known = Owner(**owner) if isinstance(owner, dict) else owner
        if isinstance(known, Owner) and is_dead(known):
            return True
    return time.time() - moved_s > after_s


@dataclass(frozen=True)
class Leftover:
    """What a process has aside, or left when it died: the process, and when it moved."""

    name: str
    owner: object  # an `Owner`, or what `describe_self` returned there; None: not known
    moved_s: float


def sweep_dead(found: Iterable[Leftover], remove: Callable[[str], object]) -> list[str]:
    """Removes what dead processes left: they have ended, or did nothing for `STALE_S`."""
    swept = []
    for left in found:
        if is_abandoned(left.owner, left.moved_s):
            try:
                remove(left.name)
                swept.append(left.name)
            except OSError as error:
                logger.warning("%s is left to the next writer: %s", left.name, error)
    return swept


@contextmanager
def hold_file_lock(file: Path, refusal: SluiceError | None = None) -> Iterator[None]:
    """Holds a lock while the block runs; without a refusal it waits for another holder to end.

    The file stays: removing it would let two processes lock two different files.
    """
    # Imported late: Spark's executors import `conf` and need not have the library.
    from filelock import FileLock, Timeout

    # A soft lock, its answer to a file system without locks, would outlive a killed process.
    lock = FileLock(file, fallback_to_soft=False)
    try:
        lock.acquire(blocking=refusal is None)
    except Timeout as error:
        raise (refusal or error) from error
    try:
        yield
    finally:
        lock.release()

"""Which process something belongs to, whether it is dead, and the sweep of what the dead left.

What a dead process left must not be taken for a live one's, nor the other way round.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

STALE_S = 24 * 3600.0
"""Age from which the leftovers of a process that nobody can ask are taken for a dead one's."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

logger = logging.getLogger("sluice.publication")


@dataclass(frozen=True)
class Owner:
    """The process without which a job cannot commit: the driver's JVM, or its Python.

    Attributes:
        boot_id: Id of the host's current run.
        pid_namespace: Namespace in which `pid` counts.
        pid: Process id.
        start_ticks: When the process began; tells it from a later one of the same id.
    """

    boot_id: str
    pid_namespace: str
    pid: int
    start_ticks: int


def find_this_process() -> Owner | None:
    """Describes this process; None where the host does not tell."""
    try:
        return describe_process(os.getpid())
    except OSError:
        return None


def describe_self() -> dict[str, Any] | None:
    """Describes this process as JSON values; None where the host does not tell."""
    owner = find_this_process()
    return None if owner is None else asdict(owner)


def has_surely_ended(record: object) -> bool:
    """Whether an owner, or what `describe_self` returned, has certainly ended."""
    try:
        if isinstance(record, Owner):
            return is_dead(record)
        return isinstance(record, dict) and is_dead(Owner(**record))
    except (OSError, TypeError):
        return False


def is_abandoned(owner: object, moved_s: float, after_s: float = STALE_S) -> bool:
    """Whether an owner has ended on this host, or nothing of it has moved for long."""
    return has_surely_ended(owner) or time.time() - moved_s > after_s


@dataclass(frozen=True)
class Leftover:
    """What a process has aside, or left there when it died.

    Attributes:
        name: What to call it.
        owner: The process, or what `describe_self` returned there; None: not known.
        moved_s: When something of it was last seen to move, in seconds of the epoch.
    """

    name: str
    owner: object
    moved_s: float


def sweep_dead(found: Iterable[Leftover], remove: Callable[[str], object]) -> list[str]:
    """Removes what dead processes left: they have ended, or did nothing for `STALE_S`.

    What cannot be removed now is left to the next call.
    """
    swept = []
    for left in found:
        if is_abandoned(left.owner, left.moved_s):
            try:
                remove(left.name)
                swept.append(left.name)
            except OSError as error:
                logger.warning("%s is left to the next writer: %s", left.name, error)
    return swept


def find_jvm() -> Owner | None:
    """Finds the driver's JVM among this process's ancestors; None: only age can show a dead job.

    A Python process is not taken for it, as the driver's come and go.
    """
    try:
        pid = os.getpid()
        while pid > 1 and _executable(pid) != "java":
            pid = int(_stat_fields(pid)[1])
        return describe_process(pid) if pid > 1 else None
    except OSError:
        return None


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


def describe_process(pid: int) -> Owner:
    """Describes a live process of this host."""
    return Owner(
        _BOOT_ID.read_text().strip(),
        str(Path("/proc/self/ns/pid").readlink()),
        pid,
        int(_stat_fields(pid)[19]),
    )


def _executable(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def _stat_fields(pid: int) -> list[str]:
    """Fields of `/proc/<pid>/stat` from the state on; the name before may hold anything."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()

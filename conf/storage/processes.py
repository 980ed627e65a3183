"""Which process something belongs to, and whether it is dead.

What a dead process left must not be taken for a live one's, nor the other way round.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


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

    def dumps(self) -> str:
        """Returns it as JSON text."""
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> Owner:
        """Parses what `dumps` returned.

        Raises:
            ValueError: It is something else.
        """
        try:
            return cls(**json.loads(text))
        except TypeError as error:
            raise ValueError("no owner record") from error


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
    """Whether what `describe_self` returned belongs to a process that has certainly ended."""
    try:
        return isinstance(record, dict) and is_dead(Owner(**record))
    except (OSError, TypeError):
        return False


def find_jvm() -> Owner | None:
    """Finds the driver's JVM among this process's ancestors.

    Returns:
        None where there is none, or the host does not tell: then only age can show that the job
        is dead. A Python process is not taken for it, as the driver's come and go.
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
    """Describes a live process of this host.

    Raises:
        OSError: There is none, or the host has no `/proc`.
    """
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

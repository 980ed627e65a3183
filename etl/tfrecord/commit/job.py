"""A write job: its save mode, what it found at its start, and the process that it belongs to.

Two jobs at once must not lose data, and what a dead one left must not be taken for a live one's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from conf.errors import ConfigError, InputDataError, UpstreamNotReadyError
from etl.tfrecord.commit.output_manifest import COMMIT_FILE, read_output_manifest
from etl.tfrecord.files.data_files import changed_partitions, digest_partitions, list_data_files

SaveMode = Literal["append", "overwrite", "errorifexists", "ignore"]
SUCCESS_FILE = "_SUCCESS"


@dataclass(frozen=True)
class Baseline:
    """What a directory held when a job began.

    Attributes:
        digests: Digest of the shards by partition directory; empty unless the job overwrites.
        job_ids: Jobs that its manifest named.
    """

    digests: Mapping[str, str]
    job_ids: tuple[str, ...]

    def dumps(self) -> str:
        """Returns it as JSON text."""
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> Baseline:
        """Parses what `dumps` returned."""
        data = json.loads(text)
        return cls(data["digests"], tuple(data["job_ids"]))


def holds_output(root: Path) -> bool:
    """Whether a directory holds the output of a job, also one that wrote no row."""
    marked = any((root / name).exists() for name in (SUCCESS_FILE, COMMIT_FILE))
    return marked or bool(list_data_files(root))


def take_baseline(root: Path, mode: SaveMode) -> Baseline:
    """Looks at the output directory at the start of a job.

    Args:
        root: Output directory; need not exist.
        mode: Save mode of the job.

    Raises:
        ConfigError: The mode is `errorifexists`, and there is output; or a file lies there.
    """
    if root.exists() and not root.is_dir():
        raise ConfigError(
            "the output is a file, not a directory",
            received=root,
            fix="remove the file, or write elsewhere",
        )
    if mode == "errorifexists" and holds_output(root):
        raise refuse_output(root)
    return Baseline(digest_partitions(root) if mode == "overwrite" else {}, _list_job_ids(root))


def check_baseline(
    root: Path, mode: SaveMode, baseline: Baseline, replaced: set[str] | None
) -> None:
    """Refuses to replace what another job has published since the start of this one.

    Args:
        root: Output directory, under its lock.
        mode: Save mode of the job.
        baseline: What `take_baseline` returned at its start.
        replaced: Partition directories that the job replaces, or None for all.

    Raises:
        UpstreamNotReadyError: There is such output; names the jobs that published it.
    """
    if mode == "append":
        return
    if mode == "overwrite":
        changed = changed_partitions(baseline.digests, digest_partitions(root), replaced)
    else:
        changed = [""] if holds_output(root) else []
    if not changed:
        return
    since = sorted(set(_list_job_ids(root)) - set(baseline.job_ids))
    raise refuse_changed(root, changed, since)


def refuse_output(where: object) -> ConfigError:
    """Builds the error for output that `errorifexists` protects."""
    return ConfigError(
        "the output directory holds data already",
        received=where,
        fix="write elsewhere, or choose mode append, overwrite or ignore",
    )


def refuse_changed(
    root: object, changed: Sequence[str], job_ids: Sequence[str]
) -> UpstreamNotReadyError:
    """Builds the error for output of another job that this one would replace unseen.

    Args:
        root: Output directory.
        changed: Partition directories whose shards have changed, "" for the root itself.
        job_ids: Jobs that published them, as far as that is known.
    """
    where = ", ".join(directory or "." for directory in changed[:5])
    return UpstreamNotReadyError(
        "another job has published in this directory since this one began; nothing of this job "
        "was published",
        received=f"{root}: {where}: published by "
        + (f"job {', '.join(job_ids)}" if job_ids else "a job that left no manifest"),
        fix="look at what the other job wrote, and run this one again if its data is to win",
    )


def _list_job_ids(root: Path) -> tuple[str, ...]:
    try:
        committed = read_output_manifest(root)
    except InputDataError:  # only a name in a message depends on it
        return ()
    return tuple(sorted({shard.job_id for shard in committed.shards})) if committed else ()


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

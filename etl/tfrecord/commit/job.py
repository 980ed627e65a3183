"""A write job: its save mode, and what it found at its start: two at once must not lose data."""

from __future__ import annotations

import json
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

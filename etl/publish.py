"""Publishing a dataset version: staged aside, moved into place whole, pointed at last."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from conf.dataset import STAGING_PREFIX, DatasetPaths, sync_directory, write_text_atomic
from conf.errors import UpstreamNotReadyError
from conf.manifest import MANIFEST_FILE, Manifest

LOCK_FILE = ".lock"


@contextmanager
def hold_lock(paths: DatasetPaths) -> Iterator[None]:
    """Holds the dataset's lock, so that only one build at a time stages and sweeps.

    The kernel frees it when the process ends, however it ends.

    Raises:
        UpstreamNotReadyError: Another build holds it.
    """
    paths.base.mkdir(parents=True, exist_ok=True)
    with (paths.base / LOCK_FILE).open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UpstreamNotReadyError(
                f"another build of dataset {paths.name!r} is running",
                received=paths.base,
                fix="wait for it to end, or build under another name or root",
            ) from error
        yield


def new_version_id(config_sha256: str, now: datetime | None = None) -> str:
    """Returns `<UTC time>-<config hash>`: sorts by time, shows what made it."""
    moment = (now or datetime.now(UTC)).strftime("%Y%m%dT%H%M%S%fZ")
    return f"{moment}-{config_sha256[:8]}"


def sweep_leftovers(paths: DatasetPaths) -> list[str]:
    """Removes what dead builds left; call it under the lock only.

    Returns:
        Names of the removed directories.
    """
    if not paths.versions.is_dir():
        return []
    dead = sorted(
        entry for entry in paths.versions.iterdir() if entry.name.startswith(STAGING_PREFIX)
    )
    for entry in dead:
        shutil.rmtree(entry)
    for temporary in paths.base.glob(".*.tmp"):
        temporary.unlink()
    return [entry.name for entry in dead]


@contextmanager
def stage_version(paths: DatasetPaths, version_id: str) -> Iterator[Path]:
    """Gives a directory to build in, removed again if the build fails."""
    staging = paths.staging(version_id)
    staging.mkdir(parents=True)
    try:
        yield staging
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def publish_version(paths: DatasetPaths, staging: Path, manifest: Manifest) -> Path:
    """Publishes a complete staged version and makes it the current one.

    The order is the promise: files, manifest, directory name, pointer. Killed between any two
    of them, readers keep the last version.

    Returns:
        The version's directory.
    """
    for entry in sorted(staging.rglob("*")):
        if entry.is_dir():
            sync_directory(entry)
    write_text_atomic(staging / MANIFEST_FILE, manifest.dumps())
    version = paths.version(manifest.dataset_version)
    staging.rename(version)
    sync_directory(paths.versions)
    write_text_atomic(paths.current, manifest.dataset_version + "\n")
    return version

"""Publishing a dataset version: staged aside, moved into place whole, pointed at last.

Killed at any moment, a build leaves the last version as it was; its leftovers are swept by the
next one. How entries and pointers do that: `conf.publication`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from conf.artefacts.dataset import DatasetPaths, published_versions
from conf.errors import ConfigError, InputDataError, UpstreamNotReadyError
from conf.manifest import MANIFEST_FILE, Manifest
from conf.paths import CURRENT_FILE, ReadablePath
from conf.publication.entries import (
    hold_entries,
    remove_entry,
    set_aside,
    stage_entry,
    sweep_entries,
)
from conf.publication.pointer import CLAIM_FILE, hold_claim, publish_entry, read_pointer
from conf.storage.atomic_output import UNFINISHED_SUFFIX, write_text_atomic
from etl.tfrecord.commit.directory_view import TEMPORARY_PREFIX


@contextmanager
def hold_lock(paths: DatasetPaths) -> Iterator[None]:
    """Holds the dataset's lock, so that only one build at a time stages and sweeps."""
    try:
        paths.base.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError(
            "the folder of the dataset cannot be made: a file stands in its place",
            received=paths.base,
            fix="name another folder by output.root, or move the file away",
        ) from error
    refusal = UpstreamNotReadyError(
        f"another build of dataset {paths.name!r} is running",
        received=paths.base,
        fix="wait for it to end, or build under another name or root",
    )
    with hold_entries(paths.base, refusal):
        yield


def sweep_leftovers(paths: DatasetPaths) -> list[str]:
    """Removes what dead builds left; call it under the lock only."""
    unfinished = [
        file
        for pattern in (f".*{UNFINISHED_SUFFIX}", f"{CLAIM_FILE}.*")
        for file in paths.base.glob(pattern)
    ]
    if unfinished:
        with hold_claim(paths.base / CLAIM_FILE):  # A roll-back may be writing the pointer.
            for file in unfinished:
                file.unlink(missing_ok=True)
    return sweep_entries(paths.versions)


def new_version_id(digest: str, now: datetime | None = None) -> str:
    """Returns `<UTC time>-<digest>`: sorts by time, shows what made it."""
    moment = (now or datetime.now(UTC)).strftime("%Y%m%dT%H%M%S%fZ")
    return f"{moment}-{digest[:8]}"


@contextmanager
def stage_version(paths: DatasetPaths, version_id: str) -> Iterator[Path]:
    """Gives a directory to build in, removed again if the build fails."""
    with stage_entry(paths.versions, version_id) as staging:
        yield staging


def publish_version(paths: DatasetPaths, staging: Path, manifest: Manifest) -> Path:
    """Publishes a complete staged version and makes it the current one.

    The order is the promise: files, manifest, directory name, pointer. Killed between any two
    of them, readers keep the last version.
    """
    _remove_unfinished(staging)
    write_text_atomic(staging / MANIFEST_FILE, manifest.dumps())
    version = paths.version(manifest.dataset_version)
    publish_entry(paths.base, staging, version, manifest.parent)
    return version


def _remove_unfinished(staging: Path) -> None:
    """Removes what killed and late tasks left, which no manifest lists."""
    for temporary in staging.glob(f"{TEMPORARY_PREFIX}*"):
        shutil.rmtree(temporary)
    for unfinished in staging.rglob(f".*{UNFINISHED_SUFFIX}"):
        unfinished.unlink(missing_ok=True)


def read_current(paths: DatasetPaths) -> str | None:
    """Id that `CURRENT` holds, or None where there is none."""
    return check_current(read_pointer(paths.base), paths.base)


def check_current(current: str | None, dataset: ReadablePath) -> str | None:
    """Refuses an empty `CURRENT`: taken for none, it would let the next build begin anew."""
    if current == "":
        raise InputDataError(
            f"{CURRENT_FILE} of the dataset is empty",
            received=dataset / CURRENT_FILE,
            allowed=", ".join(published_versions(dataset)) or "the id of a published version",
            fix="name one by `sluice versions rollback --to`; without versions, remove the file",
        )
    return current


def remove_version(paths: DatasetPaths, version_id: str) -> None:
    """Removes a version that is not current; call it under the lock."""
    with hold_claim(paths.base / CLAIM_FILE) as claim:
        if read_current(paths) == version_id:
            raise UpstreamNotReadyError("the version has become current", received=version_id)
        claim.check()
        trash = set_aside(paths.version(version_id))
    remove_entry(trash)

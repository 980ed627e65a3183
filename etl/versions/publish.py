"""Publishing a dataset version: staged aside, moved into place whole, pointed at last.

Killed at any moment, a build leaves the last version as it was; its leftovers are swept by the
next one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from conf.artefacts.dataset import DatasetPaths, published_versions
from conf.errors import InputDataError, UpstreamNotReadyError
from conf.manifest import MANIFEST_FILE, Manifest
from conf.paths import CURRENT_FILE, ReadablePath
from conf.storage.atomic_output import UNFINISHED_SUFFIX, sync_directory, write_text_atomic
from etl.tfrecord.commit.local_commit import TEMPORARY_PREFIX
from etl.versions.locks import OWNER_FILE, TRASH_PREFIX, describe_self, hold_claim, remove_directory

CLAIM_FILE = ".publishing"


def new_version_id(digest: str, now: datetime | None = None) -> str:
    """Returns `<UTC time>-<digest>`: sorts by time, shows what made it."""
    moment = (now or datetime.now(UTC)).strftime("%Y%m%dT%H%M%S%fZ")
    return f"{moment}-{digest[:8]}"


@contextmanager
def stage_version(paths: DatasetPaths, version_id: str) -> Iterator[Path]:
    """Gives a directory to build in, removed again if the build fails."""
    staging = paths.staging(version_id)
    staging.mkdir(parents=True)
    try:
        (staging / OWNER_FILE).write_text(json.dumps(describe_self()), encoding="utf-8")
        yield staging
    except BaseException:
        with suppress(OSError):
            remove_directory(staging)
        raise


def publish_version(paths: DatasetPaths, staging: Path, manifest: Manifest) -> Path:
    """Publishes a complete staged version and makes it the current one.

    The order is the promise: files, manifest, directory name, pointer. Killed between any two
    of them, readers keep the last version.

    Args:
        paths: The dataset.
        staging: The version's files, complete.
        manifest: Its manifest; `parent` is the version that was current when the build began.

    Returns:
        The version's directory.

    Raises:
        UpstreamNotReadyError: `parent` is no longer current; nothing was published.
    """
    (staging / OWNER_FILE).unlink(missing_ok=True)
    _remove_unfinished(staging)
    for entry in sorted(staging.rglob("*")):
        if entry.is_dir():
            sync_directory(entry)
    write_text_atomic(staging / MANIFEST_FILE, manifest.dumps())
    version = paths.version(manifest.dataset_version)
    with hold_claim(paths.base / CLAIM_FILE) as claim:
        current = read_current(paths)
        if current != manifest.parent:
            raise refuse_overtaken(current, manifest.parent)
        claim.check()
        staging.rename(version)
        try:
            sync_directory(paths.versions)
            write_text_atomic(paths.current, manifest.dataset_version + "\n")
        except OSError:
            # It never was the current one, so it is not published: the caller removes it.
            if read_current(paths) != manifest.dataset_version:
                version.rename(staging)
            raise
    return version


def refuse_overtaken(current: str | None, parent: str | None) -> UpstreamNotReadyError:
    """Builds the error of a version whose parent is no longer current."""
    return UpstreamNotReadyError(
        "another version has become current since this build began; "
        "nothing of this build was published",
        received=current or "no current version",
        allowed=parent or "no current version",
        fix="run the build again: it starts from the version that is current then",
    )


def _remove_unfinished(staging: Path) -> None:
    """Removes what killed and late tasks left, which no manifest lists."""
    for temporary in staging.glob(f"{TEMPORARY_PREFIX}*"):
        shutil.rmtree(temporary)
    for unfinished in staging.rglob(f".*{UNFINISHED_SUFFIX}"):
        unfinished.unlink(missing_ok=True)


def read_current(paths: DatasetPaths) -> str | None:
    """Id that `CURRENT` holds, or None where there is none.

    Raises:
        InputDataError: It is empty.
    """
    try:
        current = paths.current.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return None
    check_current(current, paths.base)
    return current


def check_current(current: str, dataset: ReadablePath) -> None:
    """Refuses an empty `CURRENT`: taken for none, it would let the next build begin anew.

    Raises:
        InputDataError: It is empty.
    """
    if not current:
        raise InputDataError(
            f"{CURRENT_FILE} of the dataset is empty",
            received=dataset / CURRENT_FILE,
            allowed=", ".join(published_versions(dataset)) or "the id of a published version",
            fix="name one by `sluice versions rollback --to`; without versions, remove the file",
        )


def make_current(paths: DatasetPaths, version_id: str) -> None:
    """Lets readers take another published version; they see the old one or the new.

    Raises:
        UpstreamNotReadyError: Another process is publishing and does not end.
    """
    with hold_claim(paths.base / CLAIM_FILE) as claim:
        claim.check()
        write_text_atomic(paths.current, version_id + "\n")


def remove_version(paths: DatasetPaths, version_id: str) -> None:
    """Removes a version that is not current; call it under the lock.

    It is renamed first: a half-removed version never looks like one.

    Raises:
        UpstreamNotReadyError: It has become current meanwhile.
    """
    trash = paths.versions / f"{TRASH_PREFIX}{version_id}"
    with hold_claim(paths.base / CLAIM_FILE):
        if read_current(paths) == version_id:
            raise UpstreamNotReadyError("the version has become current", received=version_id)
        paths.version(version_id).rename(trash)
    shutil.rmtree(trash)

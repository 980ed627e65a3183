"""Who may stage, sweep and publish versions of a dataset, and what a dead build has left.

Two protocols: `hold_lock` for a whole build, by a lock of the file system; `hold_claim` for the
moment of a publication, which holds where such locks do not reach other machines. The claim is
a file that is created exclusively (`O_CREAT | O_EXCL`), which NFS from version 3 on, SMB, Lustre
and their like keep atomic between machines.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from conf.artefacts.dataset import STAGING_PREFIX, DatasetPaths
from conf.errors import ConfigError, UpstreamNotReadyError
from conf.storage.atomic_output import UNFINISHED_SUFFIX
from conf.storage.locks import hold_file_lock
from conf.storage.processes import Owner, find_this_process, is_dead

logger = logging.getLogger("sluice.build")

LOCK_FILE = ".lock"
OWNER_FILE = ".owner"
TRASH_PREFIX = ".trash-"
FOREIGN_STALE_S = 24 * 3600.0
"""Age from which the leftovers of a process that cannot be asked are taken for a dead one's."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


@contextlib.contextmanager
def hold_lock(paths: DatasetPaths) -> Iterator[None]:
    """Holds the dataset's lock, so that only one build at a time stages and sweeps.

    Where the file system has no locks, or they do not reach other machines, `publish_version`
    refuses the later of two builds.

    Raises:
        UpstreamNotReadyError: Another build holds it.
        ConfigError: A file stands where the dataset's folder would be.
    """
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
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(hold_file_lock(paths.base / LOCK_FILE, refusal))
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            logger.warning("this file system has no locks: two builds meet at the publication only")
        yield


def sweep_leftovers(paths: DatasetPaths) -> list[str]:
    """Removes what dead builds left; call it under the lock only.

    What belongs to a process of another machine, which the lock may not reach, stays for
    `FOREIGN_STALE_S`.

    Returns:
        Names of the removed directories.
    """
    if not paths.versions.is_dir():
        return []
    dead = sorted(
        entry
        for entry in paths.versions.iterdir()
        if entry.name.startswith(TRASH_PREFIX)
        or (entry.name.startswith(STAGING_PREFIX) and _is_dead(entry))
    )
    for entry in dead:
        remove_directory(entry)
    for unfinished in paths.base.glob(f".*{UNFINISHED_SUFFIX}"):
        unfinished.unlink()
    return [entry.name for entry in dead]


def remove_directory(entry: Path) -> None:
    """Removes a version, or the staging directory of one, by a rename first.

    A half-removed version never looks like one, and a task that still writes to a dead build's
    directory finds it gone, and cannot add to what is being removed.
    """
    trash = entry
    if not entry.name.startswith(TRASH_PREFIX):
        trash = entry.with_name(f"{TRASH_PREFIX}{entry.name}")
        entry.rename(trash)
    while trash.exists():
        # A process that the dead build started may be removing its own part at the same time.
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(trash)


def _is_dead(staging: Path) -> bool:
    try:
        owner = json.loads((staging / OWNER_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return True  # it died before it wrote whose it is
    if owner is None or is_surely_dead(owner) or owner == describe_self():
        return True
    newest = max(entry.stat().st_mtime for entry in (staging, *staging.rglob("*")))
    return time.time() - newest > FOREIGN_STALE_S


STALE_S = 600.0
"""Age from which the claim of a machine that cannot be asked is taken for a dead one's."""
_WAIT_S = 60.0
_PAUSE_S = 0.05


@dataclass(frozen=True)
class Claim:
    """A claim that is held.

    Attributes:
        path: The file that stands for it.
        text: What the file holds; no other claim holds the same.
    """

    path: Path
    text: str

    def check(self) -> None:
        """Makes sure that it is still held, right before what it protects.

        Raises:
            UpstreamNotReadyError: Another process took this one for dead.
        """
        if _read(self.path) != self.text:
            raise UpstreamNotReadyError(
                "another process took this one for dead and publishes itself",
                received=f"{self.path} is no longer held",
                allowed=f"a pause of less than {STALE_S:.0f} s while publishing",
                fix="run this job again",
            )


@contextlib.contextmanager
def hold_claim(path: Path, wait_s: float = _WAIT_S) -> Iterator[Claim]:
    """Holds a claim, waiting for another one to end.

    A claim whose process has ended on this machine is broken at once, one of another machine
    after `STALE_S`.

    Args:
        path: File that stands for the claim; its folder must exist.
        wait_s: How long to wait.

    Raises:
        UpstreamNotReadyError: Another process held it all the while.
    """
    claim = Claim(path, json.dumps({"nonce": uuid.uuid4().hex, "owner": describe_self()}))
    end = time.monotonic() + wait_s
    while not _create(claim):
        _break_stale(path)
        if time.monotonic() > end:
            raise UpstreamNotReadyError(
                "another process is publishing here",
                received=path,
                allowed="one publisher at a time",
                fix=f"wait for it to end; if it is dead, its claim lapses after {STALE_S:.0f} s",
            )
        time.sleep(_PAUSE_S)
    try:
        yield claim
    finally:
        if _read(path) == claim.text:
            path.unlink(missing_ok=True)


def describe_self() -> dict[str, object] | None:
    """Describes this process as JSON values; None where the host does not tell."""
    owner = find_this_process()
    return None if owner is None else asdict(owner)


def is_surely_dead(owner: object) -> bool:
    """Whether what `describe_self` returned belongs to a process that has certainly ended."""
    try:
        return isinstance(owner, dict) and is_dead(Owner(**owner))
    except (OSError, TypeError):
        return False


def _create(claim: Claim) -> bool:
    try:
        descriptor = os.open(claim.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return False
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as handle:
            handle.write(claim.text)
            handle.flush()
            os.fsync(handle.fileno())
    except OSError:  # a full disk: an empty claim would hold up the next publisher
        claim.path.unlink(missing_ok=True)
        raise
    return True


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def _break_stale(path: Path) -> None:
    text = _read(path)
    if text is None or not _is_stale(path, text):
        return
    aside = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    with contextlib.suppress(FileNotFoundError):
        path.rename(aside)
        if _read(aside) != text:  # in between it was broken, and taken by a live process
            with contextlib.suppress(FileExistsError):
                os.link(aside, path)
        aside.unlink()


def _is_stale(path: Path, text: str) -> bool:
    try:
        owner = json.loads(text)["owner"]
    except (ValueError, KeyError, TypeError):
        owner = None  # cut short: its writer is at work, or died
    if is_surely_dead(owner):
        return True
    try:
        return time.time() - path.stat().st_mtime > STALE_S
    except FileNotFoundError:
        return False

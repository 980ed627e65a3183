"""A claim: one process at a time moves what readers see, wherever the file system is mounted.

It holds for the moment of a publication, where locks do not reach other machines. It is a file that
is created exclusively (`O_CREAT | O_EXCL`), which NFS from version 3 on, SMB, Lustre and their like
keep atomic between machines.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from conf.errors import UpstreamNotReadyError
from conf.storage.processes import describe_self, has_surely_ended

STALE_S = 600.0
"""Age from which the claim of a machine that cannot be asked is taken for a dead one's."""
CUT_SHORT_STALE_S = 10.0
"""Age from which a claim that does not say whose it is belongs to a process that died writing it:
one that is at work finds out by `Claim.check` if it was taken for dead."""
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
                allowed="a publication without a long pause",
                fix="run this job again",
            )


@contextlib.contextmanager
def hold_claim(path: Path, wait_s: float = _WAIT_S) -> Iterator[Claim]:
    """Holds a claim, waiting for another one to end.

    A claim whose process has ended on this machine is broken at once, one of another machine
    after `STALE_S`, one that was cut short as it was written after `CUT_SHORT_STALE_S`.

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
    limit_s = STALE_S
    try:
        if has_surely_ended(json.loads(text)["owner"]):
            return True
    except (ValueError, KeyError, TypeError):
        limit_s = CUT_SHORT_STALE_S
    try:
        return time.time() - path.stat().st_mtime > limit_s
    except FileNotFoundError:
        return False

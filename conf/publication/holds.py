"""One process at a time, where the kernel's locks do not reach: claims and leases.

claim    a file, for the moment in which a pointer moves on a file system that other machines mount:
         created exclusively (`O_CREAT | O_EXCL`), which NFS from version 3 on, SMB, Lustre and
         their like keep atomic between machines
lease    an object with a term, for as long as a process works on a place in a store; its holder
         renews it, and finds out at a renewal, and before it brings anything, if it was taken over
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from conf.deadline import repeating
from conf.errors import UpstreamNotReadyError
from conf.storage.object_store import Storage, reaching
from conf.storage.processes import describe_self, is_abandoned
from conf.storage.store_clients import Version

STALE_S = 600.0
"""Age from which the claim of a machine that cannot be asked is taken for a dead one's."""
CUT_SHORT_STALE_S = 10.0
"""Age from which a claim that does not say whose it is belongs to one that died writing it."""
_WAIT_S = 60.0
_PAUSE_S = 0.05
LEASE_KEY = ".lease"
RENEWAL_S = 30.0
LAPSE_S = 300.0
"""Age from which a lease that was not renewed is a dead process's."""


@dataclass(frozen=True)
class Claim:
    """A claim that is held: a file, and what it holds, which no other claim does."""

    path: Path
    text: str

    def check(self) -> None:
        """Makes sure that it is still held, right before what it protects."""
        if _read(self.path) != self.text:
            raise UpstreamNotReadyError(
                "another process took this one for dead and publishes itself",
                received=f"{self.path} is no longer held",
                allowed="a publication without a long pause",
                fix="run this job again",
            )


@contextlib.contextmanager
def hold_claim(path: Path, wait_s: float = _WAIT_S) -> Iterator[Claim]:
    """Holds a claim, waiting for another one to end, whose process may have ended."""
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
        handle = claim.path.open("x", encoding="utf-8")
    except FileExistsError:
        return False
    try:
        with handle:
            handle.write(claim.text)
            handle.flush()
            os.fsync(handle.fileno())
    except OSError:  # a full disk: an empty claim would hold up the next publisher
        claim.path.unlink(missing_ok=True)
        raise
    return True


def _read(path: Path) -> str | None:
    with contextlib.suppress(FileNotFoundError):
        return path.read_text(encoding="utf-8")
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
    owner, after_s = None, CUT_SHORT_STALE_S
    with contextlib.suppress(ValueError, KeyError, TypeError):
        owner, after_s = json.loads(text)["owner"], STALE_S
    with contextlib.suppress(FileNotFoundError):
        return is_abandoned(owner, path.stat().st_mtime, after_s)
    return False


@dataclass(frozen=True)
class _Note:
    """What the object of a lease says; each renewal is another content."""

    holder: str
    owner: dict[str, Any] | None
    renewals: int = 0
    is_held: bool = True

    def dumps(self) -> bytes:
        return json.dumps(asdict(self)).encode()


def _parse(data: bytes | None) -> _Note | None:
    with contextlib.suppress(ValueError, TypeError):
        return _Note(**json.loads(data or b""))
    return None


class Lease:
    """A lease that is held: a note that has been put."""

    def __init__(self, directory: Storage, note: _Note, version: Version) -> None:
        self._directory, self._note, self._version = directory, note, version
        self._renewed = time.monotonic()
        self._lock = threading.Lock()
        self._is_lost = False

    def check(self) -> None:
        """Makes sure that it is still held."""
        if time.monotonic() - self._renewed > LAPSE_S / 2:
            self.renew()
        if self._is_lost:
            raise UpstreamNotReadyError(
                "another process took this one for dead and works here now",
                received=f"{self._directory.uri}: the lease is no longer held",
                allowed=f"a pause of less than {LAPSE_S:.0f} s",
                fix="let the other one go on, or end it and run this command again",
            )

    def renew(self, *, is_held: bool = True) -> None:
        """Puts the note anew, unless it is another one's by now."""
        with self._lock, reaching(self._directory):
            note = replace(self._note, renewals=self._note.renewals + 1, is_held=is_held)
            started = time.monotonic()
            if not self._is_lost and self._directory.replace(
                LEASE_KEY, note.dumps(), self._version
            ):
                self._note, self._renewed = note, started
                self._take_version(note)
            else:  # It may be there nevertheless: the answer to its put got lost.
                self._is_lost = not (self._take_version(note) or self._take_version(self._note))

    def _take_version(self, note: _Note) -> bool:
        """Takes the version of a note, if that is the one in the store."""
        found, version = self._directory.read_version(LEASE_KEY)
        if found != note.dumps() or version is None:
            return False
        self._note, self._version = note, version
        return True


@contextlib.contextmanager
def hold_lease(directory: Storage, holder: str) -> Iterator[Lease]:
    """Holds a lease while the block runs, and renews it in the background."""
    with reaching(directory):
        lease = _take(directory, holder)
        directory.remove_uploads(LEASE_KEY)
    try:
        with repeating(RENEWAL_S, partial(_try_renew, lease)):
            yield lease
    finally:
        _try_renew(lease, is_held=False)  # Else it lapses.


def _try_renew(lease: Lease, *, is_held: bool = True) -> None:
    with contextlib.suppress(Exception):  # `check` says so if it stays like that.
        lease.renew(is_held=is_held)


def _take(directory: Storage, holder: str) -> Lease:
    is_taken = False
    while not is_taken:  # Of two that find it free the slower one finds it held next.
        data, version = directory.read_version(LEASE_KEY)
        before = _parse(data) or _Note(holder, None, -1, is_held=False)
        if before.is_held and not _is_over(directory, before):
            break
        note = _Note(holder, describe_self(), before.renewals + 1)
        is_taken = directory.replace(LEASE_KEY, note.dumps(), version)
    found, taken = directory.read_version(LEASE_KEY)
    if not is_taken or found != note.dumps() or taken is None:
        raise UpstreamNotReadyError(
            "another process is working on this directory of the store",
            received=directory.uri,
            fix=f"wait for it to end; if it is dead, its lease lapses after {LAPSE_S:.0f} s",
        )
    return Lease(directory, note, taken)


def _is_over(directory: Storage, note: _Note) -> bool:
    """Whether the process that holds a lease has ended, as far as can be known."""
    item = directory.find(LEASE_KEY)
    return item is None or is_abandoned(note.owner, item.mtime_ns / 1e9, LAPSE_S)


def read_holder(directory: Storage) -> str | None:
    """Returns the id of the working copy that held the lease last, None where none has."""
    with reaching(directory):
        note = _parse(directory.read(LEASE_KEY))
    return None if note is None else note.holder

"""A lease on a directory of an object store: one process at a time works on what lies there.

Stores have no locks that end with their process. The holder of a lease renews it; one that has not
been renewed for some minutes, or whose process has ended on this machine, is taken over. The holder
finds that out at the next renewal, and before it brings anything to the store.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from conf.errors import UpstreamNotReadyError
from conf.storage.object_store import Storage, reaching
from conf.storage.processes import describe_self, is_abandoned
from conf.storage.store_interface import Version

LEASE_KEY = ".lease"
RENEWAL_S = 30.0
LAPSE_S = 300.0
"""Age from which a lease that was not renewed is a dead process's."""


@dataclass(frozen=True)
class _Note:
    """What the object says.

    Attributes:
        holder: The working copy that had it last; it holds all that was downloaded.
        owner: The process, None where the host does not tell.
        renewals: Grows, so that each renewal is another content.
        is_held: False once it was given back.
    """

    holder: str
    owner: dict[str, Any] | None
    renewals: int = 0
    is_held: bool = True

    def dumps(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def loads(cls, data: bytes) -> _Note | None:
        try:
            return cls(**json.loads(data))
        except (ValueError, TypeError):
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
            if self._is_lost or not self._directory.replace(LEASE_KEY, note.dumps(), self._version):
                self._is_lost = not self._finds(note)
                return
            self._note, self._renewed = note, started
            found, version = self._directory.read_version(LEASE_KEY)
            if found == note.dumps() and version is not None:
                self._version = version

    def _finds(self, note: _Note) -> bool:
        """Whether the note is there nevertheless: the answer to its put got lost."""
        found, version = self._directory.read_version(LEASE_KEY)
        if found not in (note.dumps(), self._note.dumps()) or version is None:
            return False
        self._note, self._version = _Note.loads(found) or note, version
        return True


@contextlib.contextmanager
def hold_lease(directory: Storage, holder: str) -> Iterator[Lease]:
    """Holds a lease while the block runs, and renews it in the background."""
    lease = _take(directory, holder)
    ended = threading.Event()
    thread = threading.Thread(target=_keep, args=(lease, ended), name="lease", daemon=True)
    thread.start()
    try:
        yield lease
    finally:
        ended.set()
        thread.join()
        with contextlib.suppress(Exception):  # It lapses.
            lease.renew(is_held=False)


def _keep(lease: Lease, ended: threading.Event) -> None:
    while not ended.wait(RENEWAL_S):
        with contextlib.suppress(Exception):  # `check` says so if it stays like that.
            lease.renew()


def _take(directory: Storage, holder: str) -> Lease:
    with reaching(directory):
        is_taken = False
        while not is_taken:  # Of two that find it free the slower one finds it held next.
            before, version = _read_free(directory)
            note = _Note(holder, describe_self(), before.renewals + 1 if before else 0)
            is_taken = directory.replace(LEASE_KEY, note.dumps(), version)
        found, taken = directory.read_version(LEASE_KEY)
        if found != note.dumps() or taken is None:
            raise _refuse(directory)
        directory.remove_uploads(LEASE_KEY)
    return Lease(directory, note, taken)


def _read_free(directory: Storage) -> tuple[_Note | None, Version | None]:
    data, version = directory.read_version(LEASE_KEY)
    before = None if data is None else _Note.loads(data)
    if before is not None and before.is_held and not _is_over(directory, before):
        raise _refuse(directory)
    return before, version


def _is_over(directory: Storage, note: _Note) -> bool:
    """Whether the process that holds a lease has ended, as far as can be known."""
    item = directory.find(LEASE_KEY)
    return item is None or is_abandoned(note.owner, item.mtime_ns / 1e9, LAPSE_S)


def read_holder(directory: Storage) -> str | None:
    """Returns the id of the working copy that held the lease last, None where none has."""
    with reaching(directory):
        data = directory.read(LEASE_KEY)
    note = None if data is None else _Note.loads(data)
    return None if note is None else note.holder


def _refuse(directory: Storage) -> UpstreamNotReadyError:
    return UpstreamNotReadyError(
        "another process is working on this directory of the store",
        received=directory.uri,
        fix=f"wait for it to end; if it is dead, its lease lapses after {LAPSE_S:.0f} s",
    )

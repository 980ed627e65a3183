"""`CURRENT`, the file that names the entry which readers take: moved in one step, on a condition.

In an object store a put with a condition compares and moves. On a file system a claim lets one
process at a time do both, where locks do not reach other machines. It is a file that is created
exclusively (`O_CREAT | O_EXCL`), which NFS from version 3 on, SMB, Lustre and their like keep
atomic between machines, and it is held for the moment of a publication.
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
from conf.paths import CURRENT_FILE
from conf.publication.entries import name_entry
from conf.storage.atomic_output import sync_tree, write_text_atomic
from conf.storage.object_store import Storage, reaching
from conf.storage.processes import describe_self, is_abandoned

CLAIM_FILE = ".publishing"
STALE_S = 600.0
"""Age from which the claim of a machine that cannot be asked is taken for a dead one's."""
CUT_SHORT_STALE_S = 10.0
"""Age from which a claim that does not say whose it is belongs to a process that died writing it:
one that is at work finds out by `Claim.check` if it was taken for dead."""
_WAIT_S = 60.0
_PAUSE_S = 0.05
Base = Path | Storage
"""Folder of a pointer: of a file system, or in a store."""


def read_pointer(base: Base) -> str | None:
    """Reads which entry is current; None where there is no pointer, "" where it is empty."""
    if isinstance(base, Storage):
        with reaching(base):
            data = base.read(CURRENT_FILE)
        return None if data is None else _parse(data)
    try:
        return _parse((base / CURRENT_FILE).read_bytes())
    except FileNotFoundError:
        return None


def set_pointer(base: Base, entry: str) -> None:
    """Makes an entry current, whatever was; readers see the old one or the new."""
    text = f"{entry}\n"
    if isinstance(base, Storage):
        with reaching(base):
            base.update(CURRENT_FILE, lambda _: text.encode())
    else:
        write_text_atomic(base / CURRENT_FILE, text)


def move_pointer(base: Base, entry: str, before: str | None) -> None:
    """Makes another entry current, on the condition that `before` is (None: none)."""

    def follow(data: bytes | None) -> bytes:
        _require(None if data is None else _parse(data), before)
        return f"{entry}\n".encode()

    if isinstance(base, Storage):
        with reaching(base):
            base.update(CURRENT_FILE, follow)
        return
    with _hold_pointer(base, before):
        set_pointer(base, entry)


def publish_entry(base: Path, staging: Path, target: Path, before: str | None) -> None:
    """Gives a whole entry its name and makes it current; an entry that is refused gets neither.

    Killed in between, it has its name, and readers take the one before.
    """
    sync_tree(staging)  # It takes its time: nobody waits for it.
    with _hold_pointer(base, before):
        try:
            name_entry(staging, target)
            set_pointer(base, target.name)
        except OSError:
            # It never was the current one, so it is not published: the caller removes it.
            if not staging.exists() and read_pointer(base) != target.name:
                target.rename(staging)
            raise


@contextlib.contextmanager
def _hold_pointer(base: Path, before: str | None) -> Iterator[None]:
    """Holds the claim of a pointer that names the entry which is to be followed."""
    with hold_claim(base / CLAIM_FILE) as claim:
        _require(read_pointer(base), before)
        claim.check()
        yield


def _require(current: str | None, before: str | None) -> None:
    if (current or None) != before:
        raise UpstreamNotReadyError(
            "another version has become current meanwhile; nothing was published",
            received=current or "no current version",
            allowed=before or "no current version",
            fix="run the command again: it starts from the version that is current then",
        )


def _parse(data: bytes) -> str:
    return data.decode("utf-8", errors="replace").strip()


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
    """Holds a claim, waiting for another one to end.

    A claim whose process has ended on this machine is broken at once, one of another machine
    after `STALE_S`, one that was cut short as it was written after `CUT_SHORT_STALE_S`.
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
    try:
        owner, after_s = json.loads(text)["owner"], STALE_S
    except (ValueError, KeyError, TypeError):
        owner, after_s = None, CUT_SHORT_STALE_S
    try:
        return is_abandoned(owner, path.stat().st_mtime, after_s)
    except FileNotFoundError:
        return False

"""`CURRENT`, the file that names the entry which readers take: moved in one step, on a condition.

On a file system a claim lets one process at a time compare and move; in an object store a put with
a condition does both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from conf.errors import UpstreamNotReadyError
from conf.paths import CURRENT_FILE
from conf.publication.claim import hold_claim
from conf.publication.entries import name_entry
from conf.storage.atomic_output import sync_tree, write_text_atomic
from conf.storage.object_store import Storage, reaching

CLAIM_FILE = ".publishing"
Base = Path | Storage
"""Folder of a pointer: of a file system, or in a store."""


def read_pointer(base: Base) -> str | None:
    """Reads which entry is current; None where there is no pointer, "" where it is empty.

    Raises:
        ConfigError: The store cannot be reached or refuses.
    """
    if isinstance(base, Storage):
        with reaching(base):
            data = base.read(CURRENT_FILE)
        return None if data is None else _parse(data)
    try:
        return _parse((base / CURRENT_FILE).read_bytes())
    except FileNotFoundError:
        return None


def set_pointer(base: Base, entry: str) -> None:
    """Makes an entry current, whatever was; readers see the old one or the new.

    Raises:
        ConfigError: The store cannot be reached or refuses.
    """
    text = f"{entry}\n"
    if isinstance(base, Storage):
        with reaching(base):
            while not base.replace(CURRENT_FILE, text.encode(), base.read_version(CURRENT_FILE)[1]):
                pass  # Another one was faster; this one comes after it.
    else:
        write_text_atomic(base / CURRENT_FILE, text)


def move_pointer(base: Base, entry: str, before: str | None) -> None:
    """Makes another entry current; readers see the old one or the new.

    Args:
        base: Folder of the pointer.
        entry: Name of the entry, which is there.
        before: Entry that it may follow, None for none; an empty pointer names none.

    Raises:
        UpstreamNotReadyError: Another entry has become current, or another process is publishing
            and does not end.
        ConfigError: The store cannot be reached or refuses.
    """
    if isinstance(base, Storage):
        _replace_pointer(base, entry, before)
        return
    with _hold_pointer(base, before):
        set_pointer(base, entry)


def publish_entry(base: Path, staging: Path, target: Path, before: str | None) -> None:
    """Gives a whole entry its name and makes it current; an entry that is refused gets neither.

    Killed in between, it has its name, and readers take the one before.

    Args:
        base: Folder of the pointer.
        staging: The entry, whole.
        target: Its name.
        before: The entry that was current when it was begun, or None.

    Raises:
        UpstreamNotReadyError: Another entry has become current since, or another process is
            publishing and does not end.
        OSError: The disk is full, or there is no permission; the pointer was not moved, or it is
            not sure that its move survives a power cut.
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


@contextmanager
def _hold_pointer(base: Path, before: str | None) -> Iterator[None]:
    """Holds the claim of a pointer that names the entry which is to be followed."""
    with hold_claim(base / CLAIM_FILE) as claim:
        _require(read_pointer(base), before)
        claim.check()
        yield


def _replace_pointer(base: Storage, entry: str, before: str | None) -> None:
    with reaching(base):
        is_moved = False
        while not is_moved:
            data, version = base.read_version(CURRENT_FILE)
            _require(None if data is None else _parse(data), before)
            is_moved = base.replace(CURRENT_FILE, f"{entry}\n".encode(), version)


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

"""Entries of a folder, named or numbered: filled aside, whole with their name, pointed at last.

<folder>/<name>            an entry
<folder>/.staging-<name>   one that is being filled, or what a dead process left of one
<folder>/.owner-<name>     whose that is
<folder>/.trash-<name>     one that is being removed
<folder>/CURRENT           the pointer: which entry readers take

On a file system an entry gets its name, and loses it, by one rename: what has a name was never a
part of an entry. In a store it is whole once it holds its marker, the file that is copied last.
"""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from conf.errors import SluiceError, UpstreamNotReadyError
from conf.paths import CURRENT_FILE, ReadablePath, StoreDirectory, list_folders, require_bucket
from conf.publication.holds import Lease, hold_claim, hold_lease
from conf.publication.working_copy import WorkingCopy, move_folder, remove_folder
from conf.storage.atomic_output import sync_directory, sync_tree, write_text_atomic
from conf.storage.locations import StoredPath
from conf.storage.processes import Leftover, describe_self, hold_file_lock, logger, sweep_dead

_LOCK, _STAGING, _OWNER, _TRASH = ".lock", ".staging-", ".owner-", ".trash-"
CLAIM_FILE = ".publishing"
WITHDRAWN_DIR = ".withdrawn"
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
_KEPT_HERE = 2
"""Numbered entries of a store that stay in the copy of who writes them."""


@contextmanager
def hold_entries(folder: Path, refusal: SluiceError) -> Iterator[bool]:
    """Holds the lock of a folder, so that one process stages there; yields whether there are."""
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(hold_file_lock(folder / _LOCK, refusal))
            is_locked = True
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            is_locked = False
            logger.warning("this file system has no locks: two writers meet when they publish only")
        yield is_locked


@contextmanager
def stage_entry(folder: Path, name: str) -> Iterator[Path]:
    """Gives a directory to fill, which is removed unless it was given its name in the block."""
    staging, owner = folder / f"{_STAGING}{name}", folder / f"{_OWNER}{name}"
    folder.mkdir(parents=True, exist_ok=True)
    owner.touch(exist_ok=False)  # It is never that of another process.
    try:
        owner.write_text(json.dumps(describe_self()), encoding="utf-8")
        staging.mkdir()
        yield staging
    finally:
        with contextlib.suppress(OSError):  # The next writer sweeps it.
            if staging.exists():
                remove_entry(staging)
            owner.unlink(missing_ok=True)


def place_entry(staging: Path, target: Path) -> None:
    """Gives a whole entry its name, once all of it survives a power cut."""
    sync_tree(staging)
    _name_entry(staging, target)


def _name_entry(staging: Path, target: Path) -> None:
    try:
        staging.rename(target)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        raise UpstreamNotReadyError(
            "another process has published an entry of this name meanwhile",
            received=target,
            fix="run this job again",
        ) from error
    sync_directory(target.parent)


def set_aside(entry: Path) -> Path:
    """Takes the name from an entry or a staging directory, so that no late task adds to it."""
    if entry.name.startswith(_TRASH):
        return entry
    return entry.rename(entry.with_name(f"{_TRASH}{entry.name}"))


def remove_entry(entry: Path) -> None:
    """Removes an entry, or the staging directory of one, set aside or not."""
    trash = set_aside(entry)
    while trash.exists():
        # A process that the dead one started may be removing its own part at the same time.
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(trash)


def sweep_entries(folder: Path, *, is_alone: bool = False) -> list[str]:
    """Removes what dead processes left in a folder, under its lock; returns the names."""
    if not folder.is_dir():
        return []
    found = [_describe(entry, is_alone) for entry in sorted(folder.iterdir())]
    swept = sweep_dead(filter(None, found), lambda name: _remove_leftover(folder / name))
    return [name for name in swept if not name.startswith(_OWNER)]


def _describe(entry: Path, is_alone: bool) -> Leftover | None:
    """Describes what is no entry; an owner beside its staging directory goes with that."""
    kind, dash, name = entry.name.partition("-")
    if kind + dash not in (_STAGING, _OWNER, _TRASH):
        return None
    if kind + dash == _OWNER and entry.with_name(f"{_STAGING}{name}").exists():
        return None
    owner = _read_owner(entry.with_name(f"{_OWNER}{name}"))
    is_over = is_alone or kind + dash == _TRASH or owner is None or owner == describe_self()
    return Leftover(entry.name, owner, 0.0 if is_over else _find_last_move(entry))


def _read_owner(owner: Path) -> object:
    with contextlib.suppress(OSError, ValueError):
        return json.loads(owner.read_text(encoding="utf-8"))
    return None  # It died before it wrote whose it is.


def _find_last_move(entry: Path) -> float:
    newest = 0.0
    for path in (entry, *entry.rglob("*")):
        with contextlib.suppress(FileNotFoundError):  # It is at work.
            newest = max(newest, path.lstat().st_mtime)
    return newest


def _remove_leftover(left: Path) -> None:
    kind, dash, name = left.name.partition("-")
    if kind + dash != _OWNER:
        remove_entry(left)
    if kind + dash != _TRASH:
        left.with_name(f"{_OWNER}{name}").unlink(missing_ok=True)


def read_pointer(base: Path | StoredPath) -> str | None:
    """Reads which entry is current; None where there is no pointer, "" where it is empty."""
    with contextlib.suppress(FileNotFoundError):
        return _parse((base / CURRENT_FILE).read_bytes())
    return None


def set_pointer(base: Path | StoredPath, entry: str) -> None:
    """Makes an entry current, whatever was; readers see the old one or the new."""
    if isinstance(base, StoredPath):
        base.update(CURRENT_FILE, lambda _: f"{entry}\n".encode())
    else:
        write_text_atomic(base / CURRENT_FILE, f"{entry}\n")


def move_pointer(base: Path | StoredPath, entry: str, before: str | None) -> None:
    """Makes another entry current, on the condition that `before` is (None: none)."""

    def follow(data: bytes | None) -> bytes:
        _require(_parse(data or b""), before)
        return f"{entry}\n".encode()

    if isinstance(base, StoredPath):
        base.update(CURRENT_FILE, follow)
        return
    with _hold_pointer(base, before):
        set_pointer(base, entry)


def publish_entry(base: Path, staging: Path, target: Path, before: str | None) -> None:
    """Gives a whole entry its name and makes it current; an entry that is refused gets neither."""
    sync_tree(staging)  # It takes its time: nobody waits for it.
    with _hold_pointer(base, before):
        try:
            _name_entry(staging, target)
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


def list_numbered(parent: ReadablePath) -> list[int]:
    """Returns the numbers that name directories of a parent, ascending."""
    return _pick_numbers(list_folders(parent))


def list_complete(parent: ReadablePath, marker: str) -> list[int]:
    """Returns the numbered directories of a parent that hold a file, ascending."""
    if isinstance(parent, StoreDirectory):
        paths = [key.rpartition("/") for key in parent.list_bytes()]
        return _pick_numbers(folder for folder, _, name in paths if name == marker)
    return [n for n in list_numbered(parent) if (parent / str(n) / marker).is_file()]


def _pick_numbers(names: Iterable[str]) -> list[int]:
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())


@dataclass(frozen=True)
class _OnDisk:
    """Carries entries where readers look at the folder itself, under its lock."""

    here: Path

    def bring(self, staging: Path, name: str) -> None: ...

    def withdraw(self, name: str) -> None:
        withdrawn = self.here / WITHDRAWN_DIR
        withdrawn.mkdir(exist_ok=True)
        (self.here / name).rename(withdrawn / name)
        sync_directory(withdrawn)
        sync_directory(self.here)

    def remove_old(self, marker: str, keep: int | None) -> None:
        for folder in (self.here, self.here / WITHDRAWN_DIR):
            _remove_old(folder, keep)


@dataclass(frozen=True)
class _InStore:
    """Carries entries to a store, under a lease, from the copy in which they are written."""

    copy: WorkingCopy
    lease: Lease

    @property
    def here(self) -> Path:
        return self.copy.local

    def bring(self, staging: Path, name: str) -> None:
        self.lease.check()
        WorkingCopy(self.copy.remote.child(name), staging).push()

    def withdraw(self, name: str) -> None:
        self.lease.check()
        remote = self.copy.remote
        move_folder(remote.child(name), remote.child(f"{WITHDRAWN_DIR}/{name}"))

    def remove_old(self, marker: str, keep: int | None) -> None:
        """Removes old ones, and from the store what crashed writers left of others."""
        for there in (self.copy.remote, self.copy.remote.child(WITHDRAWN_DIR)):
            kept = list_complete(StoredPath(there), marker)[-keep if keep else 0 :]
            for number in list_numbered(StoredPath(there)):
                if number not in kept and number < max(kept, default=0):
                    self.lease.check()
                    remove_folder(there.child(str(number)))
        _remove_old(self.here, _KEPT_HERE)


def _remove_old(folder: Path, keep: int | None) -> None:
    for number in list_numbered(folder)[: -keep if keep else 0]:
        remove_entry(folder / str(number))


@dataclass(frozen=True)
class HeldNumbers:
    """The numbered entries of a place, which nobody else writes meanwhile; the newest is taken."""

    place: ReadablePath
    marker: str
    carrier: _OnDisk | _InStore
    is_alone: bool = True

    @contextmanager
    def next_entry(self, keep: int | None = None) -> Iterator[tuple[Path, Path]]:
        """Yields an empty directory, and the path `…/<n>` that it gets when the block ends well.

        The newest `keep` entries stay, and of withdrawn ones as many; None: all.
        """
        here = self.carrier.here
        for folder in (here, here / WITHDRAWN_DIR):
            sweep_entries(folder, is_alone=self.is_alone)
        target = here / str(self._find_next())
        with stage_entry(here, f"{target.name}-{uuid.uuid4().hex[:8]}") as staging:
            yield staging, target
            self.carrier.bring(staging, target.name)
            place_entry(staging, target)
        self.carrier.remove_old(self.marker, keep)

    def _find_next(self) -> int:
        bases: tuple[ReadablePath, ...] = (self.place, self.carrier.here)
        places = [place for base in bases for place in (base, base / WITHDRAWN_DIR)]
        return max((number for place in places for number in list_numbered(place)), default=0) + 1

    def withdraw(self, above: int) -> list[int]:
        """Moves the entries above a number into `.withdrawn/`, the newest one last.

        Returns the numbers of those that were complete.
        """
        complete = list_complete(self.place, self.marker)
        moved = [number for number in list_numbered(self.place) if number > above]
        for number in moved:
            self.carrier.withdraw(str(number))
        return [number for number in moved if number in complete]


@contextmanager
def hold_numbers(place: ReadablePath, marker: str) -> Iterator[HeldNumbers]:
    """Holds the numbered entries of a parent, which is made as needed, while the block runs."""
    if isinstance(place, Path):
        refusal = UpstreamNotReadyError(
            f"{place} is being written by another process right now",
            received=f"a lock on {place / _LOCK}",
            fix="wait for it to end, then run again",
        )
        with hold_entries(place, refusal) as is_locked:
            yield HeldNumbers(place, marker, _OnDisk(place), is_alone=is_locked)
        return
    require_bucket(place)
    copy = WorkingCopy.at(str(place))
    copy.begin()
    with hold_lease(copy.remote, copy.read_id()) as lease:
        yield HeldNumbers(place, marker, _InStore(copy, lease))

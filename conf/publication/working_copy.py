"""A directory that is worked in here and kept in an object store.

Publishing versions, runs and models takes renames and locks, which object stores do not have. A
command works in a local copy, where they are, and brings to the store what is whole:

<work directory>/<scheme>/<bucket>/<path>/    the copy, with the layout of the store
                                .copy.json    which state of a file here is which one there

Files come to the store before the file that a folder is complete with, and go after it. What makes
an entry the one that readers take is a put with a condition (`Storage.replace`).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

from conf.errors import ConfigError
from conf.local_paths import local_path
from conf.manifest import MANIFEST_FILE
from conf.paths import CURRENT_FILE
from conf.storage.atomic_output import PRIVATE, atomic_file, write_text_atomic
from conf.storage.locations import is_remote, parse_storage
from conf.storage.object_store import Storage, reaching, run_all
from conf.storage.processes import hold_file_lock

WORK_DIR_VARIABLE = "SLUICE_WORK_DIR"
COPY_FILE = ".copy.json"
_LOCK_FILE = ".copy.lock"
# A folder that holds one of them is complete; see `conf.artefacts`.
_CARDS = ("checkpoint.json", "index.json", "export.json", "delta.json", "run_card.json")
MARKERS = frozenset({MANIFEST_FILE, "saved_model.pb", *_CARDS})
_COPY_BYTES = 8 << 20
# What the stores copy themselves: S3 refuses more.
_STORE_COPY_BYTES = 5 << 30

State = list[int]
"""Size of a file, and its time in ns."""


@dataclass(frozen=True)
class _Note:
    """What a copy notes: by path, states here and there of the same content, and what it brings."""

    uri: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    files: dict[str, State] = field(default_factory=dict)
    sending: dict[str, State] = field(default_factory=dict)

    @classmethod
    def read(cls, directory: Path, uri: str) -> _Note:
        return cls(**{**_read_json(directory / COPY_FILE), "uri": uri})

    def write(self, directory: Path) -> None:
        write_text_atomic(directory / COPY_FILE, json.dumps(asdict(self), sort_keys=True))


def _read_json(file: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(file.read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else {}
    return {}


@dataclass(frozen=True)
class WorkingCopy:
    """A directory of an object store and the local one that stands for it."""

    remote: Storage
    local: Path

    @classmethod
    def at(cls, uri: str) -> WorkingCopy:
        """Returns the copy of the directory that a URI names."""
        return cls(parse_storage(uri), find_working_path(uri))

    def child(self, name: str) -> WorkingCopy:
        """The copy of a directory below this one; it notes states of its own."""
        return WorkingCopy(self.remote.child(name), self.local / name)

    def begin(self) -> None:
        """Makes the local directory, with a note of what it stands for."""
        with self._noting():
            pass

    def read_id(self) -> str:
        """An id that no other copy has; a new one where there is no copy yet."""
        return _Note.read(self.local, self.remote.uri).id

    def pull(self, wanted: Callable[[str], bool] = lambda key: True) -> None:
        """Brings here what has changed there since the last time, and removes what went there."""
        with self._noting() as note:
            there = {key: state for key, state in self._list().items() if wanted(key)}
            for key, here in note.sending.items():
                if key in there and here[0] == there[key][0]:
                    note.files[key] = [*here, *there[key]]
            new = [key for key, state in there.items() if note.files.get(key, [])[2:] != state]
            self._fetch_all(new)
            for key in new:
                note.files[key] = [*_state_here(self.local / key), *there[key]]
            for key in [key for key in note.files if wanted(key) and key not in there]:
                (self.local / key).unlink(missing_ok=True)
                del note.files[key]

    def push(self, below: str = "") -> None:
        """Brings there what has changed here below a folder, and removes what was removed."""
        with self._noting() as note:
            here = self._walk(below)
            changed = [k for k, state in here.items() if note.files.get(k, [])[:2] != state]
            gone = [k for k in note.files if Path(k).is_relative_to(below) and k not in here]
            # Killed from here on, it knows what it was that it brought.
            note.sending.clear()
            note.sending.update({key: here[key] for key in changed})
            note.write(self.local)
            self._send_all(changed)
            with reaching(self.remote):
                for _, group in groupby(sorted(gone, key=_rank, reverse=True), _rank):
                    self.remote.delete_all(group)
            there = self._list() if changed else {}
            for key in gone:
                del note.files[key]
            note.files.update({k: [*here[k], *there[k]] for k in changed if k in there})

    def fetch_missing(self, wanted: Callable[[str], bool] = lambda key: True) -> None:
        """Brings here what is missing or of another size; for files that never change."""
        there = {key: state for key, state in self._list().items() if wanted(key)}
        self._fetch_all([k for k, s in there.items() if _state_here(self.local / k)[0] != s[0]])

    def send_missing(self) -> list[str]:
        """Brings there what is missing or of another size, and returns its paths."""
        there = {key: state[0] for key, state in self._list().items()}
        missing = [key for key, state in self._walk("").items() if there.get(key) != state[0]]
        self._send_all(missing)
        return missing

    @contextlib.contextmanager
    def _noting(self) -> Iterator[_Note]:
        """Gives what is known of the files, and writes it down when the block ends well."""
        try:
            self.local.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{self.remote.uri} needs a directory to be worked in here",
                received=f"{self.local}: {error.strerror}",
                fix=f"set {WORK_DIR_VARIABLE} to a directory that you may write to",
            ) from error
        with hold_file_lock(self.local / _LOCK_FILE):
            note = _Note.read(self.local, self.remote.uri)
            yield note
            note.sending.clear()
            note.write(self.local)

    def _list(self) -> dict[str, State]:
        with reaching(self.remote):
            found = self.remote.list_objects()
        return {key: [o.bytes, o.mtime_ns] for key, o in found.items() if _is_kept(key)}

    def _walk(self, below: str) -> dict[str, State]:
        folders = os.walk(self.local / below)
        files = (Path(folder, name) for folder, _, names in folders for name in names)
        found = {file.relative_to(self.local).as_posix(): file for file in files}
        return {key: _state_here(file) for key, file in found.items() if _is_kept(key)}

    def _fetch_all(self, keys: Sequence[str]) -> None:
        for _, group in groupby(sorted(keys, key=_is_marker), _is_marker):
            run_all(self._fetch, group)

    def _send_all(self, keys: Sequence[str]) -> None:
        markers = filter(_is_marker, keys)
        with reaching(self.remote):
            run_all(self._send, [key for key in keys if not _is_marker(key)])
            for key in sorted(markers, key=lambda key: (-key.count("/"), _rank(key))):
                self._send(key)

    def _fetch(self, key: str) -> None:
        file = self.local / key
        file.parent.mkdir(parents=True, exist_ok=True)
        with reaching(self.remote):
            source = self.remote.open_input(key)
        with source, atomic_file(file) as unfinished:
            unfinished.touch(mode=PRIVATE)  # It may hold histories of users.
            with unfinished.open("wb") as target:
                while data := self._read(source):
                    target.write(data)

    def _read(self, source: BinaryIO) -> bytes:
        with reaching(self.remote):
            return source.read(_COPY_BYTES)

    def _send(self, key: str) -> None:
        with contextlib.ExitStack() as stack:
            try:
                source = stack.enter_context((self.local / key).open("rb"))
            except FileNotFoundError:  # A checkpoint that was removed meanwhile.
                return
            if os.fstat(source.fileno()).st_size <= _COPY_BYTES:
                self.remote.put(key, source.read())
            else:
                _upload(source, self.remote, key)


def _is_kept(key: str) -> bool:
    """Whether a file is copied: no lock, nothing unfinished, not the pointer."""
    return key != CURRENT_FILE and not any(part.startswith(".") for part in key.split("/"))


def _is_marker(key: str) -> bool:
    return key.rpartition("/")[2] in MARKERS


def _rank(key: str) -> int:
    """Order in which files of a folder are sent; removed in reverse. A card comes last."""
    return 0 if not _is_marker(key) else 1 if key.endswith(".pb") else 2


def _state_here(file: Path) -> State:
    with contextlib.suppress(FileNotFoundError):
        status = file.stat()
        return [status.st_size, status.st_mtime_ns]
    return [-1, 0]


def find_working_path(path: str | os.PathLike[str]) -> Path:
    """Returns the local path to work at: a path's own, or the copy's of one in an object store."""
    text = os.fspath(path)
    if not is_remote(text):
        return local_path(text)
    remote = parse_storage(text)
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    base = os.environ.get(WORK_DIR_VARIABLE) or Path(caches) / "sluice" / "work"
    authority, _, rest = remote.root.partition("/")
    # Hadoop takes a name with a colon for a URI.
    return Path(base).absolute() / remote.scheme / authority.replace(":", "+") / rest


def find_working_copy(directory: Path) -> WorkingCopy | None:
    """Returns the working copy that a local directory is, None where it is none."""
    uri = _read_json(directory / COPY_FILE).get("uri")
    return WorkingCopy(parse_storage(uri), directory) if uri else None


def describe_place(directory: Path) -> str:
    """Returns the path of a directory, or the URI that it stands for, in a copy or as one."""
    for around in (directory, *directory.parents):
        if (copy := find_working_copy(around)) is not None:
            return "/".join([copy.remote.uri, *directory.relative_to(around).parts])
    return str(directory)


def remove_folder(folder: Storage) -> None:
    """Removes a folder of a store, its markers first."""
    with reaching(folder):
        folder.delete_tree(lambda key: -_rank(key))


def move_folder(folder: Storage, target: Storage) -> None:
    """Moves a folder inside a store; after a crash the next call continues."""
    with reaching(folder):
        if folder.move_tree(target):
            return
        objects = folder.list_objects()
        for _, group in groupby(sorted(objects, key=_rank), _rank):
            keys = set(group)
            large = {key for key in keys if objects[key].bytes > _STORE_COPY_BYTES}
            folder.move_all({key: key for key in keys - large}, target)
            for key in large:
                with folder.open_input(key) as source:
                    _upload(source, target, key)
    remove_folder(folder)


def _upload(source: BinaryIO, target: Storage, key: str) -> None:
    upload = target.open_output(key)
    shutil.copyfileobj(source, upload, _COPY_BYTES)
    upload.close()

"""What an output directory holds at one moment, on a file system or in an object store.

In a store the manifest decides. Without one it is the listing, less the shards of jobs that have
not ended.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from conf.errors import ConfigError, InputDataError
from conf.local_paths import is_data_path, list_data_files
from conf.storage.object_store import Storage
from conf.storage.store_clients import StoredObject, Version
from etl.tfrecord.commit.output_manifest import (
    COMMIT_FILE,
    OutputManifest,
    parse_manifest,
    read_output_manifest,
)
from etl.tfrecord.files.data_files import refuse_missing

SUCCESS_FILE = "_SUCCESS"
TEMPORARY_PREFIX = "_temporary-"
"""Begins the names of folders in which jobs keep their attempts."""
PUBLISHING_PREFIX = "_publishing-"
"""Begins the names of folders that hold what a commit on a file system replaces, until it ends."""

_OWN_NAME = re.compile(r"part-[0-9]+-([0-9a-f]{32})-c[0-9]+\.tfrecord(?:\.gz|\.deflate)?")
_LOOKS = 10


@dataclass(frozen=True)
class DirectoryView:
    """What an output directory holds; a damaged manifest may count as none."""

    committed: OutputManifest | None = None
    data_keys: Sequence[str] = ()  # every shard, whether or not a reader sees it
    visible: Mapping[str, str] = field(default_factory=dict)  # shards that a reader sees, states
    has_marks: bool = False  # a manifest or `_SUCCESS`

    @property
    def holds_output(self) -> bool:
        """Whether it holds the output of a job, also of one that wrote no row."""
        return self.has_marks or bool(self.visible)

    @property
    def job_ids(self) -> tuple[str, ...]:
        return () if self.committed is None else self.committed.job_ids

    def digest_partitions(self) -> dict[str, str]:
        """Digests the shards that readers see by partition directory, "" for the root."""
        digests: dict[str, hashlib._Hash] = {}
        for key, state in sorted(self.visible.items()):
            line = f"{key}\0{state}\n".encode()
            digests.setdefault(key.rpartition("/")[0], hashlib.sha256()).update(line)
        return {folder: digest.hexdigest() for folder, digest in digests.items()}


def view_local(root: Path, *, is_lenient: bool = False, has_states: bool = False) -> DirectoryView:
    """Looks at a directory of a file system.

    Lenient, a damaged manifest counts as none. Without states all files look alike: none is asked.
    """
    if root.exists() and not root.is_dir():
        raise ConfigError("the output is a file, not a directory", received=root)
    names = list_data_files(root)
    states = {name: _find_state(root / name) if has_states else "" for name in names}
    return DirectoryView(
        read_output_manifest(root, is_lenient=is_lenient),
        names,
        {name: state for name, state in states.items() if state is not None},
        any((root / name).exists() for name in (SUCCESS_FILE, COMMIT_FILE)),
    )


def _find_state(file: Path) -> str | None:
    try:
        status = file.stat()
    except FileNotFoundError:
        return None
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ino}"


def refuse_publishing(directory: Path) -> None:
    """Refuses to read a directory while a write publishes there, or after it was killed."""
    if any(directory.glob(f"{PUBLISHING_PREFIX}*")):
        raise InputDataError(
            "the files are no complete set: a write is publishing there, or was killed",
            received=directory,
            fix="wait for it to end; after a kill, the next write restores the earlier files",
        )


def list_complete(root: Path) -> list[str]:
    """Lists the data files of a directory, relative to it, where none of them is missing."""
    refuse_publishing(root)
    view = view_local(root)
    if view.committed is not None:
        refuse_missing(root, [shard.path for shard in view.committed.shards], view.data_keys)
    return list(view.data_keys)


def find_writer(key: str) -> str | None:
    """The job that wrote a shard or its side file, by the name; None for names of others."""
    match = _OWN_NAME.fullmatch(shard_of(key).rpartition("/")[2])
    return match[1] if match and is_data_path(shard_of(key)) else None


def shard_of(key: str) -> str:
    """The shard of a side file; any other key as it is."""
    is_side = key.startswith("_index/") and key.endswith(".idx")
    return key.removeprefix("_index/").removesuffix(".idx") if is_side else key


@dataclass(frozen=True)
class ObjectView:
    """A directory of an object store at one moment."""

    content: DirectoryView
    objects: Mapping[str, StoredObject]
    jobs: frozenset[str]  # those that have not ended, or died and were not swept yet
    manifest: bytes | None
    version: Version | None  # of the manifest, which a put would replace

    def is_unfinished(self, key: str) -> bool:
        """Whether a shard belongs to a job that has not ended, where there is no manifest."""
        return self.manifest is None and find_writer(key) in self.jobs


def view_objects(storage: Storage, *, is_lenient: bool = False) -> ObjectView:
    """Looks at a directory of an object store; lenient, a damaged manifest counts as none."""
    for _ in range(_LOOKS):
        manifest, version = storage.read_version(COMMIT_FILE)
        before = _list_jobs(storage) if manifest is None else frozenset()
        objects = storage.list_objects()
        # Listed after the objects: a job opens before it copies, and commits before it ends.
        jobs = _list_jobs(storage)
        if before <= jobs and storage.read_version(COMMIT_FILE) == (manifest, version):
            view = ObjectView(DirectoryView(), objects, jobs, manifest, version)
            committed = parse_manifest(manifest, storage.uri, is_lenient=is_lenient)
            return replace(view, content=_read_content(view, committed))
    raise InputDataError(
        "the directory changes while it is looked at",
        received=storage.uri,
        fix="try again when the jobs that publish there have ended",
    )


def _list_jobs(storage: Storage) -> frozenset[str]:
    """Lists the jobs that have something aside in a directory."""
    folders = [name for name in storage.list_folders() if name.startswith(TEMPORARY_PREFIX)]
    return frozenset(name.removeprefix(TEMPORARY_PREFIX) for name in folders)


def _read_content(view: ObjectView, committed: OutputManifest | None) -> DirectoryView:
    data = sorted(filter(is_data_path, view.objects))
    if committed is not None:
        visible = {s.path: f"{s.bytes} {s.crc32c} {s.job_id}" for s in committed.shards}
    else:
        shown = {key: view.objects[key] for key in data if not view.is_unfinished(key)}
        visible = {key: f"{item.bytes} {item.mtime_ns}" for key, item in shown.items()}
    has_marks = view.manifest is not None or SUCCESS_FILE in view.objects
    return DirectoryView(committed, data, visible, has_marks)


def look(place: Path | Storage, *, is_lenient: bool = False) -> DirectoryView:
    """Looks at a directory; lenient, a damaged manifest counts as none."""
    if isinstance(place, Storage):
        return view_objects(place, is_lenient=is_lenient).content
    return view_local(place, is_lenient=is_lenient)

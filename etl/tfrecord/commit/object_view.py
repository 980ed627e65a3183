"""What a directory of an object store holds for a reader, also while someone publishes there.

The manifest decides. Without one it is the listing, less the shards of jobs that have not ended.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from conf.errors import InputDataError
from conf.local_paths import is_data_path
from conf.storage.object_store import Storage
from conf.storage.store_interface import StoredObject, Version
from etl.tfrecord.commit.commit_plan import SUCCESS_FILE, TEMPORARY_PREFIX
from etl.tfrecord.commit.output_manifest import COMMIT_FILE, OutputManifest

_OWN_NAME = re.compile(r"part-[0-9]+-([0-9a-f]{32})-c[0-9]+\.tfrecord(?:\.gz|\.deflate)?")
_INDEX_KEY = re.compile(r"_index/(.*)\.idx")

_LOOKS = 10


def find_writer(key: str) -> str | None:
    """The job that wrote a shard or its side file, by the name; None for names of others."""
    match = _OWN_NAME.fullmatch(shard_of(key).rpartition("/")[2])
    return match[1] if match and is_data_path(shard_of(key)) else None


def shard_of(key: str) -> str:
    """The shard of a side file; any other key as it is."""
    match = _INDEX_KEY.fullmatch(key)
    return match[1] if match else key


@dataclass(frozen=True)
class ObjectView:
    """A directory at one moment.

    Attributes:
        objects: All objects in it, by key.
        jobs: Those that have not ended, or died and have not been swept yet.
        manifest: Text of the manifest, or None.
        version: Which one a put would replace.
        committed: The same, parsed; None also where it is damaged.
        visible: Digest of each shard that a reader sees, by key.
    """

    objects: Mapping[str, StoredObject]
    jobs: frozenset[str]
    manifest: bytes | None
    version: Version | None
    committed: OutputManifest | None
    visible: Mapping[str, str]

    @property
    def holds_output(self) -> bool:
        """Whether it holds the output of a job, also of one that wrote no row."""
        return bool(self.visible) or self.manifest is not None or SUCCESS_FILE in self.objects

    @property
    def data_keys(self) -> list[str]:
        """Every shard by its name, whether or not a reader sees it."""
        return sorted(key for key in self.objects if is_data_path(key))

    def is_unfinished(self, key: str) -> bool:
        """Whether a shard belongs to a job that has not ended, where there is no manifest."""
        return self.manifest is None and find_writer(key) in self.jobs

    @property
    def job_ids(self) -> tuple[str, ...]:
        """Jobs that the manifest names."""
        return () if self.committed is None else self.committed.job_ids

    def digest_partitions(self) -> dict[str, str]:
        """Digests the visible shards by directory, "" for the root itself."""
        digests: dict[str, hashlib._Hash] = {}
        for key, digest in sorted(self.visible.items()):
            text = f"{key}\0{digest}\n".encode()
            digests.setdefault(key.rpartition("/")[0], hashlib.sha256()).update(text)
        return {directory: digest.hexdigest() for directory, digest in digests.items()}


def view_directory(storage: Storage, *, is_lenient: bool = False) -> ObjectView:
    """Looks at a directory.

    Args:
        storage: The directory.
        is_lenient: Whether a damaged manifest counts as none.

    Raises:
        InputDataError: The manifest is damaged, or jobs replace it faster than it can be read.
    """
    for _ in range(_LOOKS):
        manifest, version = storage.read_version(COMMIT_FILE)
        before = list_jobs(storage) if manifest is None else frozenset()
        objects = storage.list_objects()
        # Listed after the objects: a job opens before it copies, and commits before it ends.
        jobs = list_jobs(storage)
        if before <= jobs and storage.read_version(COMMIT_FILE) == (manifest, version):
            committed = _parse(storage, manifest, is_lenient)
            visible = _list_visible(objects, manifest, committed, jobs)
            return ObjectView(objects, jobs, manifest, version, committed, visible)
    raise InputDataError(
        "the directory changes while it is looked at",
        received=storage.uri,
        fix="try again when the jobs that publish there have ended",
    )


def list_jobs(storage: Storage) -> frozenset[str]:
    """Lists the jobs that have something aside in a directory."""
    folders = storage.list_folders()
    return frozenset(
        name.removeprefix(TEMPORARY_PREFIX) for name in folders if name.startswith(TEMPORARY_PREFIX)
    )


def _parse(storage: Storage, manifest: bytes | None, is_lenient: bool) -> OutputManifest | None:
    if manifest is None:
        return None
    try:
        text = manifest.decode("utf-8", errors="replace")
        return OutputManifest.loads(text, f"{storage.uri}/{COMMIT_FILE}")
    except InputDataError:
        if not is_lenient:
            raise
        return None


def _list_visible(
    objects: Mapping[str, StoredObject],
    manifest: bytes | None,
    committed: OutputManifest | None,
    jobs: frozenset[str],
) -> dict[str, str]:
    if committed is not None:
        return {s.path: f"{s.bytes} {s.crc32c} {s.job_id}" for s in committed.shards}
    hidden = jobs if manifest is None else frozenset()
    return {
        key: f"{item.bytes} {item.mtime_ns}"
        for key, item in objects.items()
        if is_data_path(key) and find_writer(key) not in hidden
    }


def read_object_manifest(storage: Storage) -> OutputManifest | None:
    """Reads a directory's manifest; None where there is none.

    Raises:
        InputDataError: It is damaged, or of another format version.
    """
    return _parse(storage, storage.read(COMMIT_FILE), is_lenient=False)

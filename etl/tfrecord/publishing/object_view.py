"""What a directory of an object store holds for a reader, also while someone publishes there.

The manifest decides. Without one it is the listing, less what a job that publishes has created so
far: its manifest would come after that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from conf.errors import InputDataError
from etl.tfrecord.committed import COMMIT_FILE, Committed
from etl.tfrecord.publishing.intents import is_intent, read_intent
from etl.tfrecord.publishing.listing import is_data_file, is_partition
from etl.tfrecord.publishing.modes import SUCCESS_FILE
from etl.tfrecord.storage import Storage, StoredObject

_LOOKS = 10


@dataclass(frozen=True)
class ObjectView:
    """A directory at one moment.

    Attributes:
        objects: All objects in it, by key.
        manifest: Text of the manifest, or None.
        committed: The same, parsed.
        visible: Digest of each shard that a reader sees, by key.
        unfinished: Keys that jobs are creating, where there is no manifest.
    """

    objects: Mapping[str, StoredObject]
    manifest: bytes | None
    committed: Committed | None
    visible: Mapping[str, str]
    unfinished: frozenset[str] = frozenset()

    @property
    def holds_output(self) -> bool:
        """Whether it holds the output of a job, also of one that wrote no row."""
        return bool(self.visible) or self.manifest is not None or SUCCESS_FILE in self.objects

    @property
    def data_keys(self) -> list[str]:
        """Every shard by its name, whether or not a reader sees it."""
        return sorted(key for key in self.objects if is_data_key(key))

    @property
    def job_ids(self) -> tuple[str, ...]:
        """Jobs that the manifest names."""
        shards = self.committed.shards if self.committed else ()
        return tuple(sorted({shard.job_id for shard in shards}))

    def digest_partitions(self) -> dict[str, str]:
        """Digests the visible shards by directory, "" for the root itself."""
        digests: dict[str, hashlib._Hash] = {}
        for key, digest in sorted(self.visible.items()):
            text = f"{key}\0{digest}\n".encode()
            digests.setdefault(key.rpartition("/")[0], hashlib.sha256()).update(text)
        return {directory: digest.hexdigest() for directory, digest in digests.items()}


def is_data_key(key: str) -> bool:
    """Whether an object is a shard by its key: its name, below partition directories at most."""
    *folders, name = key.split("/")
    return is_data_file(name) and all(is_partition(folder) for folder in folders)


def view_directory(storage: Storage, *, is_lenient: bool = False) -> ObjectView:
    """Looks at a directory.

    Args:
        storage: The directory.
        is_lenient: Whether a damaged manifest counts as none.

    Raises:
        InputDataError: The manifest is damaged, or jobs replace it faster than it can be read.
    """
    for _ in range(_LOOKS):
        manifest, intents = storage.read(COMMIT_FILE), _list_intents(storage)
        objects = storage.list_objects()
        # Listed after the objects: whatever copied one of them had put its intent before.
        intents_after = _list_intents(storage)
        hidden = set() if manifest is not None else _list_unfinished(storage, intents_after)
        if (
            hidden is not None
            and intents <= intents_after  # none ended and took away what was listed
            and storage.read(COMMIT_FILE) == manifest
        ):
            return _build_view(storage, objects, manifest, hidden, is_lenient)
    raise InputDataError(
        "the directory changes while it is looked at",
        received=storage.uri,
        fix="try again when the jobs that publish there have ended",
    )


def _list_intents(storage: Storage) -> set[str]:
    return set(filter(is_intent, storage.list_objects(is_recursive=False)))


def _list_unfinished(storage: Storage, intents: set[str]) -> set[str] | None:
    """Objects of jobs that are publishing; None where such a job ended meanwhile."""
    hidden: set[str] = set()
    for key in intents:
        intent = read_intent(storage, key)
        if intent is None and storage.find(key) is None:
            return None
        hidden.update(intent.new if intent else ())
    return hidden


def _build_view(
    storage: Storage,
    objects: Mapping[str, StoredObject],
    manifest: bytes | None,
    hidden: set[str],
    is_lenient: bool,
) -> ObjectView:
    committed = None
    if manifest is not None:
        try:
            text = manifest.decode("utf-8", errors="replace")
            committed = Committed.loads(text, f"{storage.uri}/{COMMIT_FILE}")
        except InputDataError:
            if not is_lenient:
                raise
    if committed is not None:
        visible = {s.path: f"{s.bytes} {s.crc32c} {s.job_id}" for s in committed.shards}
    else:
        visible = {
            key: f"{item.bytes} {item.mtime_ns}"
            for key, item in objects.items()
            if is_data_key(key) and key not in hidden
        }
    return ObjectView(objects, manifest, committed, visible, frozenset(hidden))


def read_committed_object(storage: Storage) -> Committed | None:
    """Reads a directory's manifest; None where there is none.

    Raises:
        InputDataError: It is damaged, or of another format version.
    """
    text = storage.read(COMMIT_FILE)
    if text is None:
        return None
    decoded = text.decode("utf-8", errors="replace")
    return Committed.loads(decoded, f"{storage.uri}/{COMMIT_FILE}")

"""What a directory of an object store holds for a reader, also while someone publishes there.

The manifest decides. Without one it is the listing, less what a job that publishes has created
so far: its intent says so. One publisher at a time puts `_publishing-<job>`, lists, and waits
where another live intent is there; the intents of dead jobs are ended by the next one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from conf.errors import InputDataError, UpstreamNotReadyError
from etl.tfrecord.commit.job import SUCCESS_FILE, Owner, find_owner, is_dead
from etl.tfrecord.commit.output_manifest import COMMIT_FILE, OutputManifest
from etl.tfrecord.files.data_files import index_path, is_data_file, is_partition
from etl.tfrecord.files.object_store import Storage, StoredObject

INTENT_PREFIX = "_publishing-"
STALE_HOURS = 24

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 5.0
_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Intent:
    """What a job is about to publish.

    Attributes:
        job_id: The job.
        owner: Process that the job dies with, or None where it is not known.
        manifest: SHA-256 of the manifest whose put decides; None while nothing is planned.
        new: Keys that it creates.
        old: Keys that it removes once that is decided.
        had_success: Whether the directory was marked as successful before.
        is_over: Whether the job has ended and could not clear up: anyone may.
    """

    job_id: str
    owner: Owner | None = None
    manifest: str | None = None
    new: tuple[str, ...] = ()
    old: tuple[str, ...] = ()
    had_success: bool = False
    is_over: bool = False

    @property
    def key(self) -> str:
        """Where it lies."""
        return f"{INTENT_PREFIX}{self.job_id}"

    def dumps(self) -> bytes:
        """Returns it as JSON text."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def loads(cls, text: bytes) -> Intent:
        """Parses what `dumps` returned.

        Raises:
            ValueError: It is something else, or names keys outside the directory.
        """
        try:
            data = json.loads(text)
            owner = data.pop("owner")
            data["new"], data["old"] = tuple(data["new"]), tuple(data["old"])
            intent = cls(**data, owner=None if owner is None else Owner(**owner))
            keys = [*intent.new, *intent.old]
            if any(".." in k.split("/") or k.startswith("/") or not k for k in keys):
                raise ValueError("keys outside the directory")
            return intent
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError("no intent") from error


def digest_manifest(text: bytes | None) -> str | None:
    """Tells manifests apart; None for none."""
    return None if text is None else hashlib.sha256(text).hexdigest()


def is_intent(key: str) -> bool:
    """Whether an object is an intent, by its name."""
    return key.startswith(INTENT_PREFIX)


def read_intent(storage: Storage, key: str) -> Intent | None:
    """Reads an intent; None where it is gone or says nothing that can be understood."""
    text = storage.read(key)
    try:
        return None if text is None else Intent.loads(text)
    except ValueError:
        return None


def is_stale(item: StoredObject) -> bool:
    """Whether an object is so old that its job must be dead."""
    return time.time() - item.mtime_ns / 1e9 > STALE_HOURS * 3600


def _has_ended(storage: Storage, key: str, item: StoredObject) -> Intent | None:
    """The intent of a job that has ended, else None; what cannot be read is waited for."""
    intent = read_intent(storage, key)
    if intent is None:
        return Intent(key[len(INTENT_PREFIX) :]) if is_stale(item) else None
    is_over = intent.is_over or (intent.owner is not None and is_dead(intent.owner))
    return intent if is_over or is_stale(item) else None


class HeldIntent:
    """The intent of the one job that publishes."""

    def __init__(self, storage: Storage, intent: Intent) -> None:
        """Wraps an intent that has been put and admitted.

        Args:
            storage: The directory.
            intent: The intent.
        """
        self._storage, self.intent = storage, intent

    def note(self, intent: Intent) -> None:
        """Writes down what will be done, before any of it is."""
        self._storage.put(intent.key, intent.dumps())
        self.intent = intent

    def check(self) -> None:
        """Makes sure that nobody took this job for dead meanwhile.

        Raises:
            UpstreamNotReadyError: The intent is gone.
        """
        if self._storage.find(self.intent.key) is None:
            raise UpstreamNotReadyError(
                "another job took this one for dead, as it stood still for long; nothing of it "
                "was published",
                received=self._storage.uri,
                fix="run it again",
            )


@contextlib.contextmanager
def hold_intent(storage: Storage, job_id: str, patience_s: float) -> Iterator[HeldIntent]:
    """Lets one job at a time publish, and clears up at the end, also after jobs that died.

    Args:
        storage: Output directory.
        job_id: The job.
        patience_s: How long to wait for others.

    Raises:
        UpstreamNotReadyError: Another job was publishing all that time.
    """
    intent = Intent(job_id, find_owner())
    for ended in _acquire(storage, intent, patience_s):
        settle_intent(storage, ended)
    held = HeldIntent(storage, intent)
    try:
        yield held
    except BaseException:
        _clear_up(storage, held.intent)
        raise
    _clear_up(storage, held.intent)


def _acquire(storage: Storage, intent: Intent, patience_s: float) -> list[Intent]:
    """Puts the intent as the only live one; returns those of jobs that have ended."""
    end, wait_s = time.monotonic() + patience_s, _FIRST_WAIT_S
    while True:
        storage.put(intent.key, intent.dumps())
        try:
            ended, others = _look_around(storage, intent)
        except BaseException:
            with contextlib.suppress(Exception):
                storage.delete(intent.key)
            raise
        if not others:
            return ended
        storage.delete(intent.key)
        if time.monotonic() >= end:
            raise UpstreamNotReadyError(
                "another job is publishing in this directory; nothing of this job was published",
                received=", ".join(f"{storage.uri}/{key}" for key in others),
                fix=f"run this one again when the other has ended; if it died on another machine, "
                f"delete that object, or wait {STALE_HOURS} h",
            )
        time.sleep(min(random.uniform(wait_s / 2, wait_s), max(0.0, end - time.monotonic())))
        wait_s = min(wait_s * 2, _LONGEST_WAIT_S)


def _look_around(storage: Storage, intent: Intent) -> tuple[list[Intent], list[str]]:
    ended, others = [], []
    for key, item in sorted(storage.list_objects(is_recursive=False).items()):
        if is_intent(key) and key != intent.key:
            other = _has_ended(storage, key, item)
            if other is None:
                others.append(key)
            else:
                ended.append(other)
    return ended, others


def settle_intent(storage: Storage, intent: Intent) -> None:
    """Finishes what an intent's manifest decided, or takes back what it did not come to.

    Args:
        storage: Output directory, in which nobody else publishes.
        intent: Intent of a job that has ended.
    """
    if intent.manifest is not None:
        text = storage.read(COMMIT_FILE)
        is_decided = digest_manifest(text) == intent.manifest
        storage.delete_all(_drop_listed(intent.old if is_decided else intent.new, text))
        if is_decided or intent.had_success:
            storage.put(SUCCESS_FILE, b"")
    storage.delete(intent.key)


def _drop_listed(keys: Sequence[str], manifest: bytes | None) -> list[str]:
    """Keys without those that the manifest lists: whatever an intent says, they are in use."""
    if manifest is None:
        return list(keys)
    try:
        committed = OutputManifest.loads(manifest.decode("utf-8", errors="replace"), COMMIT_FILE)
    except InputDataError:  # better too much is left than too little
        return []
    listed = {shard.path for shard in committed.shards}
    listed |= {index_path(path) for path in listed}
    return [key for key in keys if key not in listed]


def abandon_intent(storage: Storage, job_id: str) -> None:
    """Gives up the intent of a job that failed, in case who held it was killed.

    Args:
        storage: Output directory.
        job_id: The job; it publishes nothing any more.
    """
    intent = read_intent(storage, f"{INTENT_PREFIX}{job_id}")
    if intent is not None:
        storage.put(intent.key, replace(intent, is_over=True).dumps())


def _clear_up(storage: Storage, intent: Intent) -> None:
    """Settles; a failure is left to the next write, for what counts is decided."""
    try:
        settle_intent(storage, intent)
    except Exception as error:  # no error of any kind may hide what the block has done
        _LOGGER.warning("%s: left to the next write to clear up: %s", storage.uri, error)
        with contextlib.suppress(Exception):
            storage.put(intent.key, replace(intent, is_over=True).dumps())


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
    committed: OutputManifest | None
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
            committed = OutputManifest.loads(text, f"{storage.uri}/{COMMIT_FILE}")
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


def read_object_manifest(storage: Storage) -> OutputManifest | None:
    """Reads a directory's manifest; None where there is none.

    Raises:
        InputDataError: It is damaged, or of another format version.
    """
    text = storage.read(COMMIT_FILE)
    if text is None:
        return None
    decoded = text.decode("utf-8", errors="replace")
    return OutputManifest.loads(decoded, f"{storage.uri}/{COMMIT_FILE}")

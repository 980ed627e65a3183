"""Jobs without Spark: what tasks and the driver do, one after the other."""

from __future__ import annotations

import uuid
from collections.abc import Set
from pathlib import Path

from conf.manifest import ShardInfo
from conf.storage.object_store import Storage
from conf.storage.processes import find_this_process
from etl.tfrecord.commit.commit_plan import JobPlan, SaveMode, TaskResult
from etl.tfrecord.commit.local_commit import LocalCommitter
from etl.tfrecord.commit.object_commit import ObjectCommitter
from etl.tfrecord.commit.output_directory import COMMIT_FILE, OutputManifest, look
from etl.tfrecord.files.data_files import WrittenShard

DESCRIPTION = OutputManifest("ByteArray", None, (), {}, (), ())
Place = Path | Storage
"""An output directory, or one below it."""


def committer_of(place: Place) -> LocalCommitter | ObjectCommitter:
    return ObjectCommitter(place) if isinstance(place, Storage) else LocalCommitter(str(place))


class Job:
    """A write of some shards, each of one row that is a word."""

    def __init__(
        self,
        root: Place,
        mode: SaveMode,
        words: list[str],
        *,
        replaces_partitions: bool = False,
        job_id: str | None = None,
    ) -> None:
        self.committer, self.words = committer_of(root), words
        self.plan = JobPlan(job_id or uuid.uuid4().hex, mode, replaces_partitions, DESCRIPTION)
        self.results: list[TaskResult] = []

    def begin(self) -> Job:
        self.committer.begin(self.plan, find_this_process())
        return self

    def run_tasks(self) -> Job:
        for partition, word in enumerate(self.words):
            folder, _, text = word.rpartition("/")
            path = f"part-{partition:05d}-{self.plan.job_id}-c000.tfrecord"
            path = f"{folder}/{path}" if folder else path
            attempt = f"part-{partition:05d}-attempt-{partition}"
            with self.committer.hold_attempt(self.plan.job_id, attempt) as place:
                put(place, path, text.encode())
                put(place, f"_index/{path}.idx", b"0 1\n")
            info = ShardInfo(path, 1, len(text), "00000000")
            shard = WrittenShard(info, (), None, has_index=True)
            self.results.append(TaskResult(partition, attempt, (shard,)))
        return self

    def publish(self) -> bool:
        return self.committer.publish(self.plan, self.results) is not None

    def run(self) -> bool:
        return self.begin().run_tasks().publish()


def put(place: Place, key: str, data: bytes) -> None:
    if isinstance(place, Storage):
        place.put(key, data)
        return
    (place / key).parent.mkdir(parents=True, exist_ok=True)
    (place / key).write_bytes(data)


def delete(place: Place, key: str) -> None:
    place.delete(key) if isinstance(place, Storage) else (place / key).unlink()


def list_files(place: Place) -> set[str]:
    if isinstance(place, Storage):
        return set(place.list_objects())
    return {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()}


def read_words(root: Place) -> list[str]:
    """What a reader sees: partition and word of each row; fails where an object is missing."""
    words = []
    is_stored = isinstance(root, Storage)
    for key in look(root).visible:
        data = root.read(key) if is_stored else (root / key).read_bytes()
        assert data is not None, f"{key} is listed but not there"
        folder = key.rpartition("/")[0]
        words.append(f"{folder}/{data.decode()}" if folder else data.decode())
    return sorted(words)


def leftovers(root: Place, found: Set[str] | None = None) -> list[str]:
    """Files that are neither marks, nor shards of the manifest, nor their side files.

    Args:
        root: The directory.
        found: What is in it, where that is known.
    """
    committed = look(root).committed
    shards = {shard.path for shard in committed.shards} if committed else set()
    known = {COMMIT_FILE, "_SUCCESS"} | shards | {f"_index/{path}.idx" for path in shards}
    return sorted((list_files(root) if found is None else found) - known)

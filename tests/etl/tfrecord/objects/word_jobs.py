"""Jobs without Spark: what tasks and the driver do, one after the other."""

from __future__ import annotations

import uuid
from collections.abc import Set

from conf.manifest import ShardInfo
from conf.storage.object_store import Storage
from conf.storage.processes import find_this_process
from etl.tfrecord.commit.commit_plan import JobPlan, SaveMode, TaskResult
from etl.tfrecord.commit.object_commit import begin_object_job, hold_object_attempt, publish_objects
from etl.tfrecord.commit.object_view import read_object_manifest, view_directory
from etl.tfrecord.commit.output_manifest import COMMIT_FILE, OutputManifest, TaskShard
from etl.tfrecord.files.data_files import WrittenShard

DESCRIPTION = OutputManifest("ByteArray", None, (), {}, (), ())


class Job:
    """A write of some shards, each of one row that is a word."""

    def __init__(
        self,
        root: Storage,
        mode: SaveMode,
        words: list[str],
        *,
        replaces_partitions: bool = False,
        job_id: str | None = None,
    ) -> None:
        self.root, self.words = root, words
        self.plan = JobPlan(job_id or uuid.uuid4().hex, mode, replaces_partitions, DESCRIPTION)
        self.results: list[TaskResult] = []

    def begin(self) -> Job:
        begin_object_job(self.root, self.plan, find_this_process())
        return self

    def run_tasks(self) -> Job:
        for partition, word in enumerate(self.words):
            folder, _, text = word.rpartition("/")
            path = f"part-{partition:05d}-{self.plan.job_id}-c000.tfrecord"
            path = f"{folder}/{path}" if folder else path
            attempt = f"part-{partition:05d}-attempt-{partition}"
            with hold_object_attempt(self.root, self.plan.job_id, attempt) as place:
                place.put(path, text.encode())
                place.put(f"_index/{path}.idx", b"0 1\n")
            info = ShardInfo(path, 1, len(text), "00000000")
            shard = TaskShard(WrittenShard(info, (), None, has_index=True))
            self.results.append(TaskResult(partition, attempt, (shard,)))
        return self

    def publish(self) -> bool:
        return publish_objects(self.root, self.plan, self.results)

    def run(self) -> bool:
        return self.begin().run_tasks().publish()


def read_words(root: Storage) -> list[str]:
    """What a reader sees: partition and word of each row; fails where an object is missing."""
    words = []
    for key in view_directory(root).visible:
        data = root.read(key)
        assert data is not None, f"{key} is listed but not there"
        folder = key.rpartition("/")[0]
        words.append(f"{folder}/{data.decode()}" if folder else data.decode())
    return sorted(words)


def leftovers(root: Storage, found: Set[str] | None = None) -> list[str]:
    """Objects that are neither marks, nor shards of the manifest, nor their side files.

    Args:
        root: The directory.
        found: What is in it, where that is known.
    """
    committed = read_object_manifest(root)
    shards = {shard.path for shard in committed.shards} if committed else set()
    known = {COMMIT_FILE, "_SUCCESS"} | shards | {f"_index/{path}.idx" for path in shards}
    return sorted((root.list_objects().keys() if found is None else found) - known)

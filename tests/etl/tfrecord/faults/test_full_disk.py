"""A disk that fills up at any moment of a write: the earlier output stands, and nothing is left."""

from __future__ import annotations

import errno
from pathlib import Path

import pyarrow as pa

from etl.tfrecord.commit.commit_plan import JobPlan, TaskResult
from etl.tfrecord.commit.local_commit import LocalCommitter
from etl.tfrecord.commit.output_directory import OutputManifest, read_output_manifest
from etl.tfrecord.files.data_files import ShardLimits
from etl.tfrecord.spark.options import WriteOptions
from etl.tfrecord.spark.write_task import WriteTask
from etl.tfrecord.types.features import WireFeature
from tests.machine import PAGE_BYTES, fill


def run_job(root: Path, job: str, rows: range) -> None:
    description = OutputManifest("Example", None, (WireFeature("id", "int64"),), {}, (), ())
    plan = JobPlan(job, "overwrite", False, description)
    options = WriteOptions(str(root), limits=ShardLimits(rows=20), index=True)
    committer = LocalCommitter(str(root))
    try:
        committer.begin(plan, None)
        with committer.hold_attempt(job, "attempt") as attempt:
            batch = pa.record_batch({"id": list(rows)})
            shards = WriteTask(attempt, f"part-{job}", options).write_all(iter([batch]))
        committer.publish(plan, [TaskResult(0, "attempt", shards)])
    except BaseException:
        committer.discard(job)
        raise


def listing(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_the_disk_fills_up_at_every_moment_in_turn(small_disk: Path) -> None:
    root = small_disk / "out"
    run_job(root, "a", range(100))
    before, folders = listing(root), {p for p in root.rglob("*") if p.is_dir()}
    failures, pages = 0, 0
    while True:
        filler = fill(small_disk, pages * PAGE_BYTES)
        try:
            run_job(root, "b", range(100, 200))
            break
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        finally:
            filler.unlink()
        assert listing(root) == before
        assert {p for p in root.rglob("*") if p.is_dir()} == folders
        failures, pages = failures + 1, pages + 1
    assert failures > 10
    assert {shard.job_id for shard in read_output_manifest(root).shards} == {"b"}
    assert len([name for name in listing(root) if name.startswith("part-")]) == 5

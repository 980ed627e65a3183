"""The commit protocol: all or nothing, also when interrupted anywhere or met by another job."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from conf.errors import InputDataError, InternalError
from conf.local_paths import list_data_files
from conf.storage.atomic_output import write_text_atomic
from conf.storage.processes import describe_process
from etl.tfrecord.commit import local_commit
from etl.tfrecord.commit.commit_plan import JobPlan, JobRecord, TaskResult
from etl.tfrecord.commit.local_commit import LocalCommitter, StagedCommitter
from etl.tfrecord.commit.output_directory import OutputManifest
from etl.tfrecord.spark.input_files import list_input_files
from etl.tfrecord.spark.options import WriteOptions, parse_read_options
from etl.tfrecord.spark.write_task import WriteTask
from etl.tfrecord.types.features import WireFeature
from tests.etl.killed_process import Killed, kill_after

BATCH = pa.record_batch({"a": [1, 2, 3]})
MARKS = {"_SUCCESS", "_sluice_commit.json"}


def at(root: Path) -> LocalCommitter:
    return LocalCommitter(str(root))


def plan(
    job: str, mode: str = "overwrite", dynamic: bool = False, by: str | None = None
) -> JobPlan:
    columns = ((by, "bigint"),) if by else ()
    features = (WireFeature("a", "int64"),)
    return JobPlan(job, mode, dynamic, OutputManifest("Example", None, features, {}, columns, ()))


def write_task(
    root: Path, job: str, partition: int = 0, batch: pa.RecordBatch = BATCH, **options
) -> TaskResult:
    name = f"part-{partition}-attempt-0"
    with at(root).hold_attempt(job, name) as attempt:
        sink = WriteTask(attempt, f"part-{partition}-{job}", WriteOptions(str(root), **options))
        return TaskResult(partition, name, sink.write_all(iter([batch])))


def run_job(root: Path, job: str, mode: str = "overwrite", tasks: tuple[int, ...] = (0,)) -> None:
    at(root).begin(plan(job, mode), None)
    at(root).publish(plan(job, mode), [write_task(root, job, k) for k in tasks])


def write_partitioned(root: Path, job: str, values: list[int], plan_: JobPlan) -> None:
    batch = pa.record_batch({"a": values, "p": values})
    at(root).publish(plan_, [write_task(root, job, 0, batch, partition_by=("p",))])


def visible(root: Path) -> set[str]:
    return {
        str(path.relative_to(root))
        for path in root.rglob("*")
        if path.is_file() and path.name not in MARKS
    }


def inodes(root: Path) -> dict[str, int]:
    return {str(p.relative_to(root)): p.stat().st_ino for p in root.rglob("*")}


def link_partition(root: Path, partition: str, *names: str) -> Path:
    """Makes a partition a link, relative as `ln -s` makes them; returns what it leads to."""
    far = root.parent / "far"
    for name in names:
        (far / name).parent.mkdir(parents=True, exist_ok=True)
        (far / name).write_text("x")
    root.mkdir(exist_ok=True)
    (root / partition).symlink_to("../far")
    return far


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_linked_partition_is_replaced_and_what_it_leads_to_stays(tmp_path, dynamic) -> None:
    root = tmp_path / "out"
    far = link_partition(root, "p=1", "part-r-0", "_mine")
    job = plan("a", dynamic=dynamic, by="p")
    at(root).begin(job, None)
    write_partitioned(root, "a", [1, 2], job)
    assert list_data_files(root) == [f"p={k}/part-0-a-c000.tfrecord" for k in (1, 2)]
    assert not (root / "p=1").is_symlink()
    assert sorted(path.name for path in far.iterdir()) == ["_mine", "part-r-0"]
    assert {path.name for path in root.iterdir()} == MARKS | {"p=1", "p=2"}


@pytest.mark.parametrize("undo_calls", [0, 2, 5, 8])
@pytest.mark.parametrize("is_linked", [False, True])
def test_killed_at_any_step_and_again_as_it_is_settled(
    tmp_path: Path, monkeypatch, is_linked: bool, undo_calls: int
) -> None:
    """One complete set survives: the old files, behind a link too, or the new ones."""
    outcomes, has_died = [], True
    while has_died:
        root, has_died = tmp_path / str(len(outcomes)) / "out", False
        root.mkdir(parents=True)
        if is_linked:
            link_partition(root, "p=1", "part-r-0", "_index/part-r-0.idx")
        else:
            run_job(root / "p=1" / "q=2", "old")
        job = plan("a", by="p")
        at(root).begin(job, None)
        with monkeypatch.context() as patch:
            kill_after(len(outcomes), patch)
            try:
                write_partitioned(root, "a", [1, 3], job)
            except Killed:
                has_died = True
        if any(root.glob("_publishing-*")):
            with pytest.raises(InputDataError, match="no complete set"):
                list_input_files(parse_read_options({"path": str(root)}))
        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            kill_after(undo_calls, patch)
            at(root).begin(plan("b"), None)
        at(root).begin(plan("c"), None)
        outcomes.append(list_data_files(root))
        found = [path for path in root.rglob("*") if "_temporary" not in str(path)]
        kept = {folder for path in found if path.is_file() for folder in path.parents}
        assert all(path.is_file() or path in kept or path.is_symlink() for path in found)
    old = ["p=1/part-r-0"] if is_linked else ["p=1/q=2/part-0-old-c000.tfrecord"]
    new = [f"p={k}/part-0-a-c000.tfrecord" for k in (1, 3)]
    assert outcomes[0] == old
    assert outcomes[-1] == new
    assert all(outcome in (old, new) for outcome in outcomes)


def test_files_behind_a_link_that_others_stay_in_are_replaced_there(tmp_path: Path) -> None:
    root = tmp_path / "out"
    far = link_partition(root, "p=1", "q=1/old", "q=2/old")
    job = plan("a", dynamic=True)
    at(root).begin(job, None)
    batch = pa.record_batch({"a": [7], "p": [1], "q": [1]})
    at(root).publish(job, [write_task(root, "a", 0, batch, partition_by=("p", "q"))])
    shard = "q=1/part-0-a-c000.tfrecord"
    assert list_data_files(root) == [f"p=1/{shard}", "p=1/q=2/old"]
    assert list_data_files(far, is_recursive=True) == [shard, "q=2/old"]


@pytest.mark.parametrize("dynamic", [False, True])
def test_an_error_brings_marks_and_side_files_of_partitions_back(
    tmp_path: Path, dynamic: bool, monkeypatch
) -> None:
    for value in (1, 2):
        part = tmp_path / f"p={value}"
        at(part).begin(plan("one"), None)
        at(part).publish(plan("one"), [write_task(part, "one", index=True)])
    before = inodes(tmp_path)
    job = plan("two", dynamic=dynamic, by="p")
    at(tmp_path).begin(job, None)
    monkeypatch.setattr(local_commit, "write_text_atomic", fill_at_manifest)
    with pytest.raises(ZeroDivisionError):
        write_partitioned(tmp_path, "two", [1], job)
    at(tmp_path).discard("two")
    assert inodes(tmp_path) == before


def fill_at_manifest(path: Path, text: str) -> None:
    if path.name == "_sluice_commit.json":
        raise ZeroDivisionError
    write_text_atomic(path, text)


@pytest.mark.parametrize("target", ["far", "none"])
def test_an_append_adds_to_a_linked_partition_and_a_link_to_nowhere_gives_way(tmp_path, target):
    root, far = tmp_path / "out", link_partition(tmp_path / "out", "p=1", "part-r-0")
    if target == "none":
        (root / "p=1").unlink()
        (root / "p=1").symlink_to("none")
    job = plan("a", "append" if target == "far" else "overwrite", target == "none", "p")
    at(root).begin(job, None)
    write_partitioned(root, "a", [1], job)
    kept = ["p=1/part-r-0"] if target == "far" else []
    assert list_data_files(root) == ["p=1/part-0-a-c000.tfrecord", *kept]
    assert (far / "part-0-a-c000.tfrecord").exists() == (target == "far")


def test_a_linked_file_comes_back_where_the_commit_fails(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "far").write_text("x")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").symlink_to("../far")
    at(tmp_path / "out").begin(plan("a"), None)
    result = write_task(tmp_path / "out", "a")
    monkeypatch.setattr(local_commit, "write_text_atomic", fill_at_manifest)
    with pytest.raises(ZeroDivisionError):
        at(tmp_path / "out").publish(plan("a"), [result])
    assert list_data_files(tmp_path / "out") == ["old"]


def test_a_late_attempt_adds_nothing_to_a_staged_directory(tmp_path: Path) -> None:
    at(tmp_path).open_job("a", JobRecord())
    result = write_task(tmp_path, "a")
    with (  # noqa: PT012
        pytest.raises(FileNotFoundError),
        at(tmp_path).hold_attempt("a", "late") as attempt,
    ):
        StagedCommitter(str(tmp_path)).publish(plan("a"), [result])
        WriteTask(attempt, "train/part-0", WriteOptions(str(tmp_path))).write_all(iter([BATCH]))
    assert {p.name for p in tmp_path.iterdir()} == {"part-0-a-c000.tfrecord"}


def test_a_staged_directory_gets_no_shard_where_an_attempt_is_missing(tmp_path: Path) -> None:
    at(tmp_path).open_job("a", JobRecord())
    results = [write_task(tmp_path, "a", p) for p in (0, 1)]
    (at(tmp_path).find_temporary("a") / results[1].attempt / "part-1-a-c000.tfrecord").unlink()
    with pytest.raises(InternalError, match="partition 1"):
        StagedCommitter(str(tmp_path)).publish(plan("a"), results)
    assert all(path.startswith("_temporary-a") for path in visible(tmp_path))


def test_attempts_that_lost_are_not_published(tmp_path: Path) -> None:
    at(tmp_path).begin(plan("a"), None)
    result = write_task(tmp_path, "a")
    twin = at(tmp_path).find_temporary("a") / "part-0-attempt-9"
    twin.mkdir()
    (twin / ".x.tmp").write_bytes(b"cut off")
    (twin / "part-0-a-c000.tfrecord").write_bytes(b"a speculative twin")
    at(tmp_path).publish(plan("a"), [result])
    assert visible(tmp_path) == {"part-0-a-c000.tfrecord"}
    assert not at(tmp_path).find_temporary("a").exists()


def age(path: Path, hours: float) -> None:
    then = time.time() - hours * 3600
    for item in (*path.rglob("*"), path):
        os.utime(item, (then, then))


def start(root: Path, job: str) -> Path:
    at(root).open_job(job, JobRecord())
    with at(root).hold_attempt(job, "attempt") as attempt:
        (attempt / "shard").write_bytes(b"x")
    return at(root).find_temporary(job)


def test_only_dead_jobs_are_swept(tmp_path: Path) -> None:
    places = {job: start(tmp_path, job) for job in ("old", "recent", "held", "growing")}
    for job, hours in (("old", 25), ("recent", 23), ("held", 48), ("growing", 48)):
        age(places[job], hours)
    (places["growing"] / "attempt" / "shard").touch()
    descriptor = os.open(places["held"] / ".job.json", os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    try:
        assert at(tmp_path).sweep() == [places["old"].name]
    finally:
        os.close(descriptor)
    assert len(list(tmp_path.iterdir())) == 3


def test_a_job_with_a_dead_driver_is_swept_at_once_even_while_a_task_writes(tmp_path) -> None:
    here = describe_process(os.getpid())
    at(tmp_path).open_job("live", JobRecord(owner=here))
    at(tmp_path).open_job("elsewhere", JobRecord(owner=replace(here, boot_id="x", start_ticks=-1)))
    at(tmp_path).open_job("dead", JobRecord(owner=replace(here, start_ticks=-1)))
    with (  # noqa: PT012
        pytest.raises(FileNotFoundError),
        at(tmp_path).hold_attempt("dead", "attempt") as attempt,
    ):
        assert at(tmp_path).sweep() == ["_temporary-dead"]
        (attempt / "shard").write_bytes(b"x")
    assert {p.name for p in tmp_path.iterdir()} == {"_temporary-live", "_temporary-elsewhere"}


def test_what_fails_or_was_killed_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "_temporary-x.discarded").mkdir()
    at(tmp_path).discard("y")
    assert not list(tmp_path.iterdir())
    at(tmp_path).open_job("j", JobRecord())
    with pytest.raises(ValueError), at(tmp_path).hold_attempt("j", "attempt") as attempt:  # noqa: PT012
        (attempt / "shard").write_bytes(b"x")
        raise ValueError
    assert not (at(tmp_path).find_temporary("j") / "attempt").exists()
    with pytest.raises(InternalError, match="not there"):
        at(tmp_path).publish(plan("other"), [])


def test_the_record_of_a_job_comes_back() -> None:
    owner = describe_process(os.getpid())
    record = JobRecord({"": "0", "d=1": "1"}, ("a", "b"), owner, ("x",), is_over=True)
    assert JobRecord.loads(record.dumps()) == record
    for text in ("", "[]", "{}", '{"owner": {"pid": 1}}', "null"):  # says nothing
        assert JobRecord.loads(text) is None

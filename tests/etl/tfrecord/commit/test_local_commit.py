"""The commit protocol: all or nothing, also when interrupted anywhere or met by another job."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from conf.errors import ConfigError, InputDataError, InternalError, UpstreamNotReadyError
from conf.local_paths import list_data_files
from conf.storage.processes import describe_process
from etl.tfrecord.commit import local_commit
from etl.tfrecord.commit.commit_plan import Baseline, JobPlan, TaskResult
from etl.tfrecord.commit.local_commit import (
    begin_job,
    create_temporary,
    discard_temporary,
    hold_attempt,
    publish,
    publish_staged,
    read_baseline,
    sweep_stale,
    temporary_directory,
)
from etl.tfrecord.commit.output_manifest import OutputManifest, read_output_manifest
from etl.tfrecord.spark.options import WriteOptions
from etl.tfrecord.spark.write_task import WriteTask
from etl.tfrecord.types.features import WireFeature

BATCH = pa.record_batch({"a": [1, 2, 3]})
MARKS = {"_SUCCESS", "_sluice_commit.json"}


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
    with hold_attempt(root, job, name) as attempt:
        sink = WriteTask(attempt, f"part-{partition}-{job}", WriteOptions(str(root), **options))
        return TaskResult(partition, name, sink.write_all(iter([batch])))


def run_job(root: Path, job: str, mode: str = "overwrite", tasks: tuple[int, ...] = (0,)) -> None:
    begin_job(root, plan(job, mode), None)
    publish(root, plan(job, mode), [write_task(root, job, k) for k in tasks])


def write_partitioned(root: Path, job: str, values: list[int], plan_: JobPlan) -> None:
    batch = pa.record_batch({"a": values, "p": values})
    publish(root, plan_, [write_task(root, job, 0, batch, partition_by=("p",))])


def visible(root: Path) -> set[str]:
    return {
        str(path.relative_to(root))
        for path in root.rglob("*")
        if path.is_file() and path.name not in MARKS
    }


def inodes(root: Path) -> dict[str, int]:
    return {str(p.relative_to(root)): p.stat().st_ino for p in root.rglob("*")}


def test_publish_lists_shards_by_partition_and_marks_success(tmp_path: Path) -> None:
    begin_job(tmp_path, plan("j"), None)
    results = [write_task(tmp_path, "j", p) for p in (2, 0)]
    publish(tmp_path, plan("j"), [results[0], TaskResult(1, "none"), results[1]])
    assert {p.name for p in tmp_path.iterdir()} == MARKS | {
        "part-0-j-c000.tfrecord", "part-2-j-c000.tfrecord"
    }  # fmt: skip
    shards = read_output_manifest(tmp_path).shards
    assert [shard.partition for shard in shards] == [0, 2]
    assert all(s.bytes == (tmp_path / s.path).stat().st_size for s in shards)
    assert [(s.rows, s.job_id) for s in shards] == [(3, "j"), (3, "j")]


def test_overwrite_replaces_and_append_adds(tmp_path: Path) -> None:
    run_job(tmp_path, "a")
    for name in ("by_hand.tfr", "_p=1/x.tfrec", "_mine", ".mine", "backup/part-0", "d=1/_mine"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    run_job(tmp_path, "b", "append")
    assert [s.job_id for s in read_output_manifest(tmp_path).shards] == ["a", "b"]
    run_job(tmp_path, "c")
    assert visible(tmp_path) == {
        "part-0-c-c000.tfrecord", "_mine", ".mine", "backup/part-0", "d=1/_mine"
    }  # fmt: skip
    assert [s.job_id for s in read_output_manifest(tmp_path).shards] == ["c"]


def test_files_of_other_connectors_are_replaced_as_well(tmp_path: Path) -> None:
    (tmp_path / "d=1").mkdir()
    (tmp_path / "d=1" / "part-r-00000.gz").write_text("x")
    (tmp_path / "part-0-x-c000.tfrecord").write_text("x")
    run_job(tmp_path, "a")
    assert visible(tmp_path) == {"part-0-a-c000.tfrecord"}
    assert not (tmp_path / "d=1").exists()


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
@pytest.mark.parametrize("fails", [False, True])
def test_a_linked_partition_is_replaced_and_what_it_leads_to_stays(
    tmp_path: Path, dynamic: bool, fails: bool, monkeypatch
) -> None:
    root = tmp_path / "out"
    far = link_partition(root, "p=1", "part-r-0", "_mine")
    job = plan("a", dynamic=dynamic, by="p")
    begin_job(root, job, None)
    if fails:
        with monkeypatch.context() as patch:
            patch.setattr(local_commit, "write_text_atomic", lambda path, text: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                write_partitioned(root, "a", [1, 2], job)
        discard_temporary(root, "a")
        assert list_data_files(root) == ["p=1/part-r-0"]
        begin_job(root, plan("b", dynamic=dynamic, by="p"), None)
        job = plan("b", dynamic=dynamic, by="p")
    write_partitioned(root, job.job_id, [1, 2], job)
    shards = [f"p={k}/part-0-{job.job_id}-c000.tfrecord" for k in (1, 2)]
    assert list_data_files(root) == shards
    assert not (root / "p=1").is_symlink()
    assert sorted(path.name for path in far.iterdir()) == ["_mine", "part-r-0"]
    assert {path.name for path in root.iterdir()} == MARKS | {"p=1", "p=2"}


def test_files_behind_a_link_that_others_stay_in_are_replaced_there(tmp_path: Path) -> None:
    root = tmp_path / "out"
    far = link_partition(root, "p=1", "q=1/old", "q=2/old")
    job = plan("a", dynamic=True)
    begin_job(root, job, None)
    batch = pa.record_batch({"a": [7], "p": [1], "q": [1]})
    publish(root, job, [write_task(root, "a", 0, batch, partition_by=("p", "q"))])
    shard = "q=1/part-0-a-c000.tfrecord"
    assert list_data_files(root) == [f"p=1/{shard}", "p=1/q=2/old"]
    assert list_data_files(far, is_recursive=True) == [shard, "q=2/old"]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_marks_of_partitions_that_were_written_one_by_one_go_with_their_files(
    tmp_path: Path, dynamic: bool, fails: bool, monkeypatch
) -> None:
    for value in (1, 2):
        part = tmp_path / f"p={value}"
        begin_job(part, plan("one"), None)
        publish(part, plan("one"), [write_task(part, "one", index=True)])
    before = inodes(tmp_path)
    job = plan("two", dynamic=dynamic, by="p")
    begin_job(tmp_path, job, None)

    if fails:
        monkeypatch.setattr(local_commit, "write_text_atomic", lambda path, text: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            write_partitioned(tmp_path, "two", [1], job)
        discard_temporary(tmp_path, "two")
        assert inodes(tmp_path) == before
        return
    write_partitioned(tmp_path, "two", [1], job)

    one = "part-0-one-c000.tfrecord"
    stays = {f"p=2/{one}", f"p=2/_index/{one}.idx"} if dynamic else set()
    assert visible(tmp_path) == {"p=1/part-0-two-c000.tfrecord", *stays}
    assert not MARKS & {path.name for path in (tmp_path / "p=1").iterdir()}
    assert (tmp_path / "p=2").exists() == dynamic


def test_an_append_adds_to_a_linked_partition(tmp_path: Path) -> None:
    root = tmp_path / "out"
    far = link_partition(root, "p=1", "part-r-0")
    job = plan("a", "append", by="p")
    begin_job(root, job, None)
    write_partitioned(root, "a", [1], job)
    assert list_data_files(root) == ["p=1/part-0-a-c000.tfrecord", "p=1/part-r-0"]
    assert (far / "part-0-a-c000.tfrecord").exists()


def test_a_link_to_nowhere_gives_way_to_a_partition(tmp_path: Path) -> None:
    (tmp_path / "p=1").symlink_to("none")
    job = plan("a", dynamic=True, by="p")
    begin_job(tmp_path, job, None)
    write_partitioned(tmp_path, "a", [1], job)
    assert list_data_files(tmp_path) == ["p=1/part-0-a-c000.tfrecord"]


def test_a_linked_file_comes_back_where_the_commit_fails(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "far").write_text("x")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").symlink_to("../far")
    begin_job(tmp_path / "out", plan("a"), None)
    result = write_task(tmp_path / "out", "a")
    monkeypatch.setattr(local_commit, "write_text_atomic", lambda path, text: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        publish(tmp_path / "out", plan("a"), [result])
    assert list_data_files(tmp_path / "out") == ["old"]


def test_an_append_beside_a_file_that_is_gone_is_refused(tmp_path: Path) -> None:
    job = plan("a", by="p")
    begin_job(tmp_path, job, None)
    write_partitioned(tmp_path, "a", [1, 2], job)
    shutil.rmtree(tmp_path / "p=2")
    with pytest.raises(InputDataError, match="is missing"):
        begin_job(tmp_path, plan("b", "append", by="p"), None)


@pytest.mark.parametrize("mode", ["overwrite", "append"])
def test_a_missing_attempt_publishes_nothing_and_keeps_the_old(tmp_path: Path, mode: str) -> None:
    run_job(tmp_path, "a")
    before = inodes(tmp_path)
    begin_job(tmp_path, plan("b", mode), None)
    results = [write_task(tmp_path, "b", p) for p in (0, 1)]
    temporary = temporary_directory(tmp_path, "b")
    (temporary / results[1].attempt / "part-1-b-c000.tfrecord").write_bytes(b"cut")
    with pytest.raises(InternalError, match="partition 1"):
        publish(tmp_path, plan("b", mode), results)
    discard_temporary(tmp_path, "b")
    assert inodes(tmp_path) == before


def test_an_error_while_publishing_takes_everything_back(tmp_path, monkeypatch) -> None:
    begin_job(tmp_path, plan("a", by="p"), None)
    write_partitioned(tmp_path, "a", [1, 2], plan("a", by="p"))
    before = inodes(tmp_path)
    begin_job(tmp_path, plan("b", by="p"), None)

    def fail(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(local_commit, "write_text_atomic", fail)
    with pytest.raises(OSError, match="No space"):
        write_partitioned(tmp_path, "b", [2, 3], plan("b", by="p"))
    discard_temporary(tmp_path, "b")
    assert inodes(tmp_path) == before


def test_a_late_attempt_neither_brings_the_job_back_nor_breaks_it(tmp_path: Path) -> None:
    begin_job(tmp_path, plan("a"), None)
    result = write_task(tmp_path, "a")
    with (  # noqa: PT012
        pytest.raises(FileNotFoundError),
        hold_attempt(tmp_path, "a", "late") as attempt,
    ):
        publish(tmp_path, plan("a"), [result])
        WriteTask(attempt, "part-0", WriteOptions(str(tmp_path))).write_all(iter([BATCH]))
    with pytest.raises(InternalError, match="not there"), hold_attempt(tmp_path, "a", "later"):
        pass
    assert {p.name for p in tmp_path.iterdir()} == MARKS | {"part-0-a-c000.tfrecord"}


def test_a_late_attempt_adds_nothing_to_a_staged_directory(tmp_path: Path) -> None:
    create_temporary(tmp_path, "a")
    result = write_task(tmp_path, "a")
    with (  # noqa: PT012
        pytest.raises(FileNotFoundError),
        hold_attempt(tmp_path, "a", "late") as attempt,
    ):
        publish_staged(tmp_path, plan("a"), [result])
        WriteTask(attempt, "train/part-0", WriteOptions(str(tmp_path))).write_all(iter([BATCH]))
    assert {p.name for p in tmp_path.iterdir()} == {"part-0-a-c000.tfrecord", "_sluice_commit.json"}


def test_a_staged_directory_gets_no_shard_where_an_attempt_is_missing(tmp_path: Path) -> None:
    create_temporary(tmp_path, "a")
    results = [write_task(tmp_path, "a", p) for p in (0, 1)]
    (temporary_directory(tmp_path, "a") / results[1].attempt / "part-1-a-c000.tfrecord").unlink()
    with pytest.raises(InternalError, match="partition 1"):
        publish_staged(tmp_path, plan("a"), results)
    assert visible(tmp_path) == {
        path for path in visible(tmp_path) if path.startswith("_temporary-a")
    }


def test_attempts_that_lost_are_not_published(tmp_path: Path) -> None:
    begin_job(tmp_path, plan("a"), None)
    result = write_task(tmp_path, "a")
    twin = temporary_directory(tmp_path, "a") / "part-0-attempt-9"
    twin.mkdir()
    (twin / ".x.tmp").write_bytes(b"cut off")
    (twin / "part-0-a-c000.tfrecord").write_bytes(b"a speculative twin")
    publish(tmp_path, plan("a"), [result])
    assert visible(tmp_path) == {"part-0-a-c000.tfrecord"}
    assert not temporary_directory(tmp_path, "a").exists()


def test_statistics_that_are_no_json_change_nothing(tmp_path: Path) -> None:
    run_job(tmp_path, "a")
    before = inodes(tmp_path)
    begin_job(tmp_path, plan("b"), None)
    result = write_task(tmp_path, "b")
    (item,) = result.shards
    bad = replace(item, shard=replace(item.shard, statistics={"x": object()}))
    with pytest.raises(TypeError):
        publish(tmp_path, plan("b"), [replace(result, shards=(bad,))])
    discard_temporary(tmp_path, "b")
    assert inodes(tmp_path) == before


def test_an_overwrite_refuses_to_lose_what_another_job_published_meanwhile(tmp_path: Path) -> None:
    run_job(tmp_path, "a")
    begin_job(tmp_path, plan("slow"), None)
    result = write_task(tmp_path, "slow")
    run_job(tmp_path, "quick", "append")
    before = visible(tmp_path)
    with pytest.raises(UpstreamNotReadyError, match=r"(?s)nothing of this job.*by job quick"):
        publish(tmp_path, plan("slow"), [result])
    discard_temporary(tmp_path, "slow")
    assert visible(tmp_path) == before - {path for path in before if path.startswith("_temporary-")}
    run_job(tmp_path, "again")
    assert visible(tmp_path) == {"part-0-again-c000.tfrecord"}


def test_two_overwrites_at_once_the_second_is_refused(tmp_path: Path) -> None:
    for job in ("x", "y"):
        begin_job(tmp_path, plan(job), None)
    results = {job: write_task(tmp_path, job) for job in ("x", "y")}
    publish(tmp_path, plan("x"), [results["x"]])
    with pytest.raises(UpstreamNotReadyError, match="by job x"):
        publish(tmp_path, plan("y"), [results["y"]])


def test_appends_at_once_both_succeed(tmp_path: Path) -> None:
    for job in ("x", "y"):
        begin_job(tmp_path, plan(job, "append"), None)
    results = {job: write_task(tmp_path, job) for job in ("x", "y")}
    for job in ("y", "x"):
        publish(tmp_path, plan(job, "append"), [results[job]])
    assert [s.job_id for s in read_output_manifest(tmp_path).shards] == ["y", "x"]


def test_an_append_after_an_overwrite_that_began_later_adds(tmp_path: Path) -> None:
    begin_job(tmp_path, plan("x", "append"), None)
    result = write_task(tmp_path, "x")
    run_job(tmp_path, "y")
    publish(tmp_path, plan("x", "append"), [result])
    assert [s.job_id for s in read_output_manifest(tmp_path).shards] == ["y", "x"]


def test_error_and_ignore_look_at_the_start_and_again_at_commit(tmp_path: Path) -> None:
    begin_job(tmp_path, plan("e", "errorifexists"), None)
    begin_job(tmp_path, plan("i", "ignore"), None)
    results = {job: write_task(tmp_path, job) for job in ("e", "i")}
    run_job(tmp_path, "quick", "append")
    with pytest.raises(UpstreamNotReadyError, match="by job quick"):
        publish(tmp_path, plan("e", "errorifexists"), [results["e"]])
    assert not publish(tmp_path, plan("i", "ignore"), [results["i"]])
    discard_temporary(tmp_path, "e")
    assert visible(tmp_path) == {"part-0-quick-c000.tfrecord"}
    with pytest.raises(ConfigError, match="holds data already"):
        begin_job(tmp_path, plan("e2", "errorifexists"), None)


def test_dynamic_overwrites_of_different_partitions_both_succeed(tmp_path: Path) -> None:
    run_plan = plan("a", by="p")
    begin_job(tmp_path, run_plan, None)
    write_partitioned(tmp_path, "a", [1, 2, 3], run_plan)
    plans = {job: plan(job, dynamic=True, by="p") for job in ("x", "y", "z")}
    for job in plans:
        begin_job(tmp_path, plans[job], None)
    write_partitioned(tmp_path, "x", [1], plans["x"])
    write_partitioned(tmp_path, "y", [2, 4], plans["y"])
    with pytest.raises(UpstreamNotReadyError, match=r"(?s)p=4.*by job x, y"):
        write_partitioned(tmp_path, "z", [3, 4], plans["z"])
    discard_temporary(tmp_path, "z")
    owners = {s.partition_values["p"]: s.job_id for s in read_output_manifest(tmp_path).shards}
    assert owners == {"1": "x", "2": "y", "3": "a", "4": "y"}
    assert len(visible(tmp_path)) == 4


def test_a_job_that_fails_to_publish_does_not_stop_another(tmp_path, monkeypatch) -> None:
    """Files taken back to their place are the same files as before."""
    run_job(tmp_path, "a")
    for job in ("x", "y"):
        begin_job(tmp_path, plan(job), None)
    results = {job: write_task(tmp_path, job) for job in ("x", "y")}
    with monkeypatch.context() as patch:
        patch.setattr(local_commit, "write_text_atomic", lambda path, text: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            publish(tmp_path, plan("x"), [results["x"]])
    publish(tmp_path, plan("y"), [results["y"]])
    assert visible(tmp_path) - {p for p in visible(tmp_path) if p.startswith("_temp")} == {
        "part-0-y-c000.tfrecord"
    }


def test_a_damaged_manifest_stops_an_append_but_not_an_overwrite(tmp_path: Path) -> None:
    run_job(tmp_path, "a")
    (tmp_path / "_sluice_commit.json").write_text("{")
    with pytest.raises(InputDataError, match="damaged"):
        begin_job(tmp_path, plan("b", "append"), None)
    run_job(tmp_path, "c")
    assert [s.job_id for s in read_output_manifest(tmp_path).shards] == ["c"]


def test_begin_job_sweeps_what_a_dead_driver_left(tmp_path: Path) -> None:
    from conf.storage.processes import describe_process

    child = os.fork()
    if child == 0:  # pragma: no cover - waits to be killed
        os.pause() if hasattr(os, "pause") else __import__("signal").pause()
    begin_job(tmp_path, plan("dead"), describe_process(child))
    begin_job(tmp_path, plan("b"), None)
    assert temporary_directory(tmp_path, "dead").exists()
    os.kill(child, 9)
    os.waitpid(child, 0)
    begin_job(tmp_path, plan("c"), None)
    assert not temporary_directory(tmp_path, "dead").exists()
    assert temporary_directory(tmp_path, "b").exists()


def age(path: Path, hours: float) -> None:
    then = time.time() - hours * 3600
    for item in (*path.rglob("*"), path):
        os.utime(item, (then, then))


def start(root: Path, job: str) -> Path:
    create_temporary(root, job)
    with hold_attempt(root, job, "attempt") as attempt:
        (attempt / "shard").write_bytes(b"x")
    return temporary_directory(root, job)


def test_only_dead_jobs_are_swept(tmp_path: Path) -> None:
    places = {job: start(tmp_path, job) for job in ("old", "recent", "held", "growing")}
    for job, hours in (("old", 25), ("recent", 23), ("held", 48), ("growing", 48)):
        age(places[job], hours)
    (places["growing"] / "attempt" / "shard").touch()
    descriptor = os.open(places["held"] / ".lock", os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    try:
        assert sweep_stale(tmp_path) == [places["old"]]
    finally:
        os.close(descriptor)
    assert len(list(tmp_path.iterdir())) == 3


def test_a_job_with_a_dead_driver_is_swept_at_once_even_while_a_task_writes(tmp_path) -> None:
    here = describe_process(os.getpid())
    create_temporary(tmp_path, "live", owner=here)
    create_temporary(tmp_path, "elsewhere", owner=replace(here, boot_id="x", start_ticks=-1))
    create_temporary(tmp_path, "dead", owner=replace(here, start_ticks=-1))
    with (  # noqa: PT012
        pytest.raises(FileNotFoundError),
        hold_attempt(tmp_path, "dead", "attempt") as attempt,
    ):
        assert sweep_stale(tmp_path) == [temporary_directory(tmp_path, "dead")]
        (attempt / "shard").write_bytes(b"x")
    assert {p.name for p in tmp_path.iterdir()} == {"_temporary-live", "_temporary-elsewhere"}


def test_a_discard_that_was_killed_is_finished(tmp_path: Path) -> None:
    (tmp_path / "_temporary-x.discarded").mkdir()
    discard_temporary(tmp_path, "y")
    assert not list(tmp_path.iterdir())


def test_a_failed_attempt_leaves_nothing(tmp_path: Path) -> None:
    create_temporary(tmp_path, "j")
    with pytest.raises(ValueError), hold_attempt(tmp_path, "j", "attempt") as attempt:  # noqa: PT012
        (attempt / "shard").write_bytes(b"x")
        raise ValueError
    assert not (temporary_directory(tmp_path, "j") / "attempt").exists()


def test_the_baseline_comes_back(tmp_path: Path) -> None:
    create_temporary(tmp_path, "j", Baseline({"": "0", "d=1": "1"}, ("a", "b")))
    assert read_baseline(tmp_path, "j") == Baseline({"": "0", "d=1": "1"}, ("a", "b"))
    with pytest.raises(InternalError, match="not there"):
        read_baseline(tmp_path, "other")

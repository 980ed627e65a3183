"""Commits in an object store, interrupted anywhere."""

from __future__ import annotations

import contextlib
import json
import random
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from conf.errors import ConfigError, InputDataError, InternalError, UpstreamNotReadyError
from conf.storage import object_store as storage_module
from conf.storage.object_store import Storage
from conf.storage.processes import Owner
from etl.tfrecord.commit.commit_plan import SaveMode
from etl.tfrecord.commit.committer import ObjectCommitter
from etl.tfrecord.commit.object_commit import (
    hold_object_attempt,
    sweep_dead_jobs,
    temporary_storage,
)
from etl.tfrecord.commit.object_view import read_object_manifest
from etl.tfrecord.commit.output_manifest import COMMIT_FILE
from etl.tfrecord.files.data_files import index_path
from tests.etl.tfrecord.objects.word_jobs import Job, leftovers, read_words
from tests.fake_store import FakeStore

OBJECT_COMMIT_MARK = pytest.mark.usefixtures("owner")


class Death(BaseException):
    """Nothing runs after it."""


@OBJECT_COMMIT_MARK
def test_append_and_overwrite(store: FakeStore, root: Storage) -> None:
    assert Job(root, "append", ["a", "b"]).run()
    assert Job(root, "append", ["c"]).run()
    assert read_words(root) == ["a", "b", "c"]
    assert Job(root, "overwrite", ["d"]).run()
    assert read_words(root) == ["d"]
    assert leftovers(root, store.objects(root.root)) == []
    assert "_SUCCESS" in store.objects(root.root)


@OBJECT_COMMIT_MARK
def test_dynamic_overwrite_replaces_only_its_partitions(store: FakeStore, root: Storage) -> None:
    Job(root, "append", ["d=1/a", "d=2/b"]).run()
    Job(root, "overwrite", ["d=2/c", "d=3/e"], replaces_partitions=True).run()
    assert read_words(root) == ["d=1/a", "d=2/c", "d=3/e"]
    assert leftovers(root, store.objects(root.root)) == []


@OBJECT_COMMIT_MARK
def test_modes_protect_what_is_there(store: FakeStore, root: Storage) -> None:
    Job(root, "errorifexists", ["a"]).run()
    with pytest.raises(ConfigError, match="holds data already"):
        Job(root, "errorifexists", ["b"]).begin()
    assert not Job(root, "ignore", ["b"]).run()
    assert read_words(root) == ["a"]


@OBJECT_COMMIT_MARK
def test_shards_of_others_do_not_vanish_behind_a_manifest(store: FakeStore, root: Storage) -> None:
    root.put("part-r-00000.tfrecord", b"foreign")
    with pytest.raises(ConfigError, match="without a manifest"):
        Job(root, "append", ["a"]).begin()
    assert read_words(root) == ["foreign"]
    Job(root, "overwrite", ["a"]).run()
    assert read_words(root) == ["a"]
    assert leftovers(root, store.objects(root.root)) == []


@OBJECT_COMMIT_MARK
def test_what_readers_take_makes_way_and_the_rest_stays(store: FakeStore, root: Storage) -> None:
    others = ["_mine", ".mine", "plain/part-0", ".d=1/part-0", "d=1/plain/x"]
    data = ["by_hand.tfr", "_p=1/x.tfrec", "data_tfrecord-00000-of-00001.gz", "d=1/f"]
    for key in (*others, *data):
        root.put(key, b"foreign")
    with pytest.raises(ConfigError, match="holds data already"):
        Job(root, "errorifexists", ["a"]).begin()
    assert not Job(root, "ignore", ["a"]).run()
    Job(root, "overwrite", ["a"]).run()
    assert read_words(root) == ["a"]
    assert leftovers(root, store.objects(root.root)) == sorted(others)


@OBJECT_COMMIT_MARK
def test_marks_of_partitions_that_were_written_one_by_one_go_with_their_files(
    store: FakeStore, root: Storage
) -> None:
    for value in (1, 2):
        Job(root.child(f"d={value}"), "overwrite", ["a"]).run()
    assert {"d=1/_SUCCESS", f"d=2/{COMMIT_FILE}"} < store.objects(root.root)
    Job(root, "overwrite", ["d=2/c"]).run()
    assert read_words(root) == ["d=2/c"]
    assert leftovers(root, store.objects(root.root)) == []


@OBJECT_COMMIT_MARK
def test_a_partition_is_replaced_however_its_keys_are_spelled(root: Storage) -> None:
    Job(root, "append", ["d=%31/a", "d=2/b", "d=1/e=1/c"]).run()
    Job(root, "overwrite", ["d=1/x"], replaces_partitions=True).run()
    assert read_words(root) == ["d=1/x", "d=2/b"]


@OBJECT_COMMIT_MARK
def test_an_append_beside_an_object_that_is_gone_is_refused(root: Storage) -> None:
    Job(root, "append", ["a"]).run()
    root.delete(read_object_manifest(root).shards[0].path)
    with pytest.raises(InputDataError, match="is missing"):
        Job(root, "append", ["b"]).begin()


@OBJECT_COMMIT_MARK
def test_two_shards_of_one_key_are_refused(store: FakeStore, root: Storage) -> None:
    Job(root, "append", ["a"]).run()
    before = store.objects(root.root)
    job = Job(root, "append", ["b"]).begin().run_tasks()
    job.results.append(replace(job.results[0], partition=1))
    with pytest.raises(InternalError, match="one path"):
        job.publish()
    assert store.objects(root.root) == before


@OBJECT_COMMIT_MARK
@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_missing_attempt_publishes_nothing(store: FakeStore, root: Storage, damage: str) -> None:
    Job(root, "append", ["a"]).run()
    before = store.objects(root.root)
    job = Job(root, "overwrite", ["bb", "cc"]).begin().run_tasks()
    place = f"_temporary-{job.plan.job_id}/{job.results[1].attempt}"
    [shard] = job.results[1].shards
    key = f"{place}/{shard.shard.info.path}"
    root.delete(key) if damage == "missing" else root.put(key, b"c")
    with pytest.raises(InternalError, match="partition 1"):
        job.publish()
    assert read_words(root) == ["a"]
    assert before <= store.objects(root.root)
    assert store.objects(root.root) == before


@OBJECT_COMMIT_MARK
def test_an_error_takes_everything_back(store: FakeStore, root: Storage) -> None:
    Job(root, "append", ["a"]).run()
    before = store.objects(root.root)
    job = Job(root, "overwrite", ["b", "c"]).begin().run_tasks()

    def refuse_manifest(name: str) -> None:
        if name == f"put {root.root}/{COMMIT_FILE}":
            raise OSError(28, "No space left on device")

    store.hook = refuse_manifest
    with pytest.raises(OSError, match="No space"):
        job.publish()
    store.hook = lambda name: None
    assert read_words(root) == ["a"]
    assert {k for k in store.objects(root.root) if not k.startswith("_temporary-")} == before


@OBJECT_COMMIT_MARK
def test_a_late_attempt_leaves_nothing(store: FakeStore, root: Storage) -> None:
    job = Job(root, "append", ["a"]).begin().run_tasks()
    with (  # noqa: PT012
        pytest.raises(InternalError, match="not open"),
        hold_object_attempt(root, job.plan.job_id, "late") as place,
    ):
        job.publish()
        place.put("part-9.tfrecord", b"late")
    with (
        pytest.raises(InternalError, match="not open"),
        hold_object_attempt(root, job.plan.job_id, "later"),
    ):
        pass
    assert leftovers(root, store.objects(root.root)) == []


@OBJECT_COMMIT_MARK
def test_live_jobs_are_not_swept(store: FakeStore, root: Storage, owner, dead_owner) -> None:
    living = Job(root, "append", ["a"]).begin().run_tasks()
    owner(dead_owner)
    Job(root, "append", ["b"], job_id="d" * 32).begin().run_tasks()
    assert sweep_dead_jobs(root) == ["d" * 32]
    assert living.publish()


SETUPS: dict[str, tuple[list[str], Callable[[Storage], Job], list[str]]] = {
    "first": ([], lambda r: Job(r, "append", ["x", "y"]), ["x", "y"]),
    "append": (["a", "b"], lambda r: Job(r, "append", ["x"]), ["a", "b", "x"]),
    "overwrite": (["a", "b"], lambda r: Job(r, "overwrite", ["x", "y"]), ["x", "y"]),
    "empty": (["a", "b"], lambda r: Job(r, "overwrite", []), []),
    "dynamic": (
        ["d=1/a", "d=2/b"],
        lambda r: Job(r, "overwrite", ["d=2/x"], replaces_partitions=True),
        ["d=1/a", "d=2/x"],
    ),
    "foreign": (["foreign"], lambda r: Job(r, "overwrite", ["x", "y"]), ["x", "y"]),
}


def _prepare(root: Storage, name: str, words: list[str]) -> None:
    root.delete_tree()
    if name == "foreign":
        root.put("part-r-00000.tfrecord", b"foreign")
    elif words:
        Job(root, "append", words).run()


def _die_at(store: FakeStore, step: int) -> None:
    count = 0

    def die(name: str) -> None:
        nonlocal count
        count += 1
        if count > step:
            raise Death(name)

    store.hook = die


@OBJECT_COMMIT_MARK
@pytest.mark.parametrize("name", SETUPS)
def test_death_after_every_request(
    store: FakeStore, root: Storage, owner: Callable[..., None], dead_owner: Owner, name: str
) -> None:
    """A reader sees old rows or new ones, never a mix; the next write leaves nothing else."""
    words, build, new = SETUPS[name]
    living = Job(root, "append", [])  # only to learn who owns jobs that live
    outcomes = set()
    for step in range(500):
        _prepare(root, name, words)
        owner(dead_owner)
        job = build(root).begin().run_tasks()
        _die_at(store, step)
        has_died = False
        try:
            job.publish()
        except Death:
            has_died = True
        store.hook = lambda _: None
        owner(None)
        seen = read_words(root)
        assert seen in (words, new), f"step {step}"
        outcomes.add(tuple(seen))
        if seen == words and name == "foreign":
            Job(root, "overwrite", ["next"]).run()
            assert read_words(root) == ["next"]
        else:
            Job(root, "append", ["d=9/next"]).run()
            assert read_words(root) == sorted([*seen, "d=9/next"]), f"step {step}"
        assert leftovers(root, store.objects(root.root)) == [], f"step {step}"
        assert "_SUCCESS" in store.objects(root.root)
        if not has_died:
            break
    else:
        pytest.fail("the job never came to its end")
    assert outcomes == {tuple(words), tuple(new)}
    assert living.results == []


@OBJECT_COMMIT_MARK
def test_a_commit_that_was_killed_is_aborted_by_its_driver(store: FakeStore, root: Storage) -> None:
    """The driver lives on: what a killed commit left must not stand in the way until it ends."""
    for step in range(0, 60, 3):
        _prepare(root, "overwrite", ["a", "b"])
        job = Job(root, "overwrite", ["x", "y"]).begin().run_tasks()
        _die_at(store, step)
        with contextlib.suppress(Death):
            job.publish()
        store.hook = lambda _: None
        ObjectCommitter(root).discard(job.plan.job_id)
        seen = read_words(root)
        assert seen in (["a", "b"], ["x", "y"])
        Job(root, "append", ["next"]).run()
        assert read_words(root) == sorted([*seen, "next"])
        assert leftovers(root, store.objects(root.root)) == []


@OBJECT_COMMIT_MARK
def test_a_record_that_outlived_its_job_removes_nothing_in_use(
    store: FakeStore, root: Storage
) -> None:
    Job(root, "append", ["a"]).run()
    committed = read_object_manifest(root)
    assert committed is not None
    keys = [committed.shards[0].path, index_path(committed.shards[0].path)]
    stale = {"owner": None, "is_over": True, "replaces": [*keys, "../other"]}
    root.put(f"_temporary-{committed.shards[0].job_id}/.job.json", json.dumps(stale).encode())
    Job(root, "append", ["b"]).run()
    assert read_words(root) == ["a", "b"]
    assert leftovers(root, store.objects(root.root)) == []


@OBJECT_COMMIT_MARK
@pytest.mark.parametrize("is_reported", [True, False])
@pytest.mark.parametrize("mode", ["append", "overwrite", "ignore"])
def test_a_put_whose_answer_is_lost_counts(
    store: FakeStore, root: Storage, mode: SaveMode, is_reported: bool, monkeypatch
) -> None:
    """The client tries again and is told that somebody else was faster, or ends in an error."""
    put = store.put

    def lose(path: str, data: bytes, over: object) -> None:
        put(path, data, over)
        if path.endswith(COMMIT_FILE):
            raise OSError("connection reset") if is_reported else FileExistsError(path)

    if mode != "ignore":
        Job(root, "append", ["a"]).run()
    monkeypatch.setattr(store, "put", lose)
    assert Job(root, mode, ["b", "c"]).run()
    assert read_words(root) == (["a"] if mode == "append" else []) + ["b", "c"]
    assert leftovers(root, store.objects(root.root)) == []


@OBJECT_COMMIT_MARK
def test_a_damaged_manifest_is_refused_or_replaced(store: FakeStore, root: Storage) -> None:
    Job(root, "append", ["a"]).run()
    root.put(COMMIT_FILE, b"{")
    with pytest.raises(InputDataError, match="damaged"):
        Job(root, "append", ["b"]).begin()
    with pytest.raises(ConfigError, match="without a manifest"):
        Job(root, "overwrite", ["b"], replaces_partitions=True).begin()
    Job(root, "overwrite", ["c"]).run()
    assert read_words(root) == ["c"]
    assert leftovers(root, store.objects(root.root)) == []


@pytest.mark.exhaustive
@OBJECT_COMMIT_MARK
def test_death_while_clearing_up_after_a_death(
    store: FakeStore, root: Storage, owner: Callable[..., None], dead_owner: Owner
) -> None:
    words, build, new = SETUPS["overwrite"]
    generator = random.Random(7)
    for _ in range(60):
        _prepare(root, "overwrite", words)
        owner(dead_owner)
        seen = words
        for _ in range(4):  # deaths, one upon the other
            job = build(root)
            _die_at(store, generator.randrange(20, 60))
            with contextlib.suppress(Death):
                job.run()
            store.hook = lambda _: None
            seen = read_words(root)
            assert seen in (words, new)
        owner(None)
        Job(root, "append", ["next"]).run()
        assert read_words(root) == sorted([*seen, "next"])
        assert leftovers(root, store.objects(root.root)) == []


@OBJECT_COMMIT_MARK
def test_requests_of_many_shards_run_side_by_side(store, root, monkeypatch) -> None:
    monkeypatch.setattr(storage_module, "REQUESTS", 8)
    Job(root, "append", [f"a{k}" for k in range(40)]).run()
    Job(root, "overwrite", [f"b{k}" for k in range(40)]).run()
    assert read_words(root) == sorted(f"b{k}" for k in range(40))
    assert leftovers(root, store.objects(root.root)) == []


@OBJECT_COMMIT_MARK
def test_the_manifest_names_no_setting(store: FakeStore, root: Storage) -> None:
    Job(root, "append", ["a"]).run()
    data = json.loads(root.read(COMMIT_FILE) or b"")
    assert set(data) == {
        "format_version", "record_type", "compression", "features", "lowering",
        "partition_columns", "shards",
    }  # fmt: skip


REAL_STORES_MARK = pytest.mark.usefixtures("owner")


@REAL_STORES_MARK
def test_append_overwrite_and_dynamic_overwrite(real_root: Storage) -> None:
    Job(real_root, "append", ["d=1/a", "d=2/b"]).run()
    Job(real_root, "append", ["d=2/c"]).run()
    assert read_words(real_root) == ["d=1/a", "d=2/b", "d=2/c"]
    Job(real_root, "overwrite", ["d=2/e", "d=3/f"], replaces_partitions=True).run()
    assert read_words(real_root) == ["d=1/a", "d=2/e", "d=3/f"]
    Job(real_root, "overwrite", ["g"]).run()
    assert read_words(real_root) == ["g"]
    assert leftovers(real_root) == []
    assert real_root.find("_SUCCESS") is not None


@REAL_STORES_MARK
def test_appends_at_the_same_time_all_stay(real_root: Storage) -> None:
    jobs = [Job(real_root, "append", [f"{k}-a", f"{k}-b"]) for k in range(4)]
    failures: list[BaseException] = []

    def run(job: Job) -> None:
        try:
            job.begin().run_tasks().publish()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert read_words(real_root) == sorted(f"{k}-{x}" for k in range(4) for x in "ab")
    assert leftovers(real_root) == []


@REAL_STORES_MARK
def test_of_two_overwrites_one_wins(real_root: Storage) -> None:
    Job(real_root, "append", ["old"]).run()
    first, second = (Job(real_root, "overwrite", [word]).begin() for word in ("1", "2"))
    assert second.run_tasks().publish()
    with pytest.raises(UpstreamNotReadyError):
        first.run_tasks().publish()
    assert read_words(real_root) == ["2"]


@REAL_STORES_MARK
def test_what_a_dead_job_left_is_swept(
    real_root: Storage, owner: Callable[[Owner | None], None], dead_owner: Owner, live_owner: Owner
) -> None:
    Job(real_root, "append", ["a"]).run()
    owner(dead_owner)
    dead = Job(real_root, "overwrite", ["lost"]).begin().run_tasks()
    assert temporary_storage(real_root, dead.plan.job_id).list_objects()
    owner(live_owner)
    alive = Job(real_root, "append", ["b"]).begin().run_tasks()
    Job(real_root, "append", ["c"]).run()
    assert not temporary_storage(real_root, dead.plan.job_id).list_objects()
    assert alive.publish()
    assert read_words(real_root) == ["a", "b", "c"]
    assert leftovers(real_root) == []

"""Commits in an object store: interrupted anywhere, and two at a time."""

from __future__ import annotations

import contextlib
import json
import random
import threading
from collections.abc import Callable

import pytest

from conf.errors import ConfigError, InputDataError, InternalError, UpstreamNotReadyError
from etl.tfrecord import storage as storage_module
from etl.tfrecord.committed import COMMIT_FILE
from etl.tfrecord.publishing.committer import ObjectCommitter
from etl.tfrecord.publishing.intents import Intent
from etl.tfrecord.publishing.liveness import Owner
from etl.tfrecord.publishing.object_attempts import hold_object_attempt, sweep_dead_jobs
from etl.tfrecord.publishing.object_view import read_committed_object
from etl.tfrecord.side_index import index_path
from etl.tfrecord.storage import Storage

from .conftest import FakeStore
from .jobs import Job, leftovers, read_words

pytestmark = pytest.mark.usefixtures("owner")

HIDDEN = ("_temporary-", "_publishing-")


class Death(BaseException):
    """Nothing runs after it."""


def test_append_and_overwrite(store: FakeStore, root: Storage) -> None:
    assert Job(root, "append", ["a", "b"]).run()
    assert Job(root, "append", ["c"]).run()
    assert read_words(root) == ["a", "b", "c"]
    assert Job(root, "overwrite", ["d"]).run()
    assert read_words(root) == ["d"]
    assert leftovers(root, store.objects(root.root)) == []
    assert "_SUCCESS" in store.objects(root.root)


def test_dynamic_overwrite_replaces_only_its_partitions(store: FakeStore, root: Storage) -> None:
    Job(root, "append", ["d=1/a", "d=2/b"]).run()
    Job(root, "overwrite", ["d=2/c", "d=3/e"], replaces_partitions=True).run()
    assert read_words(root) == ["d=1/a", "d=2/c", "d=3/e"]
    assert leftovers(root, store.objects(root.root)) == []


def test_modes_protect_what_is_there(store: FakeStore, root: Storage) -> None:
    Job(root, "errorifexists", ["a"]).run()
    with pytest.raises(ConfigError, match="holds data already"):
        Job(root, "errorifexists", ["b"]).begin()
    assert not Job(root, "ignore", ["b"]).run()
    assert read_words(root) == ["a"]


def test_shards_of_others_do_not_vanish_behind_a_manifest(store: FakeStore, root: Storage) -> None:
    root.put("part-r-00000.tfrecord", b"foreign")
    with pytest.raises(ConfigError, match="without a manifest"):
        Job(root, "append", ["a"]).begin()
    assert read_words(root) == ["foreign"]
    Job(root, "overwrite", ["a"]).run()
    assert read_words(root) == ["a"]
    assert leftovers(root, store.objects(root.root)) == []


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
    assert not [k for k in store.objects(root.root) if k.startswith("_publishing-")]


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


def test_an_intent_that_outlived_its_job_removes_nothing_in_use(
    store: FakeStore, root: Storage
) -> None:
    Job(root, "append", ["a"]).run()
    committed = read_committed_object(root)
    assert committed is not None
    keys = (committed.shards[0].path, index_path(committed.shards[0].path))
    stale = Intent("j", None, "another digest", new=keys, old=keys, is_over=True)
    root.put(stale.key, stale.dumps())
    Job(root, "append", ["b"]).run()
    assert read_words(root) == ["a", "b"]
    assert leftovers(root, store.objects(root.root)) == []


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


def test_an_overwrite_in_the_midst_of_another(store: FakeStore, root: Storage) -> None:
    """At each request of one job the other runs as a whole: one wins, the other says so."""
    for step in range(500):
        _prepare(root, "overwrite", ["a", "b"])
        first = Job(root, "overwrite", ["x", "y"]).begin().run_tasks()
        second = Job(root, "overwrite", ["z"]).begin().run_tasks()
        wins: list[str] = []
        count = 0

        def interrupt(_: str, second: Job = second, step: int = step, wins=wins) -> None:
            nonlocal count
            count += 1
            if count == step + 1:
                store.hook = lambda _: None
                _try_publish(second, "second", wins)

        store.hook = interrupt
        _try_publish(first, "first", wins)
        store.hook = lambda _: None
        expected = {"first": ["x", "y"], "second": ["z"]}
        assert len(wins) <= 1
        assert read_words(root) == (expected[wins[0]] if wins else ["a", "b"])
        if count <= step:
            break
    else:
        pytest.fail("the job never came to its end")


def _try_publish(job: Job, name: str, wins: list[str], patience_s: float = 0.0) -> None:
    with contextlib.suppress(UpstreamNotReadyError):
        job.publish(patience_s)
        wins.append(name)


class Turns:
    """Lets threads make one request at a time, in an order drawn by chance."""

    def __init__(self, seed: int, threads: int) -> None:
        self._random, self._condition = random.Random(seed), threading.Condition()
        self._waiting: set[int] = set()
        self._running, self._chosen = threads, None

    def __call__(self, name: str) -> None:
        me = threading.get_ident()
        with self._condition:
            self._waiting.add(me)
            self._choose()
            while self._chosen != me:
                self._condition.wait()
            self._chosen = None
            self._waiting.discard(me)

    def leave(self) -> None:
        with self._condition:
            self._running -= 1
            self._choose()

    def _choose(self) -> None:
        if self._chosen is None and self._waiting and len(self._waiting) == self._running:
            self._chosen = self._random.choice(sorted(self._waiting))
            self._condition.notify_all()


@pytest.mark.parametrize("mode", ["overwrite", "append", "ignore"])
def test_two_jobs_request_by_request(
    store: FakeStore, root: Storage, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etl.tfrecord.publishing.intents._FIRST_WAIT_S", 0.001)
    for seed in range(60):
        root.delete_tree()
        jobs = [Job(root, mode, words).begin().run_tasks() for words in (["x", "y"], ["z"])]
        turns = Turns(seed, len(jobs))
        published: list[str] = []

        def run(job, name, turns=turns, patience_s=0.05 * (seed % 2), published=published) -> None:
            with contextlib.suppress(UpstreamNotReadyError):
                if job.publish(patience_s):
                    published.append(name)
            turns.leave()

        store.hook = turns
        threads = [
            threading.Thread(target=run, args=(job, name), daemon=True)
            for job, name in zip(jobs, ("first", "second"), strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        store.hook = lambda _: None
        words = {"first": ["x", "y"], "second": ["z"]}
        assert len(published) <= (2 if mode == "append" else 1)
        assert read_words(root) == sorted(word for name in published for word in words[name])


def test_a_job_that_was_taken_for_dead_publishes_nothing(store: FakeStore, root: Storage) -> None:
    Job(root, "append", ["a"]).run()
    job = Job(root, "overwrite", ["b"]).begin().run_tasks()

    def sweep(name: str) -> None:
        if name.startswith(f"copy {root.root}"):
            store.hook = lambda _: None
            root.delete(f"_publishing-{job.plan.job_id}")

    store.hook = sweep
    with pytest.raises(UpstreamNotReadyError, match="took this one for dead"):
        job.publish()
    assert read_words(root) == ["a"]


def test_a_live_intent_is_waited_for_and_named(store: FakeStore, root: Storage) -> None:
    root.put("_publishing-other", Intent("other").dumps())
    job = Job(root, "append", ["a"]).begin().run_tasks()
    with pytest.raises(UpstreamNotReadyError, match="_publishing-other"):
        job.publish()
    assert "_publishing-other" in store.objects(root.root)
    assert read_words(root) == []


def test_an_old_or_foreign_intent_is_swept_after_a_day(store: FakeStore, root: Storage) -> None:
    import os
    import time

    for name, text in (("old", Intent("old").dumps()), ("foreign", b"?")):
        root.put(f"_publishing-{name}", text)
        then = time.time() - 25 * 3600
        os.utime(store.base / root.root / f"_publishing-{name}", (then, then))
    Job(root, "append", ["a"]).run()
    assert leftovers(root, store.objects(root.root)) == []


def test_requests_of_many_shards_run_side_by_side(store, root, monkeypatch) -> None:
    monkeypatch.setattr(storage_module, "REQUESTS", 8)
    Job(root, "append", [f"a{k}" for k in range(40)]).run()
    Job(root, "overwrite", [f"b{k}" for k in range(40)]).run()
    assert read_words(root) == sorted(f"b{k}" for k in range(40))
    assert leftovers(root, store.objects(root.root)) == []


def test_the_manifest_names_no_setting(store: FakeStore, root: Storage) -> None:
    Job(root, "append", ["a"]).run()
    data = json.loads(root.read(COMMIT_FILE) or b"")
    assert set(data) == {
        "format_version", "record_type", "compression", "features", "lowering",
        "partition_columns", "shards",
    }  # fmt: skip

"""Two commits at a time in an object store: one wins, the other says so."""

from __future__ import annotations

import contextlib
import random
import threading

import pytest

from conf.errors import UpstreamNotReadyError
from conf.storage.object_store import Storage
from etl.tfrecord.commit.commit_plan import JOB_FILE, SaveMode
from etl.tfrecord.commit.object_commit import ObjectCommitter
from tests.etl.tfrecord.commit.word_jobs import Job, leftovers, read_words
from tests.fake_store import FakeStore
from tests.machine import examples


def test_an_overwrite_in_the_midst_of_another(store: FakeStore, root: Storage) -> None:
    """At each request of one job the other runs as a whole: one wins, the other says so."""
    for step in range(500):
        root.delete_tree()
        Job(root, "append", ["a", "b"]).run()
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


def _try_publish(job: Job, name: str, wins: list[str]) -> None:
    with contextlib.suppress(UpstreamNotReadyError):
        job.publish()
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
def test_two_jobs_request_by_request(store: FakeStore, root: Storage, mode: SaveMode) -> None:
    for seed in range(examples(60)):
        root.delete_tree()
        jobs = [Job(root, mode, words).begin().run_tasks() for words in (["x", "y"], ["z"])]
        turns = Turns(seed, len(jobs))
        published: list[str] = []

        def run(job, name, turns=turns, published=published) -> None:
            with contextlib.suppress(UpstreamNotReadyError):
                if job.publish():
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
            thread.join(600)
        store.hook = lambda _: None
        words = {"first": ["x", "y"], "second": ["z"]}
        assert len(published) == (2 if mode == "append" else 1)  # nobody waits, one gets on
        assert read_words(root) == sorted(word for name in published for word in words[name])


def test_a_job_that_was_taken_for_dead_publishes_nothing(store: FakeStore, root: Storage) -> None:
    Job(root, "append", ["a"]).run()
    job = Job(root, "overwrite", ["b"]).begin().run_tasks()

    def sweep(name: str) -> None:
        if name.startswith(f"copy {root.root}"):
            store.hook = lambda _: None
            job.committer.find_temporary(job.plan.job_id).delete(JOB_FILE)

    store.hook = sweep
    with pytest.raises(UpstreamNotReadyError, match="took this one for dead"):
        job.publish()
    assert read_words(root) == ["a"]


def test_a_job_that_lives_stands_in_nobodys_way(store: FakeStore, root: Storage) -> None:
    other = Job(root, "append", ["b"]).begin().run_tasks()
    assert Job(root, "append", ["a"]).run()
    assert read_words(root) == ["a"]
    assert other.publish()
    assert read_words(root) == ["a", "b"]


def test_an_old_or_foreign_record_is_swept_after_a_day(store: FakeStore, root: Storage) -> None:
    for name, text in (("1" * 32, b"{}"), ("foreign", b"?"), ("list", b"[]")):
        ObjectCommitter(root).find_temporary(name).put(JOB_FILE, text)
        store.age(f"data/_temporary-{name}/{JOB_FILE}", 25 * 3600)
    Job(root, "append", ["a"]).run()
    assert leftovers(root, store.objects(root.root)) == []

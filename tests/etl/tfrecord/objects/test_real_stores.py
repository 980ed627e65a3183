"""Commits in servers that speak the stores' protocols: jobs at the same time, and dead ones."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from conf.errors import UpstreamNotReadyError
from etl.tfrecord.publishing.liveness import Owner
from etl.tfrecord.publishing.object_attempts import temporary_storage
from etl.tfrecord.storage import Storage

from .jobs import Job, leftovers, read_words

pytestmark = pytest.mark.usefixtures("owner")

PATIENCE_S = 60.0


@pytest.fixture
def root(real_root: Storage) -> Storage:
    """A directory in each server that is on this machine."""
    return real_root


def test_append_overwrite_and_dynamic_overwrite(root: Storage) -> None:
    Job(root, "append", ["d=1/a", "d=2/b"]).run()
    Job(root, "append", ["d=2/c"]).run()
    assert read_words(root) == ["d=1/a", "d=2/b", "d=2/c"]
    Job(root, "overwrite", ["d=2/e", "d=3/f"], replaces_partitions=True).run()
    assert read_words(root) == ["d=1/a", "d=2/e", "d=3/f"]
    Job(root, "overwrite", ["g"]).run()
    assert read_words(root) == ["g"]
    assert leftovers(root) == []
    assert root.find("_SUCCESS") is not None


def test_appends_at_the_same_time_all_stay(root: Storage) -> None:
    jobs = [Job(root, "append", [f"{k}-a", f"{k}-b"]) for k in range(4)]
    failures: list[BaseException] = []

    def run(job: Job) -> None:
        try:
            job.begin().run_tasks().publish(PATIENCE_S)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert read_words(root) == sorted(f"{k}-{x}" for k in range(4) for x in "ab")
    assert leftovers(root) == []


def test_of_two_overwrites_one_wins(root: Storage) -> None:
    Job(root, "append", ["old"]).run()
    first, second = (Job(root, "overwrite", [word]).begin() for word in ("1", "2"))
    assert second.run_tasks().publish(PATIENCE_S)
    with pytest.raises(UpstreamNotReadyError):
        first.run_tasks().publish(PATIENCE_S)
    assert read_words(root) == ["2"]


def test_what_a_dead_job_left_is_swept(
    root: Storage, owner: Callable[[Owner | None], None], dead_owner: Owner, live_owner: Owner
) -> None:
    Job(root, "append", ["a"]).run()
    owner(dead_owner)
    dead = Job(root, "overwrite", ["lost"]).begin().run_tasks()
    assert temporary_storage(root, dead.plan.job_id).list_objects()
    owner(live_owner)
    alive = Job(root, "append", ["b"]).begin().run_tasks()
    Job(root, "append", ["c"]).run()
    assert not temporary_storage(root, dead.plan.job_id).list_objects()
    assert alive.publish(PATIENCE_S)
    assert read_words(root) == ["a", "b", "c"]
    assert leftovers(root) == []

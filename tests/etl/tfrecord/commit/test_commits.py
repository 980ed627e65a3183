"""Commits on a file system and in an object store: all or nothing, interrupted anywhere."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from conf.errors import ConfigError, InputDataError, InternalError, UpstreamNotReadyError
from conf.storage.atomic_output import write_text_atomic
from conf.storage.object_store import Storage
from conf.storage.processes import Owner
from etl.tfrecord.commit import local_commit
from etl.tfrecord.commit.commit_plan import JobRecord, SaveMode
from etl.tfrecord.commit.output_directory import COMMIT_FILE, look, refuse_publishing
from etl.tfrecord.files.data_files import index_path
from tests.etl.killed_process import Killed, kill_after
from tests.etl.tfrecord.commit.word_jobs import (
    Job,
    Place,
    committer_of,
    delete,
    leftovers,
    list_files,
    put,
    read_words,
)
from tests.fake_store import FakeStore


def test_append_and_overwrite(place: Place) -> None:
    assert Job(place, "append", ["a", "b"]).run()
    assert Job(place, "append", ["c"]).run()
    assert read_words(place) == ["a", "b", "c"]
    assert Job(place, "overwrite", ["d"]).run()
    assert read_words(place) == ["d"]
    assert leftovers(place) == []
    assert "_SUCCESS" in list_files(place)


def test_dynamic_overwrites_replace_only_their_partitions(place: Place) -> None:
    Job(place, "append", ["d=1/a", "d=2/b", "d=3/c"]).run()
    jobs = {
        words: Job(place, "overwrite", list(words), replaces_partitions=True).begin().run_tasks()
        for words in (("d=1/x",), ("d=2/y", "d=4/y"), ("d=3/z", "d=4/z"))
    }
    first, second, third = jobs.values()
    assert first.publish()
    assert second.publish()
    with pytest.raises(UpstreamNotReadyError, match=r"(?s)d=4.*by job"):
        third.publish()
    third.committer.discard(third.plan.job_id)
    assert read_words(place) == ["d=1/x", "d=2/y", "d=3/c", "d=4/y"]
    assert leftovers(place) == []


def test_modes_protect_what_is_there_and_what_comes_meanwhile(place: Place) -> None:
    jobs = [Job(place, mode, ["x"]).begin().run_tasks() for mode in ("errorifexists", "ignore")]
    quick = Job(place, "append", ["quick"])
    quick.run()
    with pytest.raises(UpstreamNotReadyError, match=f"by job {quick.plan.job_id}"):
        jobs[0].publish()
    assert not jobs[1].publish()
    jobs[0].committer.discard(jobs[0].plan.job_id)
    with pytest.raises(ConfigError, match="holds data already"):
        Job(place, "errorifexists", ["b"]).begin()
    assert not Job(place, "ignore", ["b"]).run()
    assert read_words(place) == ["quick"]
    assert leftovers(place) == []


def test_an_overwrite_refuses_to_lose_what_another_job_published_meanwhile(place: Place) -> None:
    Job(place, "overwrite", ["a"]).run()
    slow = Job(place, "overwrite", ["slow"]).begin().run_tasks()
    Job(place, "append", ["quick"]).run()
    with pytest.raises(UpstreamNotReadyError, match="nothing of this job"):
        slow.publish()
    slow.committer.discard(slow.plan.job_id)
    assert read_words(place) == ["a", "quick"]
    Job(place, "overwrite", ["again"]).run()
    assert read_words(place) == ["again"]


def test_an_append_adds_to_what_came_meanwhile(place: Place) -> None:
    appends = [Job(place, "append", [word]).begin().run_tasks() for word in "xy"]
    Job(place, "overwrite", ["z"]).run()
    for job in reversed(appends):
        assert job.publish()
    assert read_words(place) == ["x", "y", "z"]


def test_what_readers_take_makes_way_and_the_rest_stays(place: Place) -> None:
    others = ["_mine", ".mine", "plain/part-0", ".d=1/part-0", "d=1/plain/x"]
    data = ["by_hand.tfr", "_p=1/x.tfrec", "data_tfrecord-00000-of-00001.gz", "d=1/f"]
    for key in (*others, *data):
        put(place, key, b"foreign")
    with pytest.raises(ConfigError, match="holds data already"):
        Job(place, "errorifexists", ["a"]).begin()
    assert not Job(place, "ignore", ["a"]).run()
    Job(place, "overwrite", ["a"]).run()
    assert read_words(place) == ["a"]
    assert leftovers(place) == sorted(others)


def test_marks_of_partitions_that_were_written_one_by_one_go_with_their_files(place: Place) -> None:
    for value in (1, 2):
        part = place.child(f"d={value}") if isinstance(place, Storage) else place / f"d={value}"
        Job(part, "overwrite", ["a"]).run()
    assert {"d=1/_SUCCESS", f"d=2/{COMMIT_FILE}"} < list_files(place)
    Job(place, "overwrite", ["d=2/c"]).run()
    assert read_words(place) == ["d=2/c"]
    assert leftovers(place) == []


def test_an_append_beside_a_file_that_is_gone_is_refused(place: Place) -> None:
    Job(place, "append", ["a"]).run()
    delete(place, look(place).committed.shards[0].path)
    with pytest.raises(InputDataError, match="is missing"):
        Job(place, "append", ["b"]).begin()


def test_two_shards_of_one_path_are_refused(place: Place) -> None:
    Job(place, "append", ["a"]).run()
    job = Job(place, "append", ["b"]).begin().run_tasks()
    job.results.append(replace(job.results[0], partition=1))
    with pytest.raises(InternalError, match="one path"):
        job.publish()
    job.committer.discard(job.plan.job_id)
    assert read_words(place) == ["a"]
    assert leftovers(place) == []


@pytest.mark.parametrize("damage", ["missing", "cut"])
@pytest.mark.parametrize("mode", ["append", "overwrite"])
def test_a_missing_attempt_publishes_nothing(place: Place, mode: SaveMode, damage: str) -> None:
    Job(place, "append", ["a"]).run()
    before = list_files(place)
    job = Job(place, mode, ["bb", "cc"]).begin().run_tasks()
    [shard] = job.results[1].shards
    key = f"_temporary-{job.plan.job_id}/{job.results[1].attempt}/{shard.info.path}"
    delete(place, key) if damage == "missing" else put(place, key, b"c")
    with pytest.raises(InternalError, match="partition 1"):
        job.publish()
    job.committer.discard(job.plan.job_id)
    assert read_words(place) == ["a"]
    assert list_files(place) == before


@pytest.fixture
def full_for_manifests(
    request: pytest.FixtureRequest, place: Place
) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Lets the disk or the store be full when a manifest is written."""

    def fail(name: object, *_: object) -> None:
        if str(name).endswith(f"/{COMMIT_FILE}") and not str(name).startswith("get"):
            raise OSError(28, "No space left on device")

    def fail_or_write(path: Path, text: str) -> None:
        fail(path)
        write_text_atomic(path, text)

    @contextlib.contextmanager
    def fill() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            if isinstance(place, Storage):
                patch.setattr(request.getfixturevalue("store"), "hook", fail)
            else:
                patch.setattr(local_commit, "write_text_atomic", fail_or_write)
            yield

    return fill


def test_an_error_takes_everything_back_and_stops_no_other_job(
    place: Place, full_for_manifests
) -> None:
    Job(place, "append", ["d=1/a", "d=2/a"]).run()
    before = list_files(place)
    jobs = [Job(place, "overwrite", ["d=2/b", "d=3/c"]).begin().run_tasks() for _ in range(2)]
    with full_for_manifests(), pytest.raises(OSError, match="No space"):
        jobs[0].publish()
    jobs[0].committer.discard(jobs[0].plan.job_id)
    assert read_words(place) == ["d=1/a", "d=2/a"]
    assert {key for key in list_files(place) if not key.startswith("_temporary-")} == before
    assert jobs[1].publish()
    assert read_words(place) == ["d=2/b", "d=3/c"]
    assert leftovers(place) == []


def test_a_late_attempt_leaves_nothing(place: Place) -> None:
    job = Job(place, "append", ["a"]).begin().run_tasks()
    with (  # noqa: PT012
        pytest.raises((InternalError, FileNotFoundError)),
        job.committer.hold_attempt(job.plan.job_id, "late") as attempt,
    ):
        job.publish()
        if isinstance(attempt, Storage):
            attempt.put("part-9.tfrecord", b"late")
        else:
            (attempt / "part-9.tfrecord").write_bytes(b"late")
    with (
        pytest.raises(InternalError, match=r"not open|not there"),
        job.committer.hold_attempt(job.plan.job_id, "later"),
    ):
        pass
    assert leftovers(place) == []


def test_live_jobs_are_not_swept(place: Place, owner, dead_owner) -> None:
    living = Job(place, "append", ["a"]).begin().run_tasks()
    owner(dead_owner)
    Job(place, "append", ["b"], job_id="d" * 32).begin().run_tasks()
    [swept] = committer_of(place).sweep()
    assert swept.removeprefix("_temporary-") == "d" * 32
    assert living.publish()


SETUPS: dict[str, tuple[list[str], Callable[[Place], Job], list[str]]] = {
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


def _prepare(root: Place, name: str, words: list[str]) -> None:
    if isinstance(root, Storage):
        root.delete_tree()
    if name == "foreign":
        put(root, "part-r-00000.tfrecord", b"foreign")
    elif words:
        Job(root, "append", words).run()


@pytest.fixture
def die_at(
    request: pytest.FixtureRequest, place: Place
) -> Callable[[int], contextlib.AbstractContextManager[None]]:
    """Ends the process after so many changes of the disk, or requests to the store."""

    @contextlib.contextmanager
    def end(step: int) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            if isinstance(place, Storage):
                store = request.getfixturevalue("store")
                patch.setattr(store, "hook", store.hook)
                _die_in(store, step)
            else:
                kill_after(step, patch)
            yield

    return end


def _die_in(store: FakeStore, step: int) -> None:
    left = step

    def die(name: str) -> None:
        nonlocal left
        if left == 0:
            raise Killed(name)
        left -= 1

    store.hook = die


@pytest.mark.parametrize("name", SETUPS)
def test_death_after_every_change(
    place: Place, die_at, owner: Callable[..., None], dead_owner: Owner, name: str
) -> None:
    """A reader sees old rows or new ones, never a mix; the next write leaves nothing else."""
    words, build, new = SETUPS[name]
    outcomes, has_died, step = set(), True, 0
    while has_died:
        root = place if isinstance(place, Storage) else place / str(step)
        owner(None)
        _prepare(root, name, words)
        owner(dead_owner)
        job = build(root).begin().run_tasks()
        has_died = True
        with contextlib.suppress(Killed), die_at(step):
            job.publish()
            has_died = False
        owner(None)
        seen = _read_after_death(root)
        assert seen in (words, new, None), f"step {step}"
        is_foreign = isinstance(root, Storage) and seen == words and name == "foreign"
        Job(root, "overwrite" if is_foreign else "append", ["d=9/next"]).run()
        found = [word for word in read_words(root) if word != "d=9/next"]
        assert found in ([[]] if is_foreign else [words, new]), f"step {step}"
        assert seen in (found, None) or is_foreign
        outcomes.add(tuple(words if is_foreign else found))
        assert set(leftovers(root)) <= {"part-r-00000.tfrecord"}, f"step {step}"
        assert "_SUCCESS" in list_files(root)
        step += 1
    assert outcomes == {tuple(words), tuple(new)}


def _read_after_death(root: Place) -> list[str] | None:
    """What a reader sees; None where it is refused until the next write."""
    if not isinstance(root, Storage):
        try:
            refuse_publishing(root)
        except InputDataError:
            return None
    return read_words(root)


def test_a_commit_that_was_killed_is_aborted_by_its_driver(place: Place, die_at) -> None:
    """The driver lives on: what a killed commit left must not stand in the way until it ends."""
    for step in range(0, 60, 3):
        root = place if isinstance(place, Storage) else place / str(step)
        _prepare(root, "overwrite", ["a", "b"])
        job = Job(root, "overwrite", ["x", "y"]).begin().run_tasks()
        with contextlib.suppress(Killed), die_at(step):
            job.publish()
        job.committer.discard(job.plan.job_id)
        seen = _read_after_death(root)
        assert seen in (["a", "b"], ["x", "y"], None)
        Job(root, "append", ["next"]).run()
        assert read_words(root) in (["a", "b", "next"], ["next", "x", "y"])
        assert leftovers(root) == []


def test_a_damaged_manifest_is_refused_or_replaced(place: Place) -> None:
    Job(place, "append", ["a"]).run()
    put(place, COMMIT_FILE, b"{")
    for mode in ("append", "overwrite"):
        with pytest.raises(InputDataError, match="damaged"):
            Job(place, mode, ["b"], replaces_partitions=True).begin()
    Job(place, "overwrite", ["c"]).run()
    assert read_words(place) == ["c"]
    assert leftovers(place) == []


def test_shards_of_others_do_not_vanish_behind_a_manifest(store: FakeStore, root: Storage) -> None:
    root.put("part-r-00000.tfrecord", b"foreign")
    with pytest.raises(ConfigError, match="without a manifest"):
        Job(root, "append", ["a"]).begin()
    assert read_words(root) == ["foreign"]
    Job(root, "overwrite", ["a"]).run()
    assert read_words(root) == ["a"]
    assert leftovers(root, store.objects(root.root)) == []


def test_a_record_that_outlived_its_job_removes_nothing_in_use(
    store: FakeStore, root: Storage
) -> None:
    Job(root, "append", ["a"]).run()
    committed = look(root).committed
    assert committed is not None
    keys = [committed.shards[0].path, index_path(committed.shards[0].path)]
    stale = JobRecord(replaces=(*keys, "../other"), is_over=True)
    root.put(f"_temporary-{committed.shards[0].job_id}/.job.json", stale.dumps().encode())
    Job(root, "append", ["b"]).run()
    assert read_words(root) == ["a", "b"]
    assert leftovers(root, store.objects(root.root)) == []


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


@pytest.mark.exhaustive
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
            _die_in(store, generator.randrange(20, 60))
            with contextlib.suppress(Killed):
                job.run()
            store.hook = lambda _: None
            seen = read_words(root)
            assert seen in (words, new)
        owner(None)
        Job(root, "append", ["next"]).run()
        assert read_words(root) == sorted([*seen, "next"])
        assert leftovers(root, store.objects(root.root)) == []


def test_real_stores_keep_and_replace(real_root: Storage) -> None:
    Job(real_root, "append", ["d=1/a", "d=2/b"]).run()
    Job(real_root, "append", ["d=2/c"]).run()
    Job(real_root, "overwrite", ["d=2/e", "d=3/f"], replaces_partitions=True).run()
    assert read_words(real_root) == ["d=1/a", "d=2/e", "d=3/f"]
    first, second = (Job(real_root, "overwrite", [word]).begin() for word in "12")
    assert second.run_tasks().publish()
    with pytest.raises(UpstreamNotReadyError):
        first.run_tasks().publish()
    first.committer.discard(first.plan.job_id)
    assert read_words(real_root) == ["2"]
    assert leftovers(real_root) == []
    assert real_root.find("_SUCCESS") is not None


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


def test_what_a_dead_job_left_is_swept(
    real_root: Storage, owner: Callable[[Owner | None], None], dead_owner: Owner, live_owner: Owner
) -> None:
    Job(real_root, "append", ["a"]).run()
    owner(dead_owner)
    dead = Job(real_root, "overwrite", ["lost"]).begin().run_tasks()
    assert dead.committer.find_temporary(dead.plan.job_id).list_objects()
    owner(live_owner)
    alive = Job(real_root, "append", ["b"]).begin().run_tasks()
    Job(real_root, "append", ["c"]).run()
    assert not dead.committer.find_temporary(dead.plan.job_id).list_objects()
    assert alive.publish()
    assert read_words(real_root) == ["a", "b", "c"]
    assert leftovers(real_root) == []

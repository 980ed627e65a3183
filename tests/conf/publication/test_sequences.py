"""Any sequence of publishing, dying, racing, rolling back and collecting, compared with a model.

A death is simulated at any change of the disk or request to the store: from then on the process
changes nothing more, as if it had been ended there.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from conf.artefacts.dataset import published_versions, read_manifest, resolve_version
from conf.artefacts.export import EXPORT_FILE, read_versions, roll_back
from conf.artefacts.run import write_json
from conf.errors import ConfigError, UpstreamNotReadyError
from conf.publication import holds
from conf.publication.entries import hold_numbers, list_complete, list_numbered
from conf.publication.working_copy import WORK_DIR_VARIABLE
from conf.storage import processes
from conf.storage.locations import find_path
from conf.storage.processes import Owner
from etl.versions import history
from etl.versions.publish import find_dataset, hold_dataset, sweep_leftovers
from tests.etl.built_versions import publish
from tests.fake_hdfs import reached_as_hdfs
from tests.fake_store import reached_as
from tests.machine import IS_EXHAUSTIVE

KEPT = 2


@dataclass(frozen=True)
class State:
    """What readers find: the entries by name, oldest first, and the one that they take."""

    entries: tuple[str, ...] = ()
    current: str | None = None

    def with_entry(self, name: str) -> State:
        return State(tuple(sorted({*self.entries, name})), self.current)

    def published(self, name: str) -> State:
        return replace(self.with_entry(name), current=name)


class Killed(BaseException):
    """The end of a process."""


class Death:
    """Counts the changes that a process makes, and ends it before one of them."""

    def __init__(self) -> None:
        self._left: int | None = None

    @contextlib.contextmanager
    def after(self, changes: int | None) -> Iterator[None]:
        self._left = changes
        try:
            yield
        finally:
            self._left = None

    def step(self) -> None:
        if self._left is None:
            return
        if self._left == 0:
            raise Killed
        self._left -= 1

    def watch(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._left is None:
            return
        is_written = event == "open" and (arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        if is_written or event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link"):
            self.step()


DEATH = Death()
sys.addaudithook(DEATH.watch)


@dataclass
class Machines:
    """The processes of the test: each has an owner of its own, and those of before have ended."""

    patch: pytest.MonkeyPatch
    disks: Path
    alive: set[int] = field(default_factory=set)
    started: int = 0

    def start(self, disk: str, *, beside: bool = False) -> None:
        """Goes on as a new process on the machine of a disk; the others have ended."""
        self.started += 1
        self.alive = {*(self.alive if beside else ()), self.started}
        owner = Owner("boot", "pid", self.started, 0)
        self.patch.setattr(processes, "find_this_process", lambda: owner)
        self.patch.setattr(processes, "is_dead", lambda found: found.pid not in self.alive)
        self.patch.setenv(WORK_DIR_VARIABLE, str(self.disks / disk))

    @contextlib.contextmanager
    def beside(self, disk: str) -> Iterator[None]:
        """Lets another process on a machine run meanwhile."""
        owner, before = processes.find_this_process, os.environ[WORK_DIR_VARIABLE]
        self.start(disk, beside=True)
        try:
            yield
        finally:
            self.patch.setattr(processes, "find_this_process", owner)
            self.patch.setenv(WORK_DIR_VARIABLE, before)


@dataclass
class DatasetPlace:
    """The versions of a dataset: what is read is named by the pointer."""

    root: str
    keeps: int | None = None

    def publish(self, name: str, meanwhile: Callable[[], object] = lambda: None) -> None:
        with hold_dataset(find_dataset(self.root, "d")) as paths:
            sweep_leftovers(paths)
            publish(paths, name)
            assert not list(paths.versions.glob(".*"))
            meanwhile()

    def read(self) -> State:
        base = find_path(f"{self.root}/d")
        names = published_versions(base)
        for name in names:
            read_manifest(base / "versions" / name)
        with contextlib.suppress(UpstreamNotReadyError):
            return State(tuple(names), resolve_version(base).name)
        return State(tuple(names))

    def roll_back(self) -> None:
        history.roll_back(find_dataset(self.root, "d"))

    def collect(self) -> None:
        history.collect_garbage(find_dataset(self.root, "d"), KEPT, None)


@dataclass
class ModelPlace:
    """The versions of a model: what is read is the newest one."""

    root: str
    keeps: int | None = KEPT

    def publish(self, name: str, meanwhile: Callable[[], object] = lambda: None) -> None:
        place, files = find_path(f"{self.root}/m"), {"saved_model.pb": {"bytes": len(name)}}
        with (
            hold_numbers(place, EXPORT_FILE) as held,
            held.next_entry(KEPT) as (staging, target),
        ):
            (staging / "saved_model.pb").write_text(name)
            card = {"run_path": name, "dataset_version": target.name, "files": files}
            meanwhile()
            write_json(staging / EXPORT_FILE, card)
        # Nothing is left of those whose process died.
        assert list_numbered(place) == list_complete(place, EXPORT_FILE)

    def read(self) -> State:
        try:
            found = read_versions(find_path(f"{self.root}/m"))
        except UpstreamNotReadyError:
            return State()
        for version in found:
            assert (version.path / "saved_model.pb").read_text() == version.run
        names = [version.run for version in found if not version.is_withdrawn]
        return State(tuple(names), names[-1] if names else None)

    def roll_back(self) -> None:
        roll_back(find_path(f"{self.root}/m"))

    def collect(self) -> None:
        """Each publication does."""


@dataclass
class History:
    """A place, and the model of it: what readers must find after each step.

    The parents of an entry are what it may have followed; one that was there may have become
    current before. Pending on a machine are entries that it may have whole, whose process died
    before the store had them.
    """

    place: DatasetPlace | ModelPlace
    machines: Machines
    state: State = State()
    parents: dict[str, set[str | None]] = field(default_factory=dict)
    pending: dict[str, set[str]] = field(default_factory=dict)
    names: int = 0

    def publish(self, disk: str, changes: int | None) -> None:
        self.machines.start(disk)
        name, begun = self._new_name(), self._list_begun(disk)
        with contextlib.suppress(Killed), DEATH.after(changes):
            self.place.publish(name)
            changes = None
        done = self._list_parents(begun, name)
        if changes is None:
            self._find(set(done), self.place.keeps)
            self.pending.pop(disk, None)
        else:
            # A death between entry and pointer, of this one or of one that was brought first.
            brought = {self.state.with_entry(entry) for entry in self.pending.get(disk, ())}
            self._find({*begun, *done, *brought, *(state.with_entry(name) for state in begun)})
            self.pending.setdefault(disk, set()).add(name)
        self.parents[name] = done.get(self.state, {self.state.current})

    def race(self, disk: str, other: str) -> None:
        self.machines.start(disk)
        names, is_refused = (self._new_name(), self._new_name()), []

        def publish_beside() -> None:
            with self.machines.beside(other):
                try:
                    self.place.publish(names[1])
                    is_refused.append(False)
                except UpstreamNotReadyError:
                    is_refused.append(True)

        begun = {s for first in self._list_begun(disk) for s in self._list_begun(other, first)}
        try:
            self.place.publish(names[0], publish_beside)
            is_refused.append(False)
        except UpstreamNotReadyError:
            is_refused.append(True)
        assert sorted(is_refused) == [False, True]
        winner = names[is_refused[1]]
        done = self._list_parents(begun, winner)
        self._find(set(done), self.place.keeps)
        self.parents[winner] = done.get(self.state, {None})
        for machine in (disk, other):
            self.pending.pop(machine, None)

    def roll_back(self, disk: str, changes: int | None) -> None:
        self.machines.start(disk)
        goals = self._find_previous()
        try:
            with contextlib.suppress(Killed), DEATH.after(changes):
                self.place.roll_back()
                changes = None
        except (ConfigError, UpstreamNotReadyError):
            assert None in goals
        else:
            assert goals != {None} or changes is not None
        stay = {self.state} if None in goals or changes is not None else set()
        self._find(stay | {goal for goal in goals if goal})

    def collect(self, disk: str, changes: int | None) -> None:
        self.machines.start(disk)
        keep = KEPT if self.place.keeps is None else 0
        kept = {*self.state.entries[-keep:], self.state.current}
        goal = replace(self.state, entries=tuple(e for e in self.state.entries if e in kept))
        with contextlib.suppress(Killed, UpstreamNotReadyError), DEATH.after(changes):
            self.place.collect()
            changes = None
        gone = [e for e in self.state.entries if e not in kept]
        partly = {
            replace(goal, entries=tuple(sorted({*goal.entries, *gone[n:]})))
            for n in range(len(gone) + 1)
        }
        self._find(partly if changes is not None or not self.state.entries else {goal})

    def _new_name(self) -> str:
        self.names += 1
        return f"v{self.names:03d}"

    def _list_begun(self, disk: str, state: State | None = None) -> set[State]:
        """What there may be once a machine has brought what it has whole."""
        state = state or self.state
        return {state, *(state.published(name) for name in self.pending.get(disk, ()))}

    @staticmethod
    def _list_parents(begun: set[State], name: str) -> dict[State, set[str | None]]:
        """What there is when an entry has been published, and what that may have followed."""
        found: dict[State, set[str | None]] = {}
        for state in begun:
            found.setdefault(state.published(name), set()).add(state.current)
        return found

    def _find_previous(self) -> set[State | None]:
        """What a roll-back may come to; None where there is nothing to go back to."""
        state, current = self.state, self.state.current
        if self.place.keeps is not None:
            rest = state.entries[:-1]
            return {State(rest, rest[-1]) if rest else None}
        earlier = max((e for e in state.entries if current is None or e < current), default=None)
        parents = self.parents.get(current, {None}) if current else {None}
        goals = {parent if parent in state.entries else earlier for parent in parents}
        return {replace(state, current=goal) if goal else None for goal in goals}

    def _find(self, allowed: set[State], keeps: int | None = None) -> None:
        """Reads what is there, as a new process on a machine that has never been here."""
        self.machines.start("reader")
        if keeps is not None:
            allowed = {replace(s, entries=s.entries[-keeps:]) for s in allowed}
        elif self.place.keeps is not None:  # It may have died while it removed old ones.
            allowed |= {replace(s, entries=s.entries[n:]) for s in allowed
                        for n in range(len(s.entries) - self.place.keeps + 1)}  # fmt: skip
        found = self.place.read()
        assert found in allowed
        self.state = found


DISKS = st.sampled_from(("first", "second"))
CHANGES = st.one_of(st.none(), st.integers(0, 60))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), DISKS, CHANGES),
        st.tuples(st.just("race"), DISKS, DISKS),
        st.tuples(st.just("roll_back"), DISKS, CHANGES),
        st.tuples(st.just("collect"), DISKS, CHANGES),
    ),
    min_size=3,
    max_size=12,
)


# What no draw may leave out. Two first ones at a time, and two on one machine; a death before each
# change of a publication, and who goes on; a second death while what the first one left is brought
# to the store; what is current elsewhere, and gone from there.
RACES = [("race", "first", "second"), ("race", "second", "second"), ("race", "second", "first")]
TWICE = [("publish", "first", None)] * 2
DEATHS = [
    ("publish", disk, changes)
    for dead in range(30)
    for disk, changes in (("first", dead), (("first", "second")[dead % 2], None))
]
TWO_DEATHS = [
    ("publish", "first", changes) for second in range(30) for changes in (None, 43, second, None)
]
MOVES = [
    ("roll_back", "first", None),
    *[("publish", disk, None) for disk in ("first", "second", "second")],
    *[("roll_back", "second", changes) for changes in (3, 9, None)],
    *[("publish", "first", None), ("roll_back", "first", None), ("collect", "second", 2)],
    *[("collect", "first", None), ("publish", "second", None)],
]


@pytest.mark.parametrize("kind", [DatasetPlace, ModelPlace])
@pytest.mark.parametrize(
    "root",
    ["disk", "s3://bucket/root", pytest.param("hdfs://node/root", marks=pytest.mark.exhaustive)],
)
@settings(
    max_examples=200 if IS_EXHAUSTIVE else 10,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(steps=STEPS)
@example(steps=RACES)
@example(steps=DEATHS)
@example(steps=TWO_DEATHS)
@example(steps=MOVES)
@example(steps=[*TWICE, ("roll_back", "first", 9), *TWICE])
def test_readers_find_whole_entries_whatever_has_happened(
    kind: type[DatasetPlace | ModelPlace], root: str, steps: list[tuple[str, Any, Any]]
) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        pytest.MonkeyPatch.context() as patch,
        reached_as("s3", patch) as store,
        reached_as_hdfs(patch) as hdfs,
    ):
        patch.setattr(holds, "CUT_SHORT_STALE_S", 0.0)
        patch.setattr("os.fsync", lambda descriptor: None)  # No power cut is simulated.
        store.hook = lambda name: DEATH.step() if is_change(name) else None
        hdfs.hook = lambda name: DEATH.step()
        place = kind(f"{folder}/data" if root == "disk" else root)
        history = History(place, Machines(patch, Path(folder)))
        for name, *arguments in steps:
            getattr(history, name)(*arguments)


def is_change(request: str) -> bool:
    return request.startswith(("put", "copy", "delete"))

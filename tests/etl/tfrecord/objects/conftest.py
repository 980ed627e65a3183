"""An object store without rename, whose every request can be watched, delayed or refused."""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Callable, Iterator

import pytest

from conf.storage.object_store import Storage
from conf.storage.processes import Owner, describe_process
from etl.tfrecord.commit.output_manifest import OutputManifest
from tests.fake_store import FakeStore, reached_as
from tests.object_servers import SCHEMES, ObjectServer


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeStore]:
    """A fresh store, reached as `fake://bucket/...`; requests come one by one."""
    with reached_as("fake", monkeypatch) as store:
        yield store


@pytest.fixture
def root(store: FakeStore) -> Storage:
    """An output directory in the store."""
    return Storage("fake", "bucket/data")


@pytest.fixture(params=["fake", *SCHEMES])
def any_root(request: pytest.FixtureRequest, server_of: Callable[[str], ObjectServer]) -> Storage:
    """A directory of its own in the store that can be watched, and in each real server."""
    if request.param == "fake":
        request.getfixturevalue("store")
        return Storage("fake", "bucket/data")
    return server_of(request.param).place(uuid.uuid4().hex)


@pytest.fixture(params=SCHEMES)
def real_root(request: pytest.FixtureRequest, server_of: Callable[[str], ObjectServer]) -> Storage:
    """A directory of its own in each real server."""
    return server_of(request.param).place(uuid.uuid4().hex)


@pytest.fixture(scope="session")
def dead_owner() -> Owner:
    """A process that has ended."""
    process = subprocess.Popen(["sleep", "60"])
    owner = describe_process(process.pid)
    process.kill()
    process.wait()
    return owner


@pytest.fixture(scope="session")
def live_owner() -> Owner:
    """This process."""
    return describe_process(os.getpid())


@pytest.fixture
def owner(monkeypatch: pytest.MonkeyPatch, live_owner: Owner) -> Callable[[Owner | None], None]:
    """Sets the process that jobs from here on belong to; at first this one."""

    def choose(chosen: Owner | None) -> None:
        monkeypatch.setattr(
            "tests.etl.tfrecord.objects.word_jobs.find_this_process", lambda: chosen
        )

    choose(live_owner)
    return choose


@pytest.fixture
def description() -> OutputManifest:
    return OutputManifest("ByteArray", None, (), {}, (), ())

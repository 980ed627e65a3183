"""Fixtures of places in object stores, and of the processes that work there."""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from conf.storage.object_store import Storage
from conf.storage.processes import Owner, describe_process
from tests.fake_store import FakeStore, reached_as
from tests.object_servers import SCHEMES, ObjectServer, Servers


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeStore]:
    """A fresh store in memory, reached as `s3://bucket/...`; requests come one by one."""
    with reached_as("s3", monkeypatch) as store:
        yield store


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    """Servers of object stores, one per scheme, that the tests share."""
    with ExitStack() as stack:
        yield Servers(stack)


@pytest.fixture
def server_of(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ObjectServer]:
    """Finds the server of a scheme, which the environment then names for the test."""

    def find(scheme: str) -> ObjectServer:
        server = servers.get(scheme)
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        return server

    return find


@pytest.fixture
def root(store: FakeStore) -> Storage:
    """A directory in the store in memory."""
    return Storage("s3", "bucket/data")


@pytest.fixture(params=["memory", *SCHEMES])
def any_root(request: pytest.FixtureRequest, server_of: Callable[[str], ObjectServer]) -> Storage:
    """A directory of its own in the store in memory, and in each real server."""
    if request.param == "memory":
        place: Storage = request.getfixturevalue("root")
        return place
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

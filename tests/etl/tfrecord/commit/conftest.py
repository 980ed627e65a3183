"""Places to commit to, and the process that a job belongs to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from conf.storage.object_store import Storage
from conf.storage.processes import Owner


@pytest.fixture(autouse=True)
def owner(monkeypatch: pytest.MonkeyPatch, live_owner: Owner) -> Callable[[Owner | None], None]:
    """Sets the process that jobs from here on belong to; at first this one."""

    def choose(chosen: Owner | None) -> None:
        monkeypatch.setattr("tests.etl.tfrecord.commit.word_jobs.find_this_process", lambda: chosen)

    choose(live_owner)
    return choose


@pytest.fixture(params=["disk", "store"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | Storage:
    """An output directory of a file system, and of the store in memory."""
    if request.param == "disk":
        return tmp_path / "out"
    found: Storage = request.getfixturevalue("root")
    return found

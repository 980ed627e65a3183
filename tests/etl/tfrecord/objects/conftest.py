"""The process that a job belongs to, and what a job describes its output by."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from conf.storage.processes import Owner
from etl.tfrecord.commit.output_manifest import OutputManifest


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

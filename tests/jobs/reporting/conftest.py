"""A finished run, and copies of it to spoil."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from conf.artefacts.run import read_json, write_json
from jobs.reporting.run_data import RunData, read_run
from tests.jobs.reporting.fixtures import FakeConfig, write_dataset, write_run


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is trained, evaluated and has ranked lists. Read only."""
    root = tmp_path_factory.mktemp("report")
    config = FakeConfig()
    return write_run(root / "runs", write_dataset(root / "datasets", config), config)


@pytest.fixture(scope="session")
def finished(finished_run: Path) -> RunData:
    """That run, read."""
    return read_run(finished_run)


@pytest.fixture
def run_copy(finished_run: Path, tmp_path: Path) -> Path:
    """A copy of the run that a test may spoil."""
    return Path(shutil.copytree(finished_run, tmp_path / "copy"))


@pytest.fixture
def edit() -> Callable[..., None]:
    """Sets top-level keys of a JSON file."""

    def apply(file: Path, **changes: object) -> None:
        write_json(file, {**read_json(file), **changes})

    return apply

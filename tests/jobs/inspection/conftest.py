"""A dataset version and a run to look at, and copies to spoil."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.jobs.reporting.fixtures import FakeConfig, write_dataset, write_run

CONFIG = FakeConfig(users=40, items=15, train_shards=3)


@pytest.fixture(scope="session")
def inspected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Root with `datasets/demo` and `runs/demo`. Read only."""
    root = tmp_path_factory.mktemp("inspected")
    write_run(root / "runs", write_dataset(root / "datasets", CONFIG), CONFIG)
    return root


@pytest.fixture
def dataset(inspected: Path, tmp_path: Path) -> Path:
    """A copy of the dataset that a test may spoil."""
    return Path(shutil.copytree(inspected / "datasets" / "demo", tmp_path / "demo"))


@pytest.fixture
def version(dataset: Path) -> Path:
    """The copy's current version."""
    return dataset / "versions" / (dataset / "CURRENT").read_text().strip()

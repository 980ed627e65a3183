"""A dataset version whose histories carry their times."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.artefacts.dataset import read_manifest
from conf.manifest import Manifest
from tests.training.tiny_dataset import TinyConfig, write_tiny_dataset


@pytest.fixture(scope="session")
def timed_version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_dataset(tmp_path_factory.mktemp("data"), config=TinyConfig(item_times=True))


@pytest.fixture(scope="session")
def timed_manifest(timed_version: Path) -> Manifest:
    return read_manifest(timed_version)

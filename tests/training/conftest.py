"""Fixtures of the training side. Two logical CPU devices, so that replicas can be tested."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import pytest
import tensorflow as tf

from conf.artefacts.dataset import read_manifest
from conf.manifest import Manifest
from tests.training.tiny_dataset import write_tiny_dataset

# Must run before TensorFlow starts its runtime, hence at import.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)


@pytest.fixture(scope="session")
def tiny_version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset version with planted structure. Read only: copy it before you damage it."""
    return write_tiny_dataset(tmp_path_factory.mktemp("datasets"))


@pytest.fixture(scope="session")
def tiny_manifest(tiny_version: Path) -> Manifest:
    """The manifest of `tiny_version`."""
    return read_manifest(tiny_version)


@pytest.fixture(scope="module")
def own_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the modules of one's own that a test file names as `OWN_MODULES`."""
    folder = tmp_path_factory.mktemp("own")
    for name, source in request.module.OWN_MODULES.items():
        (folder / name).write_text(source)
        sys.modules.pop(Path(name).stem, None)  # Of another test file's.
    return folder


@pytest.fixture
def in_own_folder(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, as the current folder."""
    monkeypatch.chdir(own_folder)
    return own_folder

from __future__ import annotations

from pathlib import Path

import pytest

from conf.training import TrainConfig
from tests.training.fixtures import write_tiny_dataset


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_dataset(tmp_path_factory.mktemp("datasets"))


@pytest.fixture
def config(dataset: Path, tmp_path: Path) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "dataset": str(dataset),
            "name": "s",
            "root": str(tmp_path / "runs"),
            "model": {"name": "mf", "embedding_dim": 4},
            "input": {"batch_size": 128},
            "fit": {"epochs": 2},
            "evaluation": {"ks": [5, 10]},
        }
    )

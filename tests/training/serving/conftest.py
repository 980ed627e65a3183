"""A server of two small models, shared by the tests that only ask it."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.artefacts.export import ExportOptions, IndexOptions
from tests.training.serving.tiny_models import TOWERS, build, serve
from tests.training.tiny_dataset import TinyConfig, write_tiny_dataset
from training.checkpoint.restore import TrainedModel
from training.export.saved_model import write_export
from training.serving.limits import RequestLimits, ServerLimits
from training.serving.server_config import RecommendConfig

SCORES = {
    "kind": "ranking", "network": "shared_bottom", "embedding_dim": 4,
    "embedding_stddev": 1.0,
    "tasks": {"click": {"label": "label"},
              "value": {"label": "label", "objective": "squared_error"}},
}  # fmt: skip


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> dict[str, TrainedModel]:
    version = write_tiny_dataset(tmp_path_factory.mktemp("data"), config=TinyConfig(items=30))
    models, run = {"towers": TOWERS, "scores": SCORES}, tmp_path_factory.mktemp("run")
    return {name: build(version, run / name, name, model) for name, model in models.items()}


@pytest.fixture(scope="session")
def models(trained, tmp_path_factory) -> Path:
    base = tmp_path_factory.mktemp("models")
    for name, one in trained.items():
        index = IndexOptions() if name == "towers" else None
        write_export(one, ExportOptions(base, k=5, index=index))
    (base / "items.csv").write_text(
        "movie,title,kind\n" + "".join(f"{100 + n},Film {n},{'ab'[n % 2]}\n" for n in range(30))
    )
    (base / "blocked.txt").write_text("103\n104\n")
    return base


@pytest.fixture(scope="session")
def served(models):
    limits = ServerLimits(body_bytes=200_000, seconds=60.0, request=RequestLimits(rows=64))
    recommend = RecommendConfig(items_file=models / "items.csv",
                                blocked_file=models / "blocked.txt")  # fmt: skip
    with serve(models, limits=limits, recommend=recommend) as found:
        yield found


@pytest.fixture(scope="module")
def server(served):
    return served[0]


@pytest.fixture(scope="module")
def client(served):
    return served[1]

"""A server of two small models, shared by the tests that only ask it."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.testclient import TestClient

from conf.artefacts.dataset import read_manifest
from conf.artefacts.export import ExportOptions, IndexOptions
from conf.training.train import TrainConfig
from tests.training.serving.tiny_models import SCORES, TOWERS
from tests.training.tiny_dataset import TinyConfig, write_tiny_dataset
from training.checkpoint.restore import TrainedModel
from training.export.saved_model import write_export
from training.models.registry import build_model
from training.serving.app import build_app
from training.serving.models.server_config import RecommendConfig, ServerConfig
from training.serving.requests.limits import RequestLimits, ServerLimits
from training.serving.server import Server


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> dict[str, TrainedModel]:
    version = write_tiny_dataset(tmp_path_factory.mktemp("data"), config=TinyConfig(items=30))
    manifest = read_manifest(version)
    found = {}
    for name, model in (("towers", TOWERS), ("scores", SCORES)):
        config = TrainConfig.model_validate({"dataset": "d", "name": name, "model": model})
        built = build_model(config.model, manifest, 3)
        found[name] = TrainedModel(tmp_path_factory.mktemp("run"), built, config, manifest, version)
    return found


@pytest.fixture(scope="session")
def models(trained, tmp_path_factory) -> Path:
    base = tmp_path_factory.mktemp("models")
    for one in trained.values():
        index = IndexOptions() if one.config.model.kind == "retrieval" else None
        write_export(one, ExportOptions(base, k=5, index=index))
    (base / "items.csv").write_text(
        "movie,title,kind\n" + "".join(f"{100 + n},Film {n},{'ab'[n % 2]}\n" for n in range(30))
    )
    (base / "blocked.txt").write_text("103\n104\n")
    return base


@pytest.fixture(scope="session")
def server(models):
    limits = ServerLimits(body_bytes=200_000, seconds=60.0, request=RequestLimits(rows=64))
    recommend = RecommendConfig(items_file=models / "items.csv",
                                blocked_file=models / "blocked.txt")  # fmt: skip
    return Server(ServerConfig(models, 60.0, limits, recommend))


@pytest.fixture(scope="session")
def client(server):
    with TestClient(build_app(server), "http://localhost", raise_server_exceptions=False) as found:
        yield found

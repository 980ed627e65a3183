"""Small models without training, a server of them, and a row for those of `conftest.py`."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import tensorflow as tf
from starlette.testclient import TestClient

from conf.artefacts.dataset import read_manifest
from conf.training.train import TrainConfig
from training.checkpoint.restore import TrainedModel
from training.models.registry import build_model
from training.serving.app import build_app
from training.serving.server import Server
from training.serving.server_config import ServerConfig

TOWERS = {"name": "dssm", "user_hidden_units": [6], "embedding_dim": 6}
PAD = -(2**63)
ROW = {"user_id": 1003, "gender": "F", "history": [101, 105, PAD], "movie_id": 107,
       "genres": ["genre_1", "<sluice:pad>"]}  # fmt: skip


def build(version: Path, folder: Path, name: str, model: dict[str, Any]) -> TrainedModel:
    config = TrainConfig.model_validate({"dataset": "d", "name": name, "model": model})
    manifest = read_manifest(version)
    return TrainedModel(folder, build_model(config.model, manifest, 3), config, manifest, version)


def read_tokens(trained: TrainedModel, vocabulary: str) -> list[Any]:
    """Raw keys by id; -1 where there is none."""
    table = pq.read_table(trained.version_dir / "encoders" / f"{vocabulary}.parquet")
    return [-1, -1, *table["token"].to_pylist()]


def write_example(**values: Any) -> dict[str, str]:
    """A serialized Example, as JSON holds it."""
    example = tf.train.Example()
    for name, value in values.items():
        feature, listed = (
            example.features.feature[name],
            value if isinstance(value, list) else [value],
        )
        kinds = {int: feature.int64_list, float: feature.float_list, bytes: feature.bytes_list}
        kinds[type(listed[0])].value.extend(listed)
    return {"b64": base64.b64encode(example.SerializeToString()).decode()}


@contextmanager
def serve(models: Path, **config: Any) -> Iterator[tuple[Server, TestClient]]:
    """A server that looks for new versions when it is told to, and a client that closes it."""
    server = Server(ServerConfig(models, 60.0, **config))
    app = build_app(server)
    with TestClient(app, "http://localhost", raise_server_exceptions=False) as client:
        yield server, client

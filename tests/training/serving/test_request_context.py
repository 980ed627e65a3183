"""`/v1/recommend` with what requests say beside the user; ranking models that cannot order."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from starlette.testclient import TestClient

from conf.artefacts.dataset import read_manifest
from conf.artefacts.export import ExportOptions
from conf.errors import ConfigError
from conf.training.train import TrainConfig
from tests.training.serving.tiny_models import TOWERS
from tests.training.tiny_dataset import TinyConfig, write_tiny_dataset
from training.checkpoint.restore import TrainedModel
from training.evaluation.item_index import read_item_features
from training.export.saved_model import write_export
from training.input.batches import build_eval_dataset
from training.models.registry import build_model
from training.serving.app import build_app
from training.serving.lists.recommend import explain_no_ranking
from training.serving.models.served_version import ServedVersion
from training.serving.models.server_config import RecommendConfig, ServerConfig
from training.serving.server import Server

RANKER = {"kind": "ranking", "network": "fm", "embedding_dim": 4, "embedding_stddev": 1.0}
ITEMS = 12


def train(version: Path, folder: Path, name: str, model: dict[str, Any]) -> TrainedModel:
    config = TrainConfig.model_validate({"dataset": "d", "name": name, "model": model})
    manifest = read_manifest(version)
    return TrainedModel(folder, build_model(config.model, manifest, 3), config, manifest, version)


@pytest.fixture(scope="module", autouse=True)
def cold_start() -> Iterator[None]:
    """No server here replays warm-up requests: each would compile all that a model answers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ServedVersion, "warm_up", lambda self: 0)
        yield


@pytest.fixture(scope="module")
def ranker(tmp_path_factory) -> TrainedModel:
    folder = tmp_path_factory.mktemp("context")
    version = write_tiny_dataset(folder, config=TinyConfig(users=12, items=ITEMS, context=True))
    return train(version, folder / "run", "scores", RANKER)


@pytest.fixture(scope="module")
def models(ranker, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    towers = train(ranker.version_dir, folder / "run", "towers", TOWERS)
    for one in (ranker, towers):
        write_export(one, ExportOptions(folder / "served", k=5))
    return folder / "served"


@pytest.fixture(scope="module")
def server(models) -> Server:
    """Both models; `client` closes it."""
    return Server(ServerConfig(models, 60.0))


@pytest.fixture(scope="module")
def client(server) -> Iterator[TestClient]:
    app = build_app(server)
    with TestClient(app, "http://localhost", raise_server_exceptions=False) as found:
        yield found


def ask(client: TestClient, **body: Any) -> dict[int, float]:
    """The score of each item, by its key."""
    answer = client.post("/v1/recommend", json={"k": ITEMS, "seen": True, **body})
    assert answer.status_code == 200, answer.text
    return {row["item"]: row["score:label"] for row in answer.json()["items"]}


@pytest.fixture(scope="module")
def expect(ranker):
    """Returns what the trainer's model scores for a user, with some features in place of theirs."""
    where = (ranker.version_dir, ranker.manifest)
    users = build_eval_dataset(*where, "users", 100, ("user_id", "gender", "history"))
    [batch] = list(users)
    vocabularies = {}
    for name in ("user_id", "movie_id", "device", "gender"):
        table = pq.read_table(ranker.version_dir / "encoders" / f"{name}.parquet")
        vocabularies[name] = dict(
            zip(table["token"].to_pylist(), table["id"].to_pylist(), strict=True)
        )
    names = ("movie_id", "genres")
    items, features = read_item_features(*where, names, 100)
    keys = {number: key for key, number in vocabularies["movie_id"].items()}

    def score(user: int, device: str | None = None, **changed: Any) -> dict[int, float]:
        row = int(np.flatnonzero(batch["user_id"] == vocabularies["user_id"][user])[0])
        rows = {name: value[row : row + 1] for name, value in batch.items()}
        rows["device"] = tf.constant([vocabularies["device"].get(device, 1)], tf.int64)
        for name, tokens in changed.items():
            found = vocabularies["movie_id" if name == "history" else name]
            ids = [found[one] for one in tokens] if isinstance(tokens, list) else found[tokens]
            value = np.array([ids], np.int64)
            if value.ndim == 2:
                value = np.pad(value, ((0, 0), (0, rows[name].shape[1] - value.shape[1])))
            rows[name] = tf.constant(value)
        shape = tf.constant([1, len(items)], tf.int32)
        found = ranker.model.predict_candidates(rows, features, shape)["label"].numpy()[0]
        return {keys[int(n)]: float(s) for n, s in zip(items.ids, found, strict=True)}

    return score


def assert_same(found: dict[int, float], expected: dict[int, float]) -> None:
    assert found.keys() == expected.keys()
    for item, value in expected.items():
        assert found[item] == pytest.approx(value, abs=1e-6)


def test_context_stands_beside_what_is_stored_of_the_user(client, expect) -> None:
    scores = {}
    for device in ("app", "web"):
        scores[device] = ask(client, user=1003, features={"device": device})
        assert_same(scores[device], expect(1003, device))
        assert_same(ask(client, user="1003", features={"client": device}), scores[device])
    assert scores["app"] != scores["web"]


def test_what_is_left_out_is_missing_by_get_too(client, expect) -> None:
    assert_same(ask(client, user=1003), expect(1003))
    assert_same(ask(client, user=1003, features={"device": None}), expect(1003))
    answer = client.get(f"/v1/recommend?user=1003&k={ITEMS}&seen=true")
    assert answer.status_code == 200, answer.text
    assert {r["item"]: r["score:label"] for r in answer.json()["items"]} == ask(client, user=1003)
    assert client.get("/v1/recommend?user=1003&k=1_0").status_code == 400
    refused = client.get("/v1/recommend?user=1003&device=app")
    assert (refused.status_code, "device" in refused.json()["error"]) == (400, True)


@pytest.mark.parametrize("history", [[101, 105], "105 101"])
def test_what_a_request_says_that_the_user_has_met_is_left_out(client, history) -> None:
    body = {"user": "nobody", "features": {"history": history}, "k": ITEMS}
    found = {row["item"] for row in client.post("/v1/recommend", json=body).json()["items"]}
    whole = {row["item"] for row in client.post("/v1/recommend", json={**body, "seen": True})
             .json()["items"]}  # fmt: skip
    assert whole - found == {101, 105}


def test_the_user_is_no_feature(client) -> None:
    for features in ({"user_id": 1003}, {"user_id": 1004, "device": "app"}):
        for body in ({"features": features}, {"user": 1003, "features": features}):
            answer = client.post("/v1/recommend", json=body)
            assert answer.status_code == 400
            assert "user_id names the user" in answer.json()["error"]


def test_what_a_request_says_of_the_user_replaces_what_is_stored(client, expect) -> None:
    changed = ask(client, user=1003, features={"device": "app", "gender": "F"})
    assert_same(changed, expect(1003, "app", gender="F"))
    for history in ([101, 105], "105 101"):  # As the log writes it: earliest first is not said.
        wanted = [101, 105] if isinstance(history, list) else [105, 101]
        found = ask(client, user=1003, features={"history": history})
        assert_same(found, expect(1003, history=wanted))
    empty = ask(client, user=1003, features={"history": None})
    assert_same(empty, expect(1003, history=[]))


def test_the_inputs_that_a_request_may_give_are_listed(client) -> None:
    found = client.get("/v1/recommend/inputs").json()["inputs"]
    assert found == [
        {"name": "device", "column": "client", "type": "string", "is_list": False,
         "is_required": False, "is_time": False}
    ]  # fmt: skip


@pytest.fixture(scope="module")
def rated(models, ranker, tmp_path_factory) -> Path:
    """The towers, and a ranking model that reads a rate of user and genre."""
    folder = tmp_path_factory.mktemp("rated")
    config = TinyConfig(users=12, items=ITEMS, rate=True)
    version = write_tiny_dataset(folder, config=config)
    shutil.copytree(models / "towers", folder / "served" / "towers")
    write_export(train(version, folder / "run", "rates", RANKER), ExportOptions(folder / "served"))
    return folder / "served"


def test_a_ranking_model_that_cannot_order_is_refused_at_start_or_left_out(rated) -> None:
    for name in (None, "rates"):
        with pytest.raises(ConfigError, match="cannot order lists"):
            Server(ServerConfig(rated, 60.0, recommend=RecommendConfig(ranker=name)))
    server = Server(ServerConfig(rated, 60.0, recommend=RecommendConfig(is_ranked=False)))
    with TestClient(build_app(server), "http://localhost") as client:
        found = client.get("/v1/recommend?user=1003&k=2").json()
        assert [set(row) for row in found["items"]] == [{"item", "retrieval_score"}] * 2
        assert [model["name"] for model in found["models"]] == ["towers"]


def test_a_new_version_that_cannot_order_leaves_the_one_before(models, rated, tmp_path) -> None:
    shutil.copytree(models, tmp_path / "m")
    server = Server(ServerConfig(tmp_path / "m", 60.0))
    shutil.copytree(rated / "rates" / "1", tmp_path / "m" / "scores" / "2")
    server.store.refresh()
    states = server.store.describe("scores")["model_version_status"]
    assert [one["state"] for one in states] == ["END", "AVAILABLE"]
    assert "cannot order lists" in states[0]["status"]["error_message"]
    assert server.store.get("scores").number == 1
    server.close()


def test_one_of_several_ranking_models_must_be_named(models, tmp_path) -> None:
    shutil.copytree(models, tmp_path / "m")
    shutil.copytree(models / "scores", tmp_path / "m" / "second")
    said = "several ranking models answer: scores, second; start the server with --ranker"
    server = Server(ServerConfig(tmp_path / "m", 60.0))
    with TestClient(build_app(server), "http://localhost") as client:
        answer = client.get("/v1/recommend?user=1003&k=2")
        assert (answer.status_code, answer.json()["error"]) == (400, said)
    Server(ServerConfig(tmp_path / "m", 60.0, recommend=RecommendConfig(ranker="second"))).close()


def test_a_new_retrieval_model_whose_items_cannot_be_ordered_is_not_served(rated, tmp_path) -> None:
    shutil.copytree(rated / "rates", tmp_path / "m" / "rates")
    server = Server(ServerConfig(tmp_path / "m", 60.0))
    shutil.copytree(rated / "towers", tmp_path / "m" / "towers")
    server.store.refresh()
    assert server.store.names == ["rates"]
    [state] = server.store.describe("towers")["model_version_status"]
    assert "beside towers, version 1, cannot order lists" in state["status"]["error_message"]
    server.close()


def test_a_second_ranking_model_leaves_lists_to_the_first(models, tmp_path) -> None:
    shutil.copytree(models, tmp_path / "m")
    server = Server(ServerConfig(tmp_path / "m", 60.0))
    with TestClient(build_app(server), "http://localhost") as client:
        before = ask(client, user=1003)
        shutil.copytree(models / "scores", tmp_path / "m" / "another")
        server.store.refresh()
        assert sorted(server.store.names) == ["another", "scores", "towers"]
        assert ask(client, user=1003) == before
        answer = client.get("/v1/recommend?user=1003&k=2").json()
        assert [model["name"] for model in answer["models"]] == ["towers", "scores"]


def test_a_ranking_model_of_other_items_is_refused(client, server) -> None:
    towers, scores = server.store.get("towers"), server.store.get("scores")
    assert explain_no_ranking(scores, towers) is None
    other = copy.copy(scores)
    other.known = replace(scores.known, position_of={"x": 0})
    assert "knows none of the items of towers" in explain_no_ranking(other, towers)
    texts = copy.copy(towers)
    texts.known = replace(towers.known, keys=["a"])
    assert "is int64, and keys of towers are text" in explain_no_ranking(scores, texts)

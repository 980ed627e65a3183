"""`/v1/recommend` with what requests say beside the user; ranking models that cannot order."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from starlette.testclient import TestClient

from conf.artefacts.export import ExportOptions
from conf.errors import ConfigError
from tests.training.serving.tiny_models import TOWERS, build, read_tokens, serve
from tests.training.tiny_dataset import TinyConfig, write_tiny_dataset
from training.checkpoint.restore import TrainedModel
from training.evaluation.item_index import read_item_features
from training.export.saved_model import write_export
from training.input.batches import build_eval_dataset
from training.serving.recommend import explain_no_ranking
from training.serving.served_version import ServedVersion
from training.serving.server import Server
from training.serving.server_config import RecommendConfig, ServerConfig

RANKER = {"kind": "ranking", "network": "fm", "embedding_dim": 4, "embedding_stddev": 1.0}
ITEMS = 12


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
    return build(version, folder / "run", "scores", RANKER)


@pytest.fixture(scope="module")
def models(ranker, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    towers = build(ranker.version_dir, folder / "run", "towers", TOWERS)
    for one in (ranker, towers):
        write_export(one, ExportOptions(folder / "served", k=5))
    return folder / "served"


@pytest.fixture(scope="module")
def served(models) -> Iterator[tuple[Server, TestClient]]:
    with serve(models) as found:
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
    [batch] = build_eval_dataset(*where, "users", 100, ("user_id", "gender", "history"))
    tokens = {n: read_tokens(ranker, n) for n in ("user_id", "movie_id", "device", "gender")}
    items, features = read_item_features(*where, ("movie_id", "genres"), 100)

    def score(user: int, device: str | None = None, **changed: Any) -> dict[int, float]:
        row = int(np.flatnonzero(batch["user_id"] == tokens["user_id"].index(user))[0])
        rows = {name: value[row : row + 1] for name, value in batch.items()}
        known = tokens["device"].index(device) if device else 1
        rows["device"] = tf.constant([known], tf.int64)
        if "gender" in changed:
            rows["gender"] = tf.constant([tokens["gender"].index(changed["gender"])], tf.int64)
        if "history" in changed:
            ids = [tokens["movie_id"].index(one) for one in changed["history"]]
            rows["history"] = tf.constant([ids + [0] * (rows["history"].shape[1] - len(ids))])
            rows["history"] = tf.cast(rows["history"], tf.int64)
        shape = tf.constant([1, len(items)], tf.int32)
        found = ranker.model.predict_candidates(rows, features, shape)["label"].numpy()[0]
        keys = [tokens["movie_id"][one] for one in items.ids]
        return pytest.approx(dict(zip(keys, found.tolist(), strict=True)), abs=1e-6)

    return score


def test_context_stands_beside_what_is_stored_and_may_be_missing(client, expect) -> None:
    for device in ("app", "web", None):
        assert ask(client, user=1003, features={"device": device}) == expect(1003, device)
        assert ask(client, user="1003", features={"client": device}) == expect(1003, device)
    bare = ask(client, user=1003)
    assert bare == expect(1003)
    assert bare != expect(1003, "app")
    answer = client.get(f"/v1/recommend?user=1003&k={ITEMS}&seen=true")
    assert {r["item"]: r["score:label"] for r in answer.json()["items"]} == expect(1003)
    for more in ("k=1_0", "device=app"):
        assert client.get(f"/v1/recommend?user=1003&{more}").status_code == 400


@pytest.mark.parametrize("history", [[101, 105], "105 101"])
def test_what_a_request_says_that_the_user_has_met_is_left_out(client, history) -> None:
    asked = {"user": "nobody", "features": {"history": history}}
    assert set(ask(client, **asked)) - set(ask(client, **asked, seen=False)) == {101, 105}


def test_what_a_request_says_of_the_user_replaces_what_is_stored(client, expect) -> None:
    changed = ask(client, user=1003, features={"device": "app", "gender": "F"})
    assert changed == expect(1003, "app", gender="F")
    # As the log writes it: earliest first is not said.
    for given, history in (([101, 105], [101, 105]), ("105 101", [105, 101]), (None, [])):
        assert ask(client, user=1003, features={"history": given}) == expect(1003, history=history)


def test_the_inputs_that_a_request_may_give_are_listed(client) -> None:
    [found] = client.get("/v1/recommend/inputs").json()["inputs"]
    assert (found["name"], found["column"], found["is_time"]) == ("device", "client", False)


@pytest.fixture(scope="module")
def rated(models, ranker, tmp_path_factory) -> Path:
    """The towers, and a ranking model that reads a rate of user and genre."""
    folder = tmp_path_factory.mktemp("rated")
    config = TinyConfig(users=12, items=ITEMS, rate=True)
    version = write_tiny_dataset(folder, config=config)
    shutil.copytree(models / "towers", folder / "served" / "towers")
    write_export(build(version, folder / "run", "rates", RANKER), ExportOptions(folder / "served"))
    return folder / "served"


def test_a_ranking_model_that_cannot_order_is_refused_at_start_or_left_out(rated) -> None:
    for name in (None, "rates"):
        with pytest.raises(ConfigError, match="cannot order lists"):
            Server(ServerConfig(rated, 60.0, recommend=RecommendConfig(ranker=name)))
    with serve(rated, recommend=RecommendConfig(is_ranked=False)) as (_, client):
        found = client.get("/v1/recommend?user=1003&k=2").json()
        assert [set(row) for row in found["items"]] == [{"item", "retrieval_score"}] * 2
        assert [model["name"] for model in found["models"]] == ["towers"]


def test_a_new_version_that_cannot_order_leaves_the_one_before(models, rated, tmp_path) -> None:
    shutil.copytree(models, tmp_path / "m")
    shutil.copytree(rated / "rates", tmp_path / "alone" / "rates")
    with serve(tmp_path / "m") as (server, _), serve(tmp_path / "alone") as (alone, _):
        shutil.copytree(rated / "rates" / "1", tmp_path / "m" / "scores" / "2")
        server.store.refresh()
        states = server.store.describe("scores")["model_version_status"]
        assert [one["state"] for one in states] == ["END", "AVAILABLE"]
        assert server.store.get("scores").number == 1
        shutil.copytree(rated / "towers", tmp_path / "alone" / "towers")
        alone.store.refresh()  # A retrieval model whose items the other one cannot order.
        assert alone.store.names == ["rates"]


def test_one_of_several_ranking_models_is_named_or_was_the_first(models, tmp_path) -> None:
    shutil.copytree(models, tmp_path / "m")
    with serve(tmp_path / "m") as (server, client):
        before = ask(client, user=1003)
        shutil.copytree(models / "scores", tmp_path / "m" / "another")
        server.store.refresh()
        assert sorted(server.store.names) == ["another", "scores", "towers"]
        assert ask(client, user=1003) == before
    for name, status in ((None, 400), ("another", 200)):
        with serve(tmp_path / "m", recommend=RecommendConfig(ranker=name)) as (_, client):
            answer = client.get("/v1/recommend?user=1003&k=2")
            assert (answer.status_code, "--ranker" in answer.text) == (status, status == 400)


def test_a_ranking_model_of_other_items_is_refused(server) -> None:
    towers, scores = server.store.get("towers"), server.store.get("scores")
    assert explain_no_ranking(scores, towers) is None
    other, texts = copy.copy(scores), copy.copy(towers)
    other.known = replace(scores.known, keys=["x"])
    assert explain_no_ranking(other, towers)
    texts.known = replace(towers.known, keys=["a"])
    assert explain_no_ranking(scores, texts)

"""Numbers that no model can read are refused wherever they come in, and never go out."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import tensorflow as tf
from starlette.testclient import TestClient

from conf.artefacts.export import ExportOptions
from conf.errors import UpstreamNotReadyError
from tests.training.number_features import BAD, NAN, ROW, build_number_model
from training.checkpoint.restore import TrainedModel
from training.encoders.serving import FLOAT_NULL_TOKEN
from training.export.saved_model import write_export
from training.models.registry import build_model
from training.serving.app import build_app
from training.serving.models.server_config import ServerConfig
from training.serving.server import Server

FLOATS = ("price", "cost", "plain", "tastes")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> TrainedModel:
    return build_number_model(tmp_path_factory.mktemp("numbers"))


@pytest.fixture(scope="module")
def models(trained, tmp_path_factory) -> Path:
    base = tmp_path_factory.mktemp("models")
    write_export(trained, ExportOptions(base))
    return base


@pytest.fixture(scope="module")
def server(models):
    return Server(ServerConfig(models, 60.0))


@pytest.fixture(scope="module")
def client(server):
    with TestClient(build_app(server), "http://localhost", raise_server_exceptions=False) as found:
        yield found


URL = "/v1/models/numbers:predict"


def post(client, path: str, body: dict) -> tuple[int, dict]:
    """Posts JSON as Python writes it: NaN and Infinity are bare words."""
    answer = client.post(path, content=json.dumps(body))
    return answer.status_code, answer.json()


def spoil(name: str, value: object) -> dict:
    return {**ROW, name: [0.5, value] if name == "tastes" else value}


def drop(row: dict, *names: str) -> dict:
    return {name: value for name, value in row.items() if name not in names}


def spoil_weights(weights: Iterable[tf.Variable]) -> None:
    for weight in weights:
        if weight.dtype.is_floating:
            weight.assign(tf.fill(weight.shape, NAN))


def example(row: dict) -> bytes:
    made = {}
    for name, value in row.items():
        values = value if isinstance(value, list) else [value]
        kind = ({"int64_list": tf.train.Int64List(value=values)} if isinstance(values[0], int)
                else {"float_list": tf.train.FloatList(value=values)})  # fmt: skip
        made[name] = tf.train.Feature(**kind)
    return tf.train.Example(features=tf.train.Features(feature=made)).SerializeToString()


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("value", BAD)
def test_numbers_that_are_not_finite_are_refused_by_every_request(client, name, value) -> None:
    rows = [ROW, spoil(name, value)]
    columns = {key: [row[key] for row in rows] for key in ROW}
    place = "row 1 (from 0), position [1]" if name == "tastes" else "row 1 (from 0)"
    lone = "row 0 (from 0)"
    scored = [{**drop(row, "movie_id"), "items": [107, 101]} for row in rows]
    requests = [
        (URL, {"instances": rows}, place),
        (URL, {"inputs": columns}, place),
        (URL, {"signature_name": "score_items", "instances": scored}, place),
        ("/v1/recommend",
         {"user": 1003, "features": drop(rows[1], "movie_id", "user_id")}, lone),
    ]  # fmt: skip
    for path, body, where in requests:
        status, answer = post(client, path, body)
        assert status == 400, (path, answer)
        assert f"input {name} must be finite numbers" in answer["error"]
        assert where in answer["error"]
    if abs(value) == 1e39:
        return  # A float32 of an Example cannot hold it.
    texts = [{"b64": base64.b64encode(example(row)).decode()} for row in rows]
    for signature, body in (
        ("examples", {"instances": texts}),
        ("regress", {"inputs": texts}),
        ("classify", {"inputs": texts}),
    ):
        status, answer = post(client, URL, {"signature_name": signature, **body})
        assert status == 400
        assert f"feature {name} must be finite numbers" in answer["error"]
        assert "in row 1 (from 0)" in answer["error"]


def test_what_is_finite_is_answered(client) -> None:
    whole = {**ROW, "price": 7, "cost": 2**70, "tastes": [1, 2]}
    tiny = {**ROW, "price": -0.0, "cost": 1e-310, "plain": 1e-45}
    status, answer = post(client, URL, {"instances": [ROW, whole, tiny]})
    assert status == 200
    clicks = [row["click"] for row in answer["predictions"]]
    assert len(set(clicks)) == 3
    texts = [{"b64": base64.b64encode(example(row)).decode()} for row in (ROW, tiny)]
    asked = {"signature_name": "examples", "instances": texts}
    status, answer = post(client, URL, asked)
    assert [row["click"] for row in answer["predictions"]] == pytest.approx(clicks[::2], abs=1e-6)


def test_null_and_what_is_left_out_are_missing_values(client) -> None:
    """A missing number is the centre of its scale, 0; null, null_token and nothing are alike."""
    tokens = {"price": FLOAT_NULL_TOKEN, "cost": FLOAT_NULL_TOKEN}
    rows = [{**ROW, **dict.fromkeys(tokens, value)} for value in (None, 1.0)]
    rows += [{**ROW, **tokens}]
    status, answer = post(client, URL, {"instances": [*rows, ROW]})
    assert status == 200
    missing, centre, token, other = [row["click"] for row in answer["predictions"]]
    assert missing == token == centre != other
    status, answer = post(client, URL, {"instances": [
        {**ROW, "tastes": [1.0, None]}, {**ROW, "tastes": [1.0, 1.0]}]})  # fmt: skip
    clicks = [row["click"] for row in answer["predictions"]]
    assert clicks[0] == clicks[1]
    features = {"plain": 0.5, "tastes": [0.5, 1.5]}
    scores = []
    for more in ({}, dict.fromkeys(tokens), dict.fromkeys(tokens, 1.0)):
        asked = {"user": 1003, "features": {**features, **more}, "k": 3}
        status, answer = post(client, "/v1/recommend", asked)
        assert status == 200
        scores.append([item["score:click"] for item in answer["items"]])
    assert scores[0] == scores[1] == scores[2]
    status, answer = post(client, "/v1/recommend", {"user": 1003, "features": {"price": 1.0}})
    assert (status, "plain has no value" in answer["error"]) == (400, True)
    status, answer = post(client, "/v1/recommend", {"user": 1003, "filter": {"kind": NAN}})
    assert status == 400


def test_a_score_that_is_no_number_is_a_fault_of_the_server(
    trained, models, tmp_path, monkeypatch
) -> None:
    """It is no answer, and nobody's bad request; a version that begins so is not served."""
    server = Server(ServerConfig(models, 60.0))
    with TestClient(build_app(server), "http://localhost") as client:
        model = server.store.get("numbers")._model
        call = model.call
        monkeypatch.setattr(model, "call", lambda *a: {n: v * NAN for n, v in call(*a).items()})
        asked = {"user": 1003, "features": {"plain": 1.0}}
        for path, body in ((URL, {"instances": [ROW, ROW]}), ("/v1/recommend", asked)):
            status, answer = post(client, path, body)
            assert status == 500
            assert " of numbers, version 1" in answer["error"]
            assert "not finite in row 0 (from 0)" in answer["error"]
        text = client.get("/metrics").text
        assert 'sluice_requests_total{method="predict",status="500"} 1.0' in text
    shutil.copytree(models / "numbers", tmp_path / "models" / "numbers")
    broken = build_model(trained.config.model, trained.manifest, 3)
    spoil_weights([next(iter(broken.network.weights.values()))])  # Layers behind it hide it.
    write_export(replace(trained, model=broken), ExportOptions(tmp_path / "models"))
    served = Server(ServerConfig(tmp_path / "models", 60.0))
    assert served.store.get("numbers").number == 1
    [newest, _] = served.store.describe("numbers")["model_version_status"]
    assert newest["state"] == "END"
    assert "not finite" in newest["status"]["error_message"]
    served.close()
    shutil.rmtree(tmp_path / "models" / "numbers" / "1")
    with pytest.raises(UpstreamNotReadyError) as caught:
        Server(ServerConfig(tmp_path / "models", 60.0))
    assert "not finite" in caught.value.received

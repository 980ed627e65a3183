"""Numbers that no model can read are refused wherever they come in, and never go out."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import tensorflow as tf

from conf.artefacts.export import ExportOptions
from conf.errors import UpstreamNotReadyError
from tests.training.number_features import BAD, NAN, ROW, build_number_model
from tests.training.serving.tiny_models import serve, write_example
from training.checkpoint.restore import TrainedModel
from training.encoders.serving import FLOAT_NULL_TOKEN
from training.export.saved_model import write_export
from training.models.registry import build_model
from training.serving.server import Server
from training.serving.server_config import ServerConfig

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
def served(models):
    with serve(models) as found:
        yield found


URL = "/v1/models/numbers:predict"


def post(client, path: str, body: dict) -> tuple[int, dict]:
    """Posts JSON as Python writes it: NaN and Infinity are bare words."""
    answer = client.post(path, content=json.dumps(body))
    return answer.status_code, answer.json()


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("value", BAD)
def test_numbers_that_are_not_finite_are_refused_by_every_request(client, name, value) -> None:
    rows = [ROW, {**ROW, name: [0.5, value] if name == "tastes" else value}]
    columns = {key: [row[key] for row in rows] for key in ROW}
    place = "row 1 (from 0), position [1]" if name == "tastes" else "row 1 (from 0)"
    listed = {key: given for key, given in rows[1].items() if not key.endswith("_id")}
    for path, body, where in (
        (URL, {"instances": rows}, place), (URL, {"inputs": columns}, place),
        ("/v1/recommend", {"user": 1003, "features": listed}, "row 0 (from 0)"),
    ):  # fmt: skip
        status, answer = post(client, path, body)
        assert (status, f"input {name} " in answer["error"], where in answer["error"]) == (
            400, True, True)  # fmt: skip
    if abs(value) == 1e39:
        return  # A float32 of an Example cannot hold it.
    texts = [write_example(**row) for row in rows]
    for signature in ("examples", "regress", "classify"):
        status, answer = post(client, URL, {"signature_name": signature, "inputs": texts})
        assert (status, f"feature {name} must be finite numbers" in answer["error"]) == (400, True)


def test_null_and_what_is_left_out_are_missing_values(client) -> None:
    """A missing number is the centre of its scale, 0; null, null_token and nothing are alike."""
    tokens = {"price": FLOAT_NULL_TOKEN, "cost": FLOAT_NULL_TOKEN}
    missing, centre = dict.fromkeys(tokens), dict.fromkeys(tokens, 1.0)
    rows = [{**ROW, **more} for more in (
        missing, centre, tokens, {}, {"tastes": [1.0, None]}, {"tastes": [1.0, 1.0]})]  # fmt: skip
    answer = post(client, URL, {"instances": rows})[1]
    clicks = [row["click"] for row in answer["predictions"]]
    assert clicks[0] == clicks[1] == clicks[2] != clicks[3]
    assert clicks[4] == clicks[5]
    scores = []
    for more in ({}, missing, centre):
        asked = {"user": 1003, "features": {"plain": 0.5, "tastes": [0.5, 1.5], **more}, "k": 3}
        answer = post(client, "/v1/recommend", asked)[1]
        scores.append([item["score:click"] for item in answer["items"]])
    assert scores[0] == scores[1] == scores[2]
    for more in ({"features": {"price": 1.0}}, {"filter": {"kind": NAN}}):
        assert post(client, "/v1/recommend", {"user": 1003, **more})[0] == 400


def test_a_score_that_is_no_number_is_a_fault_of_the_server(
    trained, models, tmp_path, monkeypatch
) -> None:
    """It is no answer, and nobody's bad request; a version that begins so is not served."""
    with serve(models) as (server, client):
        model = server.store.get("numbers")._model
        call = model.call
        monkeypatch.setattr(model, "call", lambda *a: {n: v * NAN for n, v in call(*a).items()})
        asked = {"user": 1003, "features": {"plain": 1.0}}
        for path, body in ((URL, {"instances": [ROW, ROW]}), ("/v1/recommend", asked)):
            status, answer = post(client, path, body)
            assert (status, "not finite in row 0 (from 0)" in answer["error"]) == (500, True)
        text = client.get("/metrics").text
        assert 'sluice_requests_total{method="predict",status="500"} 1.0' in text
    shutil.copytree(models / "numbers", tmp_path / "models" / "numbers")
    broken = build_model(trained.config.model, trained.manifest, 3)
    weight = next(iter(broken.network.weights.values()))
    weight.assign(tf.fill(weight.shape, NAN))  # Layers behind it hide it.
    write_export(replace(trained, model=broken), ExportOptions(tmp_path / "models"))
    with serve(tmp_path / "models") as (server, _):
        assert server.store.get("numbers").number == 1
        [newest, _] = server.store.describe("numbers")["model_version_status"]
    assert newest["state"] == "END"
    assert "not finite" in newest["status"]["error_message"]
    shutil.rmtree(tmp_path / "models" / "numbers" / "1")
    with pytest.raises(UpstreamNotReadyError) as caught:
        Server(ServerConfig(tmp_path / "models", 60.0))
    assert "not finite" in caught.value.received

"""The server: TensorFlow Serving's REST API, recommendations, reload, bad input, a real process."""

from __future__ import annotations

import base64
import json
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from starlette.testclient import TestClient

from conf.artefacts.export import ExportOptions, IndexKind, IndexOptions, roll_back
from conf.errors import ConfigError, InputDataError, UpstreamNotReadyError
from tests.training.serving.tiny_models import ROW
from training.apply.endpoint import Endpoint, describe_tasks, evaluate_served
from training.apply.export import Export
from training.checkpoint.restore import TrainedModel
from training.evaluation.evaluate import evaluate_split
from training.evaluation.item_index import build_item_index, read_user_vectors
from training.export.saved_model import write_export
from training.index.index_build import add_items, build_index
from training.index.item_columns import align_columns, read_table
from training.input.batches import build_eval_dataset
from training.models.registry import build_model
from training.serving.app import build_app
from training.serving.models.server_config import RecommendConfig, ServerConfig
from training.serving.requests.errors import RequestError
from training.serving.server import Server


@pytest.fixture(scope="module")
def batch(trained) -> dict[str, tf.Tensor]:
    one = trained["scores"]
    [found] = build_eval_dataset(one.version_dir, one.manifest, "test", 1000, one.model.inputs)
    return found


def encoded_rows(batch, count: int) -> list[dict]:
    columns = {name: value.numpy()[:count].tolist() for name, value in batch.items()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def test_rows_and_columns_give_what_the_model_predicts(client, trained, batch) -> None:
    expected = {n: v.numpy() for n, v in trained["scores"].model.predict(batch).items()}
    rows = encoded_rows(batch, 60)
    asked = {"signature_name": "encoded", "instances": rows}
    answer = client.post("/v1/models/scores:predict", json=asked)
    assert answer.status_code == 200
    found = answer.json()["predictions"]
    for task, scores in expected.items():
        np.testing.assert_allclose([row[task] for row in found], scores, atol=1e-6)
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    asked = {"signature_name": "encoded", "inputs": columns}
    answer = client.post("/v1/models/scores/versions/1:predict", json=asked).json()
    for task, scores in expected.items():
        np.testing.assert_allclose(answer["outputs"][task], scores, atol=1e-6)


def test_a_single_output_and_a_single_input_drop_their_names(client, trained) -> None:
    item = {"movie_id": 107, "genres": ["genre_1"]}
    asked = {"signature_name": "item_embedding", "instances": [item]}
    [vector] = client.post("/v1/models/towers:predict", json=asked).json()["predictions"]
    asked = {"signature_name": "item_embedding", "inputs": {n: [v] for n, v in item.items()}}
    assert client.post("/v1/models/towers:predict", json=asked).json()["outputs"] == [vector]
    example = tf.train.Example(features=tf.train.Features(feature={
        "movie_id": tf.train.Feature(int64_list=tf.train.Int64List(value=[107])),
        "genres": tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"genre_1"])),
    }))  # fmt: skip
    text = {"b64": base64.b64encode(example.SerializeToString()).decode()}
    for body in ({"instances": [text]}, {"inputs": [text]}, {"instances": [{"examples": text}]}):
        asked = {"signature_name": "item_embedding_examples", **body}
        answer = client.post("/v1/models/towers:predict", json=asked).json()
        np.testing.assert_allclose(next(iter(answer.values())), [vector], atol=1e-6)


def test_status_metadata_health_and_metrics(client) -> None:
    status = {"version": "1", "state": "AVAILABLE",
              "status": {"error_code": "OK", "error_message": ""}}  # fmt: skip
    for path in ("/v1/models/towers", "/v1/models/towers/versions/1"):
        assert client.get(path).json() == {"model_version_status": [status]}
    found = client.get("/v1/models/towers/metadata").json()
    assert found["model_spec"] == {"name": "towers", "signature_name": "", "version": "1"}
    about = found["metadata"]["signature_def"]["signature_def"]["user_embedding"]
    assert about["method_name"] == "tensorflow/serving/predict"
    assert about["inputs"]["history"]["dtype"] == "DT_INT64"
    assert [d["size"] for d in about["inputs"]["history"]["tensor_shape"]["dim"]] == ["-1", "-1"]
    assert client.get("/healthz").json()["models"] == {"scores": 1, "towers": 1}
    assert client.head("/healthz").status_code == 200
    names = [(one["name"], one["version"]) for one in client.get("/v1/models").json()["models"]]
    assert names == [("scores", "1"), ("towers", "1")]
    text = client.get("/metrics").text
    assert 'sluice_requests_total{method="status",status="200"}' in text
    assert 'sluice_model_version{model="towers"} 1.0' in text
    assert "<form" in client.get("/").text


def test_lists_are_exact_and_leave_out_what_is_met_blocked_or_filtered(client, trained) -> None:
    one = trained["towers"]
    index = build_item_index(one.model, one.version_dir, one.manifest, 64)
    [users] = read_user_vectors(one, seen=True)
    vocabulary, movies = _read_tokens(one, "user_id"), _read_tokens(one, "movie_id")
    tokens = np.array([movies[i] for i in index.ids.tolist()])
    scores = users.vectors @ index.vectors.T
    for row in (0, 17, 40):
        asked = {"user": vocabulary[int(users.ids[row])], "k": 6, "candidates": 30}
        met = {movies[i] for i in users.seen[row].numpy().tolist()} | {103, 104}
        order = [int(tokens[n]) for n in np.argsort(-scores[row], kind="stable")]
        found = client.post("/v1/recommend", json={**asked, "exclude": [order[0]]}).json()
        assert found["known"]
        assert len(found["items"]) == 6
        left = set(order) - met - {order[0]}
        assert {item["item"] for item in found["items"]} <= left
        best = [item["score:click"] for item in found["items"]]
        assert best == sorted(best, reverse=True)
        by_item = dict(zip(tokens.tolist(), scores[row], strict=True))
        for item in found["items"]:
            assert item["retrieval_score"] == pytest.approx(by_item[item["item"]], abs=1e-5)
            assert item["title"] == f"Film {item['item'] - 100}"
        found = client.post("/v1/recommend", json={**asked, "filter": {"kind": "a"}}).json()
        assert {item["kind"] for item in found["items"]} == {"a"}
        assert found["history"][0]["title"].startswith("Film")
        assert found["histories"] == {"history": found["history"]}


def test_lists_are_ordered_where_all_probabilities_are_one(trained, tmp_path) -> None:
    one = trained["scores"]
    sure = build_model(one.config.model, one.manifest, 3)
    for weight in sure.trainable_variables:
        if weight.shape == (1,):  # The bias of a task's head.
            weight.assign_add([40.0])
    write_export(replace(one, model=sure), ExportOptions(tmp_path, k=5))
    server = Server(ServerConfig(tmp_path, 60.0))
    with TestClient(build_app(server), "http://localhost") as client:
        features = {"gender": "F", "history": [101]}
        asked = {"user": 1003, "features": features, "k": 30, "seen": True}
        found = client.post("/v1/recommend", json=asked).json()["items"]
        items = [[item["item"] for item in found]]
        row = {"user_id": [1003], "gender": ["F"], "history": [[101]], "items": items}
        given = {"signature_name": "rank_items", "inputs": row}
        answer = client.post("/v1/models/scores:predict", json=given).json()
    odds = answer["outputs"]["click"][0]
    assert {item["score:click"] for item in found} == {1.0}
    assert len(set(odds)) > 10
    assert odds == sorted(odds, reverse=True)


def _read_tokens(trained: TrainedModel, vocabulary: str) -> dict:
    """The raw token of each id."""
    table = pq.read_table(trained.version_dir / "encoders" / f"{vocabulary}.parquet")
    return dict(enumerate(table["token"].to_pylist(), start=2))


@pytest.mark.parametrize("name", ["towers", "scores"])
def test_evaluation_through_what_serves_gives_the_run_s_metrics(
    client, trained, models, name
) -> None:
    one = trained[name]
    expected = evaluate_split(one, "test")

    def post(url: str, body: dict) -> tuple[int, dict]:
        answer = client.post(url, json=body)
        return answer.status_code, answer.json()

    url, tasks = f"/v1/models/{name}/versions/1", describe_tasks(one.model)
    for served in (Endpoint(url, tasks, post, rows=40), Export(models / name / "1")):
        found, difference = evaluate_served(one, "test", served)
        assert found.pop("replay")["sent"] == "raw values"
        assert not difference.differing
        assert list_numbers(found) == pytest.approx(list_numbers(expected), abs=1e-6)
    other = build_model(one.config.model, one.manifest, 4)  # Another run's weights.
    _, difference = evaluate_served(replace(one, model=other), "test", served)
    assert len(difference.differing) >= 60
    with pytest.raises(InputDataError, match="does not score as the run does"):
        difference.refuse()
    with pytest.raises(UpstreamNotReadyError, match="does not answer"):
        evaluate_served(one, "test", Endpoint("/v1/models/none", tasks, post))


def list_numbers(found: object) -> list[float]:
    """All numbers, wherever they stand."""
    if isinstance(found, dict):
        return [one for key in sorted(found) for one in list_numbers(found[key])]
    if isinstance(found, list):
        return [one for part in found for one in list_numbers(part)]
    return [float(found)] if isinstance(found, int | float) else []


def _deep(levels: int) -> str:
    return '{"instances": ' + "[" * levels + "]" * levels + "}"


def _with(**changes) -> dict:
    return {"instances": [{**ROW, **changes}]}


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("none:predict", {"instances": [1]}, 404, "Servable not found for request: Latest(none)"),
        ("towers/versions/9:predict", {"instances": [1]}, 404, "Specific(towers, 9)"),
        ("towers:guess", {"instances": [1]}, 400, "POST /v1/models/towers:guess"),
        ("towers", {}, 400, "Malformed request"),
        ("scores:predict", {**_with(), "signature_name": "no"}, 400, '"no" not found in signature'),
        ("scores:predict", {**_with(), "signature_name": 3}, 400, "must be a string"),
        ("scores:predict", "{", 400, "JSON Parse error"),
        ("scores:predict", b"\xff\xfe", 400, "JSON Parse error"),
        ("scores:predict", _deep(100_00), 400, ""),
        ("scores:predict", "[]", 400, "must be a JSON object"),
        ("scores:predict", {}, 400, "either 'instances' or 'inputs'"),
        ("scores:predict", {"instances": [ROW], "inputs": {}}, 400, "and not both"),
        ("scores:predict", {"instances": []}, 400, "at least one row"),
        ("scores:predict", {"instances": [ROW, 7]}, 400, "instance 1 is no object"),
        ("scores:predict", {"instances": [{"user_id": 1}]}, 400, "missing: gender"),
        ("scores:predict", _with(extra=1), 400, "unknown: extra"),
        ("scores:predict", _with(user_id="1"), 400, "input user_id must be whole numbers"),
        ("scores:predict", _with(user_id=1.5), 400, "received 1.5"),
        ("scores:predict", '{"instances": [{"user_id": NaN}]}', 400, "missing: gender"),
        ("scores:predict", _with(user_id=2**70), 400, "input user_id"),
        ("scores:predict", _with(user_id=[1]), 400, "received [1]"),
        ("scores:predict", _with(history=7), 400, "input history must be a list"),
        ("scores:predict", _with(history=[1, "a"]), 400, "input history"),
        ("scores:predict", _with(gender=3.5), 400, "input gender must be text"),
        ("scores:predict", _with(gender={"b64": "?"}), 400, "b64 does not decode"),
        ("scores:predict", {"instances": [ROW, {**ROW, "history": [1]}]}, 400, "one length"),
        ("scores:predict", {"instances": [ROW] * 65}, 400, "a request may have 64 rows"),
        ("scores:predict", _with(gender="x" * 200_001), 413, "longer than 200000 bytes"),
        ("scores:classify", {"examples": [{}]}, 400, "Malformed request"),
    ],
)  # fmt: skip
def test_bad_requests_get_the_documented_answer(client, path, body, status, said) -> None:
    content = body if isinstance(body, (str, bytes)) else json.dumps(body)
    answer = client.post(f"/v1/models/{path}", content=content)
    assert (answer.status_code, set(answer.json())) == (status, {"error"})
    assert said in answer.json()["error"]
    assert client.post("/v1/models/scores:predict", json=_with()).status_code == 200


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "needs 'user', 'features', or both"),
        ({"user": 1000, "k": 0}, "k: "),
        ({"user": 1000, "colour": 1}, "colour: "),
        ({"user": 1000, "filter": {"colour": 1}}, "unknown columns ['colour']"),
        ({"features": {"colour": 1}}, "unknown features ['colour']"),
        ({"features": {"history": "x"}}, "input history"),
    ],
)
def test_bad_recommendations_are_refused(client, body, said) -> None:
    answer = client.post("/v1/recommend", json=body)
    assert answer.status_code == 400
    assert said in answer.json()["error"]


def test_requests_at_the_same_time_share_calls_and_keep_their_answers(client, batch) -> None:
    rows = encoded_rows(batch, 60)
    url = "/v1/models/scores:predict"

    def ask(row: dict) -> float:
        asked = {"signature_name": "encoded", "instances": [row]}
        return client.post(url, json=asked).json()["predictions"][0]["click"]

    alone = [ask(row) for row in rows]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(ask, rows))
    np.testing.assert_allclose(together, alone, atol=1e-6)
    broken = {**rows[0], "history": rows[0]["history"][:3]}
    assert isinstance(ask(broken), float)


def test_fuzzed_requests_never_end_in_a_500(client) -> None:
    rng = random.Random(3)
    values = [None, True, 1, -1.5, "", "x", [], [1], {}, {"b64": "eA=="}, 2**80, [[1], [2, 3]]]
    paths = ["scores:predict", "towers:predict", "x:predict"]
    names = [
        "serving_default",
        "encoded",
        "candidates",
        "score_items",
        "top_k",
        3,
        None,
        "classify",
    ]
    codes = set()
    for _ in range(400):
        row = {name: rng.choice([value, rng.choice(values)]) for name, value in ROW.items()}
        row.pop(rng.choice([*row, "none"]), None)
        body = {rng.choice(["instances", "inputs", "examples"]): rng.choice([[row], row, values]),
                "signature_name": rng.choice(names)}  # fmt: skip
        text = json.dumps(body)
        if rng.random() < 0.2:
            cut = rng.randrange(len(text))
            text = text[:cut] + rng.choice(["", "\x00", "}", "[[["]) + text[cut + 1 :]
        codes.add(client.post(f"/v1/models/{rng.choice(paths)}", content=text).status_code)
    assert codes <= {200, 400, 404}
    assert 400 in codes


def test_a_new_version_answers_and_a_broken_one_does_not(trained, models, tmp_path) -> None:
    base = tmp_path / "models"
    shutil.copytree(models / "towers", base / "towers")
    server = Server(ServerConfig(base, 60.0))
    shutil.copytree(base / "towers" / "1", tmp_path / "2")
    (tmp_path / "2" / "variables" / "variables.index").write_bytes(b"")
    (tmp_path / "2").rename(base / "towers" / "2")  # Half a copy: sizes differ.
    server.store.refresh()
    [half, first] = server.store.describe("towers")["model_version_status"]
    assert (half["state"], "variables.index: 0 bytes of" in half["status"]["error_message"]) == (
        "LOADING", True)  # fmt: skip
    assert first["state"] == "AVAILABLE"
    shutil.copy(base / "towers" / "1" / "variables" / "variables.index",
                base / "towers" / "2" / "variables" / "variables.index")  # fmt: skip
    shutil.copytree(base / "towers" / "1", base / "towers" / "3")
    warmup = base / "towers" / "3" / "assets.extra" / "tf_serving_warmup_requests"
    size = warmup.stat().st_size
    warmup.write_bytes(b"\0" * size)  # Its warm-up fails: it is not served, the copy is.
    server.store.refresh()
    assert server.store.get("towers").number == 2
    states = server.store.describe("towers")["model_version_status"]
    assert [one["state"] for one in states] == ["END", "AVAILABLE", "END"]
    assert states[0]["status"]["error_code"] == "INTERNAL"
    server.store.refresh()  # What failed is not tried again.
    text = server.metrics.render().decode()
    for line in ('sluice_model_loads_total{model="towers",result="failed"} 1.0',
                 'sluice_model_loads_total{model="towers",result="served"} 2.0',
                 'sluice_model_version{model="towers"} 2.0'):  # fmt: skip
        assert line in text
    assert roll_back(base / "towers", 1) == [2, 3]
    server.store.refresh()  # What was withdrawn answers no longer; the version before it does.
    assert server.store.get("towers").number == 1
    assert 'sluice_model_version{model="towers"} 1.0' in server.metrics.render().decode()
    with pytest.raises(RequestError):
        server.store.get("towers", "2")
    server.close()


def test_model_and_index_are_one_pair(models, tmp_path) -> None:
    version = tmp_path / "models" / "towers" / "1"
    shutil.copytree(models / "towers" / "1", version)
    shutil.rmtree(version / "index")
    server = Server(ServerConfig(tmp_path / "models", 60.0))
    with TestClient(build_app(server), "http://localhost") as client:
        everything = {"user": 1003, "k": 40, "seen": True}

        def ask(**more) -> dict:
            return client.post("/v1/recommend", json={**everything, **more}).json()

        bare = ask()
        assert "needs an index with columns" in ask(filter={"kind": "a"})["error"]
        options = IndexOptions(IndexKind.HNSW, models / "items.csv")
        assert build_index(version, options).name == "1"
        server.store.refresh()
        assert client.get("/healthz").json()["indexes"] == {"towers": 1}
        indexed = ask()
        assert indexed["models"] == [{"name": "towers", "version": "1", "index": "1"}]
        assert [i["item"] for i in indexed["items"]] == [i["item"] for i in bare["items"]]
        assert {i["title"] for i in ask(filter={"kind": ["a"]})["items"]} == {
            f"Film {n}" for n in range(0, 30, 2)
        }
        news = tmp_path / "news.csv"
        news.write_text("movie_id,genres,title\n900,genre_1|genre_all,New\n101,genre_1,Old\n")
        assert add_items(version, news)[1:] == (1, 1)
        assert add_items(version, news) == (version / "index" / "2", 0, 2)
        server.store.refresh()
        [new] = [item for item in ask()["items"] if item["item"] == 900]
        assert (len(ask()["items"]), new["title"], new["kind"]) == (31, "New", None)
        assert new["retrieval_score"] == pytest.approx(_score(client, version, 900), abs=1e-5)
        assert 900 not in {item["item"] for item in ask(exclude=[900])["items"]}
        _check_bad_indexes(server, client, version)
    found = client.get("/metrics").text
    assert 'sluice_index_version{model="towers"} 2.0' in found


def test_keys_and_texts_of_csv_stay_as_they_are_written(tmp_path) -> None:
    path = tmp_path / "items.csv"
    path.write_text("sku,year,code\n007,1999,01\nNA,,\n")
    assert read_table(path, as_text=True)["code"].to_pylist() == ["01", None]
    table = read_table(path)
    assert table.to_pydict() == {"sku": ["007", "NA"], "year": [1999, None], "code": ["01", None]}
    of_texts = align_columns(table, pa.array(["7", "NA", "007"]))
    assert of_texts["year"].to_pylist() == [None, None, 1999]
    path.write_text("sku,year\n007,1999\n8,2000\n")
    assert align_columns(read_table(path), pa.array([8, 7]))["year"].to_pylist() == [2000, 1999]


def _score(client, version: Path, item: int) -> float:
    """The dot product of a user of the export and an item, each embedded by a request."""
    users = pq.read_table(version / "embeddings" / "users.parquet").to_pylist()
    [user] = [row["vector"] for row in users if row["key"] == 1003]
    asked = {"signature_name": "item_embedding",
             "instances": [{"movie_id": item, "genres": ["genre_1", "genre_all"]}]}  # fmt: skip
    [vector] = client.post("/v1/models/towers:predict", json=asked).json()["predictions"]
    return float(np.dot(user, vector))


def _check_bad_indexes(server: Server, client: TestClient, version: Path) -> None:
    """Whether an index that is not whole, or of another model, changes nothing."""

    def refresh() -> int:
        server.store.refresh()
        return client.get("/healthz").json()["indexes"]["towers"]

    third = version / "index" / "3"
    shutil.copytree(version / "index" / "2", third)
    content = (third / "near.faiss").read_bytes()
    (third / "near.faiss").write_bytes(content[:-9])  # Half a copy.
    assert refresh() == 2
    (third / "near.faiss").write_bytes(content[:-9] + bytes(9))
    assert refresh() == 2
    text = client.get("/metrics").text
    assert 'sluice_model_loads_total{model="towers",result="failed"} 1.0' in text
    (third / "near.faiss").write_bytes(content)
    card = json.loads((third / "index.json").read_text())
    card["export"]["fingerprint"] = "0" * 64
    (third / "index.json").write_text(json.dumps(card))
    assert refresh() == 2
    assert client.post("/v1/recommend", json={"user": 1003}).status_code == 200
    with pytest.raises(UpstreamNotReadyError, match="made of another model than") as caught:
        Server(ServerConfig(version.parents[1], 60.0))
    assert "sluice index --export" in caught.value.received
    with pytest.raises(InputDataError, match="made of another model than"):
        add_items(version, version / "users.parquet")


@pytest.mark.parametrize(
    ("rows", "error", "said"),
    [
        ("movie_id,genres\n900,x\n900,x\n", InputDataError, "a key each"),
        ("movie_id,genres\n,x\n", InputDataError, "a key each"),
        ("movie_id,genres\nnine,x\n", InputDataError, "a key each"),
        ("movie_id,title\n900,x\n", ConfigError, "new items need features"),
        ("", InputDataError, "cannot be read"),
    ],
)
def test_new_items_that_do_not_fit_are_refused(models, tmp_path, rows, error, said) -> None:
    news = tmp_path / "news.csv"
    news.write_text(rows)
    version = models / "towers" / "1"
    with pytest.raises(error, match=said):
        add_items(version, news)
    assert [path.name for path in (version / "index").iterdir() if path.is_dir()] == ["1"]


def test_nothing_to_serve_is_said(models, tmp_path) -> None:
    with pytest.raises(UpstreamNotReadyError, match="no exported model"):
        Server(ServerConfig(tmp_path))
    with pytest.raises(ConfigError, match="no exported ranking model"):
        Server(ServerConfig(models, 60.0, recommend=RecommendConfig(ranker="towers")))
    with pytest.raises(ConfigError, match="no exported ranking model") as refused:
        Server(ServerConfig(models, 60.0, recommend=RecommendConfig(ranker="score")))
    assert "did you mean 'scores'" in refused.value.render()

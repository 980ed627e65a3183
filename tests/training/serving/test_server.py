"""The server: TensorFlow Serving's REST API, recommendations, reloads, versions as exported."""

from __future__ import annotations

import json
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from starlette.testclient import TestClient

from conf.artefacts.export import (
    WARMUP_FILE,
    ExportOptions,
    IndexKind,
    IndexOptions,
    roll_back,
    seal_card,
)
from conf.artefacts.run import write_json
from conf.errors import ConfigError, InputDataError, UpstreamNotReadyError
from tests.training.serving.tiny_models import PAD, ROW, read_tokens, serve, write_example
from training.apply.endpoint import Endpoint, describe_tasks, evaluate_served
from training.apply.export import Export
from training.evaluation.evaluate import evaluate_split
from training.evaluation.item_index import build_item_index
from training.export.embeddings import read_user_vectors
from training.export.saved_model import write_export
from training.index.index_build import add_items, build_index
from training.index.item_columns import align_columns, read_table
from training.input.batches import build_eval_dataset
from training.models.registry import build_model
from training.serving.errors import RequestError
from training.serving.served_version import ServedVersion
from training.serving.server import Server
from training.serving.server_config import RecommendConfig, ServerConfig

PREDICT = "/v1/models/scores:predict"


def test_requests_give_what_the_model_predicts_also_at_the_same_time(client, trained) -> None:
    one = trained["scores"]
    [batch] = build_eval_dataset(one.version_dir, one.manifest, "test", 1000, one.model.inputs)
    expected = {task: values.numpy() for task, values in one.model.predict(batch).items()}
    columns = {name: value.numpy().tolist() for name, value in batch.items()}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def ask(**form: Any) -> Any:
        [found] = client.post(PREDICT, json={"signature_name": "encoded", **form}).json().values()
        return found

    with ThreadPoolExecutor(16) as pool:
        alone = list(pool.map(lambda row: ask(instances=[row])[0], rows))
    found, outputs = ask(instances=rows[:60]), ask(inputs={n: v[:60] for n, v in columns.items()})
    for task, scores in expected.items():
        np.testing.assert_allclose([row[task] for row in alone], scores, atol=1e-6)
        np.testing.assert_allclose([row[task] for row in found], scores[:60], atol=1e-6)
        np.testing.assert_allclose(outputs[task], scores[:60], atol=1e-6)


def test_a_single_output_and_a_single_input_drop_their_names(client) -> None:
    text = write_example(movie_id=107, genres=b"genre_1")
    item, vectors = {"movie_id": 107, "genres": ["genre_1"]}, []
    for form, body in (
        ("", {"instances": [item]}), ("", {"inputs": {n: [v] for n, v in item.items()}}),
        ("_examples", {"instances": [text]}), ("_examples", {"inputs": [text]}),
        ("_examples", {"instances": [{"examples": text}]}),
    ):  # fmt: skip
        asked = {"signature_name": f"item_embedding{form}", **body}
        [[vector]] = client.post("/v1/models/towers:predict", json=asked).json().values()
        vectors.append(vector)
    np.testing.assert_allclose(vectors, vectors[:1] * 5, atol=1e-6)


def test_status_metadata_health_limits_and_metrics(client) -> None:
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
    assert len(client.get("/v1/models").json()["models"]) == 2
    assert client.get("/v1/limits").json()["rows"] == 64
    text = client.get("/metrics").text
    assert 'sluice_requests_total{method="status",status="200"}' in text
    assert 'sluice_model_version{model="towers"} 1.0' in text


def test_lists_are_exact_and_leave_out_what_is_met_blocked_or_filtered(client, trained) -> None:
    one = trained["towers"]
    index = build_item_index(one.model, one.version_dir, one.manifest, 64)
    [users] = read_user_vectors(one, seen=True)
    vocabulary, movies = read_tokens(one, "user_id"), read_tokens(one, "movie_id")
    tokens = np.array([movies[i] for i in index.ids.tolist()])
    scores = users.vectors @ index.vectors.T
    for row in (0, 17, 40):
        asked = {"user": vocabulary[int(users.ids[row])], "k": 6, "candidates": 30}
        met = {movies[i] for i in users.seen[row].numpy().tolist()} | {103, 104}
        order = [int(tokens[n]) for n in np.argsort(-scores[row], kind="stable")]
        found = client.post("/v1/recommend", json={**asked, "exclude": [order[0]]}).json()
        assert (found["known"], len(found["items"])) == (True, 6)
        assert {item["item"] for item in found["items"]} <= set(order) - met - {order[0]}
        best = [item["score:click"] for item in found["items"]]
        assert best == sorted(best, reverse=True)
        by_item = dict(zip(tokens.tolist(), scores[row], strict=True))
        for item in found["items"]:
            assert item["retrieval_score"] == pytest.approx(by_item[item["item"]], abs=1e-5)
            assert item["title"] == f"Film {item['item'] - 100}"
        found = client.post("/v1/recommend", json={**asked, "filter": {"kind": "a"}}).json()
        assert {item["kind"] for item in found["items"]} == {"a"}
        assert found["histories"] == {"history": found["history"]}
        assert {one["item"] for one in found["history"]} <= met


def test_lists_are_ordered_where_all_probabilities_are_one(trained, tmp_path) -> None:
    one = trained["scores"]
    sure = build_model(one.config.model, one.manifest, 3)
    for weight in sure.trainable_variables:
        if weight.shape == (1,):  # The bias of a task's head.
            weight.assign_add([40.0])
    write_export(replace(one, model=sure), ExportOptions(tmp_path, k=5))
    with serve(tmp_path) as (_, client):
        row = {"gender": "F", "history": [101]}
        asked = {"user": 1003, "features": row, "k": 30, "seen": True}
        found = client.post("/v1/recommend", json=asked).json()["items"]
        row |= {"user_id": 1003, "items": [item["item"] for item in found]}
        asked = {"signature_name": "rank_items", "instances": [row]}
        [answer] = client.post(PREDICT, json=asked).json()["predictions"]
    assert {item["score:click"] for item in found} == {1.0}
    assert len(set(answer["click"])) > 10
    assert answer["click"] == sorted(answer["click"], reverse=True)


@pytest.mark.parametrize("name", ["towers", "scores"])
def test_evaluation_through_what_serves_gives_the_run_s_metrics(
    client, trained, models, name
) -> None:
    one = trained[name]

    def list_numbers(found: dict) -> list[float]:
        return [leaf for leaf in tf.nest.flatten(found) if isinstance(leaf, int | float)]

    def post(url: str, body: dict) -> tuple[int, dict]:
        answer = client.post(url, json=body)
        return answer.status_code, answer.json()

    expected = list_numbers(evaluate_split(one, "test"))
    url, tasks = f"/v1/models/{name}/versions/1", describe_tasks(one.model)
    for served in (Endpoint(url, tasks, post, rows=40), Export(models / name / "1")):
        found, difference = evaluate_served(one, "test", served)
        assert found.pop("replay")["sent"] == "raw values"
        assert not difference.differing
        assert list_numbers(found) == pytest.approx(expected, abs=1e-6)
    other = build_model(one.config.model, one.manifest, 4)  # Another run's weights.
    _, difference = evaluate_served(replace(one, model=other), "test", served)
    with pytest.raises(InputDataError, match=r"\d\d rows differ"):
        difference.refuse()
    with pytest.raises(UpstreamNotReadyError):
        evaluate_served(one, "test", Endpoint("/v1/models/none", tasks, post))


def test_fuzzed_requests_never_end_in_a_500(client) -> None:
    rng, codes = random.Random(3), set()
    values = [None, True, 1, -1.5, "", "x", [], [1], {}, {"b64": "eA=="}, 2**80, [[1], [2, 3]]]
    names = ["serving_default", "encoded", "candidates", "score_items", "top_k", 3, None]
    for _ in range(400):
        row = {name: rng.choice([value, rng.choice(values)]) for name, value in ROW.items()}
        row.pop(rng.choice([*row, "none"]), None)
        body = {rng.choice(["instances", "inputs"]): rng.choice([[row], row, values])}
        text = json.dumps({**body, "signature_name": rng.choice(names)})
        if rng.random() < 0.2:
            place = rng.randrange(len(text))
            text = text[:place] + rng.choice(["", "\x00", "}", "[[["]) + text[place + 1 :]
        url = f"/v1/models/{rng.choice(['scores', 'towers', 'x'])}:predict"
        codes.add(client.post(url, content=text).status_code)
    assert {400} <= codes <= {200, 400, 404}


def test_a_new_version_answers_and_a_broken_one_does_not(models, tmp_path) -> None:
    base = tmp_path / "models"
    towers = base / "towers"
    shutil.copytree(models / "towers", towers)
    shutil.copytree(towers / "1", tmp_path / "2")
    (tmp_path / "2" / "variables" / "variables.index").write_bytes(b"")
    with serve(base) as (server, _):

        def refresh() -> list[str]:
            server.store.refresh()
            states = server.store.describe("towers")["model_version_status"]
            return [one["state"] for one in states]

        (tmp_path / "2").rename(towers / "2")  # Half a copy: sizes differ.
        assert refresh() == ["LOADING", "AVAILABLE"]
        part = Path("variables") / "variables.index"
        shutil.copy(towers / "1" / part, towers / "2" / part)
        shutil.copytree(towers / "1", towers / "3")
        warmup = towers / "3" / "assets.extra" / "tf_serving_warmup_requests"
        warmup.write_bytes(bytes(warmup.stat().st_size))  # It fails: the copy is served.
        assert refresh() == ["END", "AVAILABLE", "END"]
        assert server.store.get("towers").number == 2
        refresh()  # What failed is not tried again.
        text = server.metrics.render().decode()
        for line in ('sluice_model_loads_total{model="towers",result="failed"} 1.0',
                     'sluice_model_loads_total{model="towers",result="served"} 2.0',
                     'sluice_model_version{model="towers"} 2.0'):  # fmt: skip
            assert line in text
        assert roll_back(towers, 1) == [2, 3]
        refresh()  # What was withdrawn answers no longer; the version before it does.
        assert server.store.get("towers").number == 1
        assert 'sluice_model_version{model="towers"} 1.0' in server.metrics.render().decode()
        with pytest.raises(RequestError):
            server.store.get("towers", "2")


def test_model_and_index_are_one_pair(models, tmp_path) -> None:
    version = tmp_path / "models" / "towers" / "1"
    shutil.copytree(models / "towers" / "1", version)
    shutil.rmtree(version / "index")
    with serve(tmp_path / "models") as (server, client):

        def ask(**more) -> dict:
            asked = {"user": 1003, "k": 40, "seen": True, **more}
            return client.post("/v1/recommend", json=asked).json()

        bare = ask()
        assert "error" in ask(filter={"kind": "a"})
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
        for rows, error in (
            ("movie_id,genres\n901,x\n901,x\n", InputDataError), ("", InputDataError),
            ("movie_id,genres\n,x\n", InputDataError), ("movie_id,title\n901,x\n", ConfigError),
        ):  # fmt: skip
            news.write_text(rows)
            with pytest.raises(error):
                add_items(version, news)
        _check_bad_indexes(server, client, version)
        assert 'sluice_index_version{model="towers"} 2.0' in client.get("/metrics").text


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
    third = version / "index" / "3"
    shutil.copytree(version / "index" / "2", third)
    near, card = (third / "near.faiss").read_bytes(), (third / "index.json").read_text()
    other = {**json.loads(card), "export": {"fingerprint": "0" * 64}}
    for content, about in (
        (near[:-9], card), (near[:-9] + bytes(9), card), (near, json.dumps(other))
    ):  # fmt: skip
        (third / "near.faiss").write_bytes(content)
        (third / "index.json").write_text(about)
        server.store.refresh()
        assert client.get("/healthz").json()["indexes"]["towers"] == 2
    assert client.post("/v1/recommend", json={"user": 1003}).status_code == 200
    with pytest.raises(UpstreamNotReadyError, match="made of another model than"):
        Server(ServerConfig(version.parents[1], 60.0))
    with pytest.raises(InputDataError, match="made of another model than"):
        add_items(version, version / "users.parquet")


def test_keys_and_texts_of_csv_stay_as_they_are_written(tmp_path) -> None:
    path = tmp_path / "items.csv"
    path.write_text("sku,year,code\n007,1999,01\nNA,,\n")
    table = read_table(path)
    assert table.to_pydict() == {"sku": ["007", "NA"], "year": [1999, None], "code": ["01", None]}
    of_texts = align_columns(table, pa.array(["7", "NA", "007"]))
    assert of_texts["year"].to_pylist() == [None, None, 1999]


def test_nothing_to_serve_is_said(models, tmp_path) -> None:
    assert "no version of any model" in refuse(tmp_path)
    with pytest.raises(ConfigError, match="no exported ranking model"):
        Server(ServerConfig(models, 60.0, recommend=RecommendConfig(ranker="towers")))


def refuse(models: Path, *, verify: bool = True) -> str:
    """Why no model of a directory is served."""
    with pytest.raises(UpstreamNotReadyError, match="no exported model") as caught:
        Server(ServerConfig(models, 60.0, verify=verify))
    return str(caught.value.received)


def copy_changed(version: Path, target: Path, file: str, position: int) -> None:
    """Copies a version with another bit in a file."""
    shutil.copytree(version, target, ignore=shutil.ignore_patterns("index"))
    content = bytearray((target / file).read_bytes())
    content[position] ^= 1
    (target / file).write_bytes(content)


@pytest.mark.parametrize(
    "file", ["users.parquet", "embeddings/items.parquet", "variables/variables.data-00000-of-00001"]
)
def test_a_version_with_a_changed_bit_is_not_served(models, tmp_path, file) -> None:
    copy_changed(models / "towers" / "1", tmp_path / "towers" / "1", file, -20)
    assert f"{file}: SHA-256" in refuse(tmp_path)


def test_files_that_the_card_does_not_list_are_not_used(models, tmp_path) -> None:
    version = tmp_path / "models" / "scores" / "1"
    shutil.copytree(models / "scores" / "1", version)
    card = json.loads((version / "export.json").read_text())
    unlisted = ("users.parquet", "items.parquet", WARMUP_FILE)
    files = {name: info for name, info in card["files"].items() if name not in unlisted}
    write_json(version / "export.json", seal_card({**card, "files": files, "users": None}))
    (version / "embeddings").mkdir()
    vectors = models / "towers" / "1" / "embeddings" / "items.parquet"
    shutil.copy(vectors, version / "embeddings")
    (version / "variables" / "more").write_text("x")
    served = ServedVersion(version)
    assert (served.known, served.warm_up()) == (None, 0)


def test_a_card_with_a_change_is_not_served(models, tmp_path) -> None:
    version = tmp_path / "models" / "scores" / "1"
    shutil.copytree(models / "scores" / "1", version)
    text = (version / "export.json").read_text()
    for before, after in (
        ('"per": "candidate"', '"per": "candidat%"'),
        (f'"pad_token": {PAD}', f'"pad_token": {PAD + 1}'),
        ('"sha256": "', '"sha256": "0'),
        ('"rows": ', '"rows": 1'),
    ):
        assert before in text
        (version / "export.json").write_text(text.replace(before, after, 1))
        assert "is not that of its fingerprint" in refuse(tmp_path / "models")


def test_without_verification_sizes_alone_are_compared(models, tmp_path) -> None:
    target = tmp_path / "towers" / "1"
    # The letters by which Parquet is known.
    copy_changed(models / "towers" / "1", target, "users.parquet", -1)
    assert "SHA-256" not in refuse(tmp_path, verify=False)

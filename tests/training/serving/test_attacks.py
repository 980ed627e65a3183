"""Requests that ask for far more than they say, and bad input: refused, and the server goes on."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import shutil
import threading
import weakref
from dataclasses import replace
from typing import Any

import pytest
import tensorflow as tf
from starlette.requests import ClientDisconnect
from starlette.testclient import TestClient

from tests.browser import wait_for
from tests.training.serving.tiny_models import PAD, ROW
from training.serving.app import build_app
from training.serving.models.batching import AT_ONCE_BYTES
from training.serving.models.server_config import ServerConfig
from training.serving.requests.errors import MESSAGE_CHARACTERS, RequestError
from training.serving.server import Server

PREDICT, RECOMMEND = "/v1/models/scores:predict", "/v1/recommend"
TOP_K = {"signature_name": "top_k", "inputs": {
    **{name: [ROW[name]] * 4 for name in ("user_id", "gender", "history")},
    "exclude": [[PAD]] * 4, "k": [10**6] * 4}}  # fmt: skip


def score(rows: int, candidates: int) -> dict:
    """A request for the scores of candidates."""
    row = {"user_id": 1003, "gender": "F", "history": [101, 105, PAD], "items": [1] * candidates}
    return {"signature_name": "score_items", "instances": [row] * rows}


def refuse(client, path: str, body: Any) -> tuple[int, str]:
    """The status and message of a request that is refused; a whole one is answered after it."""
    content = body if isinstance(body, (str, bytes)) else json.dumps(body)
    answer = client.post(path, content=content)
    said = answer.json()["error"]
    assert len(said) <= MESSAGE_CHARACTERS
    assert client.post(PREDICT, json={"instances": [ROW]}).status_code == 200
    return answer.status_code, said


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        (RECOMMEND, {"user": 1003, "exclude": [None] * 30_000}, 400, "exclude"),
        (RECOMMEND, {"user": 1003, "exclude": [[]] * 9_000}, 400, "exclude"),
        (RECOMMEND, {"user": 1003, **{f"key{n}": n for n in range(9_000)}}, 400, "key0"),
        (RECOMMEND, {"user": 1003, "filter": {"kind": ["a"] * 20_000}}, 400, "filter"),
        (RECOMMEND, {"user": 1003, "filter": {f"c{n}": 1 for n in range(5000)}}, 400, "filter"),
        (RECOMMEND, {"user": 1003, "filter": {"kind": [None] * 900}}, 400, "filter"),
        (RECOMMEND, {"features": {f"f{n}": 1 for n in range(9_000)}}, 400, "f0"),
        (RECOMMEND, {"user": "x" * 150_000}, 400, "1024"),
        (RECOMMEND, {"user": "\ud800"}, 400, "user"),
        (RECOMMEND, {"user": {"a": [1] * 20_000}}, 400, "user"),
        (RECOMMEND, {"user": 1003, "k": 10**300}, 400, "k"),
        (RECOMMEND, {"user": 1003, "k": float("nan")}, 400, "k"),
        (RECOMMEND, {"user": 1003, "seen": "x" * 100_000}, 400, "seen"),
        (PREDICT, score(1, 25_000), 400, "20000 candidates"),
        (PREDICT, score(50, 500), 400, "20000 candidates"),
        ("/v1/models/towers:predict", TOP_K, 400, "items of lists"),
        (PREDICT, {"instances": [0] * 60_000}, 400, "64 rows"),
        (PREDICT, {"inputs": {"user_id": [1] * 60_000}}, 400, "64 rows"),
        (PREDICT, {"inputs": {str(n): 1 for n in range(9000)}}, 400, "unknown"),
        (PREDICT, {"instances": [{**ROW, "gender": "x" * 70_000}]}, 400, "65536 bytes"),
        (PREDICT, {"instances": [{**ROW, "gender": "x" * 200_001}]}, 413, "200000 bytes"),
        (PREDICT, b'{"instances": ' + b"[" * 90_000, 400, "32 lists"),
        (PREDICT, {"instances": [{**ROW, "user_id": 2**64}]}, 400, "user_id"),
        (PREDICT, b'{"instances": [' + b"9" * 100_000 + b"]}", 400, "JSON"),
        (PREDICT, b'{"instances": [{"user_id": 1, "user_id": 2}]}', 400, "twice"),
        (PREDICT, b'{"instances": ["\xff"]}', 400, "JSON"),
        (PREDICT, json.dumps({"instances": [ROW]}).encode("utf-16"), 400, "JSON"),
        (PREDICT, {"instances": [{**ROW, "gender": "a\udc00"}]}, 400, "half of a character"),
        (PREDICT, {"signature_name": ["x" * 1000] * 150, "instances": [{}]}, 400, "signature_name"),
        ("/v1/models/scores:" + "x" * 9000, {}, 400, "Malformed request"),
        ("/v1/models/scores/versions/" + "9" * 9000 + ":predict", {}, 400, "Malformed request"),
    ],
)  # fmt: skip
def test_what_multiplies_and_what_is_broken_is_refused(client, path, body, status, said) -> None:
    found, message = refuse(client, path, body)
    assert (found, said in message) == (status, True), message


def test_text_that_is_not_utf_8_is_an_unknown_value(client) -> None:
    def ask(gender: bytes) -> dict:
        value = tf.train.Feature(bytes_list=tf.train.BytesList(value=[gender]))
        example = tf.train.Example(features=tf.train.Features(feature={"gender": value}))
        text = {"b64": base64.b64encode(example.SerializeToString()).decode()}
        answer = client.post(PREDICT, json={"signature_name": "examples", "instances": [text]})
        assert answer.status_code == 200, answer.text
        return answer.json()["predictions"]

    assert ask(b"\xff\xfe\x00") == ask(b"nobody")


@pytest.mark.parametrize("broken", [b"\xff\xff", b"\x0a\xff\xff\xff\xff", b"a." * 65_000])
def test_broken_examples_are_refused_in_few_words(client, broken) -> None:
    """What TensorFlow says of one quotes all of it."""
    text = {"b64": base64.b64encode(broken).decode()}
    status, said = refuse(client, PREDICT, {"signature_name": "examples", "instances": [text]})
    assert (status, "parse" in said.lower(), "Graph execution" in said) == (400, True, False)


@pytest.mark.parametrize(
    ("kind", "status"), [(tf.errors.InvalidArgumentError, 400), (OSError, 500)]
)
def test_errors_name_no_folder_of_the_server(client, server, monkeypatch, kind, status) -> None:
    said = f"cannot read /srv/secret/1/vocabulary.txt: {'ü' * 3000}"

    def fail(*_: Any) -> None:
        raise kind(None, None, said) if status == 400 else kind(2, "no such file", said)

    monkeypatch.setattr(server.store.get("scores")._model, "call", fail)
    answer = client.post(PREDICT, json={"instances": [ROW]})
    assert answer.status_code == status
    assert "secret" not in answer.text
    assert len(answer.json()["error"]) <= MESSAGE_CHARACTERS


def test_a_refused_request_is_let_go_without_a_collection(client, monkeypatch) -> None:
    class Body(dict):
        """Can be watched, unlike a dict."""

    watched = []
    bodies = (
        (RECOMMEND, {"user": 1003, "exclude": [None] * 100}),
        (PREDICT, {"instances": [0] * 100}),
        (PREDICT, {"inputs": {"colour": [1]}}),
        (PREDICT, score(1, 20_001)),
    )

    def watch(body: bytes, values: int) -> dict:
        found = Body(json.loads(body))
        watched.append(weakref.ref(found))
        return found

    monkeypatch.setattr("training.serving.server.parse_json", watch)
    monkeypatch.setattr("training.serving.lists.recommend.parse_json", watch)
    gc.collect()
    gc.disable()
    try:
        for path, body in bodies:
            assert client.post(path, json=body).status_code == 400
        assert len(watched) == len(bodies)
        # A thread that built inputs may still be on its way out of the call.
        wait_for(lambda: all(one() is None for one in watched))
    finally:
        gc.enable()


@pytest.mark.parametrize("path", [PREDICT, RECOMMEND])
def test_an_answer_has_its_time_from_the_body_on(client, server, monkeypatch, path) -> None:
    async def never(*_: Any) -> bytes:
        await asyncio.sleep(60)
        return b""

    monkeypatch.setattr(server.batcher, "answer", never)
    monkeypatch.setattr(server, "limits", replace(server.limits, seconds=0.5))
    answer = client.post(path, json={})
    assert (answer.status_code, answer.json()["error"]) == (504, "not answered within 0.5 s")


def test_long_bodies_are_read_beside_the_event_loop(client, monkeypatch) -> None:
    threads = []

    def note(*_: Any) -> dict:
        threads.append(threading.current_thread().name.partition("_")[0])
        raise RequestError("read")

    monkeypatch.setattr("training.serving.server.parse_json", note)
    for size in (1, AT_ONCE_BYTES + 1):
        assert client.post(PREDICT, content=b" " * size).json()["error"] == "read"
    assert threads[1] == "model" != threads[0]


@pytest.mark.parametrize("user", [2**63, -(2**63) - 1, 10**30])
def test_a_user_beyond_64_bits_is_unknown(client, user) -> None:
    by_get = client.get(RECOMMEND, params={"user": str(user), "k": 3}).json()
    found = client.post(RECOMMEND, json={"user": user, "k": 3})
    assert found.status_code == 200, found.text
    assert (found.json()["user"], found.json()["known"]) == (user, False)
    cold = client.post(RECOMMEND, json={"user": "nobody", "k": 3}).json()
    assert found.json()["items"] == by_get["items"] == cold["items"]


def test_a_client_that_leaves_is_no_error(client, server, caplog, monkeypatch) -> None:
    async def leave(*_: Any) -> bytes:
        raise ClientDisconnect

    monkeypatch.setattr("training.serving.app.read_body", leave)
    assert client.post(PREDICT, json={}).status_code == 499
    assert [one for one in caplog.records if one.name.startswith("sluice")] == []
    assert 'method="predict",status="499"' in server.metrics.render().decode()


def test_a_folder_that_vanishes_and_a_second_server_change_nothing(models, tmp_path) -> None:
    for name in ("towers", "scores"):
        shutil.copytree(models / name, tmp_path / "models" / name)
    first, second = (Server(ServerConfig(tmp_path / "models", 60.0)) for _ in range(2))
    with TestClient(build_app(first), "http://localhost") as client:

        def ask() -> list:
            assert client.get("/healthz").json()["models"] == {"scores": 1, "towers": 1}
            return [client.post(RECOMMEND, json={"user": 1003, "k": 3}).json()["items"],
                    client.get("/v1/models/towers/metadata").json()["model_spec"]]  # fmt: skip

        before = ask()
        second.close()
        shutil.rmtree(tmp_path / "models" / "towers")
        first.store.refresh()
        assert ask() == before
        state = client.get("/v1/models/towers").json()["model_version_status"]
        assert [one["state"] for one in state] == ["AVAILABLE"]

"""Requests that ask for far more than they say, and bad input: refused, and the server goes on."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import shutil
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from starlette.requests import ClientDisconnect
from starlette.testclient import TestClient

from tests.browser import wait_for
from tests.training.serving.tiny_models import PAD, ROW
from training.serving.access import ERROR_BYTES
from training.serving.app import build_app
from training.serving.models.server_config import ServerConfig
from training.serving.requests.errors import SEARCHED_CHARACTERS, RequestError, hide_folders
from training.serving.server import Server

PREDICT, RECOMMEND = "/v1/models/scores:predict", "/v1/recommend"
SCORED = {"user_id": 1003, "gender": "F", "history": [101, 105, PAD], "items": [107, 101]}


def score(rows: int, candidates: int) -> dict:
    """A request for the scores of candidates."""
    row = {**SCORED, "items": [1] * candidates}
    return {"signature_name": "score_items", "instances": [row] * rows}


def count_lines(call: Callable[[], Any]) -> tuple[Any, int]:
    """What a call returns, and how many lines of Python it took in this thread."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        count += 1
        return trace

    sys.settrace(trace)
    try:
        return call(), count
    finally:
        sys.settrace(None)


def refuse(client, path: str, body: Any) -> tuple[int, str]:
    """The status and message of a request that is refused; a whole one is answered after it."""
    content = body if isinstance(body, (str, bytes)) else json.dumps(body)
    answer = client.post(path, content=content)
    assert len(answer.content) <= ERROR_BYTES
    assert client.post(PREDICT, json={"instances": [ROW]}).status_code == 200
    return answer.status_code, answer.json()["error"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"user": 1003, "exclude": [None] * 30_000}, "exclude: must be text or a whole number"),
        ({"user": 1003, "exclude": [[]] * 9_000}, "exclude: must be text or a whole number"),
        ({"user": 1003, **{f"key{n}": n for n in range(9_000)}}, "key0: unknown"),
        ({"user": 1003, "filter": {"kind": ["a"] * 20_000}}, "may have 1000 values"),
        ({"user": 1003, "filter": {f"c{n}": 1 for n in range(5000)}}, "filter: "),
        ({"user": 1003, "filter": {f"c{n}": 1 for n in range(9)}}, "unknown columns ['c0']"),
        ({"user": 1003, "filter": {"kind": [None] * 900}}, "filter: must be text"),
        ({"features": {f"f{n}": 1 for n in range(9_000)}}, "unknown features ['f0']"),
        ({"user": "x" * 150_000}, "a key may have 1024 bytes; received 150000"),
        ({"user": "\ud800"}, "user: '\\ud800' holds half of a character"),
        ({"user": {"a": [1] * 20_000}}, "user: must be text or a whole number"),
        ({"user": 1003, "k": 10**300}, "k: "),
        ({"user": 1003, "k": float("nan")}, "k: "),
        ({"user": 1003, "seen": "x" * 100_000}, "seen: "),
    ],
)
def test_long_requests_for_lists_end_at_their_first_error(client, body, said) -> None:
    status, message = refuse(client, RECOMMEND, body)
    assert (status, said in message) == (400, True), message


def test_what_a_request_costs_does_not_grow_with_what_is_wrong_in_it() -> None:
    from training.serving.lists.row_inputs import parse_request

    def read(body: dict) -> int:
        def parse() -> None:
            with pytest.raises(RequestError):
                parse_request(body)

        return count_lines(parse)[1]

    for build in (
        lambda count: {"exclude": [None] * count},
        lambda count: {f"key{n}": 1 for n in range(count)},
        lambda count: {"filter": {"a": ["x"] * (20 * count)}},
        lambda count: {"filter": {str(n): 1 for n in range(5 * count)}},
    ):
        assert read(build(10_000)) == read(build(100))


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        (PREDICT, score(1, 25_000), 400, "20000 candidates, of all rows; received 25000"),
        (PREDICT, score(50, 500), 400, "candidates, of all rows; received 25000"),
        ("/v1/models/towers:predict", {"signature_name": "top_k", "inputs": {
            **{name: [ROW[name]] * 4 for name in ("user_id", "gender", "history")},
            "exclude": [[PAD]] * 4, "k": [10**6] * 4}}, 400, "items of lists; received 4000000"),
        (PREDICT, {"instances": [0] * 60_000}, 400, "64 rows; received 60000"),
        (PREDICT, {"inputs": {"user_id": [1] * 60_000}}, 400, "64 rows; received 60000"),
        (PREDICT, {"inputs": {str(n): 1 for n in range(9000)}}, 400, "unknown: 0"),
        (PREDICT, {"instances": [{**ROW, "gender": "x" * 70_000}]}, 400, "may have 65536 bytes"),
        (PREDICT, b'{"instances": ' + b"[" * 90_000, 400, "nested 32 deep"),
        (PREDICT, {"instances": [{**ROW, "user_id": 2**64}]}, 400, "must be whole numbers"),
        (PREDICT, b'{"instances": [' + b"9" * 100_000 + b"]}", 400, "JSON Parse error"),
        (PREDICT, b'{"instances": [{"user_id": 1, "user_id": 2}]}', 400, "'user_id' stands twice"),
        (PREDICT, b'{"instances": ["\xff"]}', 400, "JSON Parse error: 'utf-8'"),
        (PREDICT, json.dumps({"instances": [ROW]}).encode("utf-16"), 400, "JSON Parse error"),
        (PREDICT, {"instances": [{**ROW, "gender": "a\udc00"}]}, 400, "holds half of a character"),
        ("/v1/models/scores:" + "x" * 9000, {}, 400, "Malformed request"),
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
    for broken in (b"\xff\xff", b"\x0a\xff\xff\xff\xff"):
        text = {"b64": base64.b64encode(broken).decode()}
        status, said = refuse(client, PREDICT, {"signature_name": "examples", "instances": [text]})
        assert status == 400
        assert "parse" in said.lower(), said
        assert "Graph execution error" not in said


@pytest.mark.parametrize("text", [b"a." * 65_000, b"\xff." * 65_000, b"/a" * 65_000])
def test_a_broken_example_is_cut_before_it_is_searched(client, text) -> None:
    """What TensorFlow says of it quotes all of it."""
    assert len(hide_folders(text.decode("latin-1"))) <= SEARCHED_CHARACTERS
    asked = {"signature_name": "examples",
             "instances": [{"b64": base64.b64encode(text).decode()}]}  # fmt: skip
    status, said = refuse(client, PREDICT, asked)
    assert (status, "parse" in said.lower()) == (400, True), said


def test_a_filter_is_looked_up_in_one_pass(server) -> None:
    known = server.store.get("towers").known
    columns = known.columns
    wanted = {"kind": ["a", *(f"x{n}" for n in range(999))], "title": ["Film 2", "Film 4", 7, 1.5]}
    assert {known.keys[n] for n in np.flatnonzero(columns.find(wanted))} == {102, 104}
    one, lines = count_lines(lambda: columns.find({"title": ["Film 2"]}))
    assert [known.keys[n] for n in np.flatnonzero(one)] == [102]
    assert not columns.find({"title": ["\ud800"]}).any()
    assert not columns.find({"title": [2**70]}).any()
    assert lines < 100


def test_a_refused_request_is_let_go_without_a_collection(client) -> None:
    class Body(dict):
        """Can be watched, unlike a dict."""

    watched = []
    bodies = (
        ("/v1/recommend", {"user": 1003, "exclude": [None] * 100}),
        ("/v1/recommend", {"user": 1003, "k": 0}),
        (PREDICT, {"instances": [0] * 100}),
        (PREDICT, {"inputs": {"colour": [1]}}),
        (PREDICT, score(1, 20_001)),
        (PREDICT, {"instances": [{**ROW, "history": [[1]]}]}),
    )

    def watch(body: bytes, values: int) -> dict:
        found = Body(json.loads(body))
        watched.append(weakref.ref(found))
        return found

    gc.collect()
    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            for module in ("server", "lists.recommend"):
                patch.setattr(f"training.serving.{module}.parse_json", watch)
            for path, body in bodies:
                assert client.post(path, json=body).status_code == 400
        assert len(watched) == len(bodies)
        # A thread that built inputs may still be on its way out of the call.
        wait_for(lambda: all(one() is None for one in watched))
    finally:
        gc.enable()


def test_limits_are_shown(client, server) -> None:
    found = client.get("/v1/limits").json()
    assert (found["rows"], found["candidates"], found["body_bytes"]) == (64, 20_000, 200_000)
    assert found["recommend_filter_values"] == 1000
    for path in ("/docs", "/redoc", "/openapi.json"):
        assert client.get(path).status_code == 404


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (PREDICT, {"instances": [ROW]}),
        (RECOMMEND, {"user": 1003}),
    ],
)
def test_an_answer_has_its_time_from_the_body_on(client, server, monkeypatch, path, body) -> None:
    timeout, timers, begun = asyncio.timeout, [], []

    def note(seconds: float | None) -> asyncio.Timeout:
        timers.append(timeout(seconds))
        return timers[-1]

    async def never(*_: Any) -> None:
        begun.append(asyncio.get_running_loop().time())
        await asyncio.sleep(60)

    monkeypatch.setattr(asyncio, "timeout", note)
    monkeypatch.setattr(server.batcher, "answer", never)
    monkeypatch.setattr(server, "limits", replace(server.limits, seconds=1.0))
    answer = client.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]) == (504, "not answered within 1 s")
    # Once, not once for the body and once more.
    assert 0.0 < max(timer.when() for timer in timers) - begun[0] <= 1.0


@pytest.mark.parametrize("name", [["x" * 1000] * 150, {"a": 1}, 3])
def test_a_name_that_is_no_text_is_not_written_out(client, name) -> None:
    asked = {"signature_name": name, "instances": [{}]}
    status, said = refuse(client, PREDICT, asked)
    assert (status, said.startswith("'signature_name' must be a string; received")) == (400, True)


@pytest.mark.parametrize("user", [2**63, -(2**63) - 1, 10**30])
def test_a_user_beyond_64_bits_is_unknown(client, user) -> None:
    by_get = client.get(RECOMMEND, params={"user": str(user), "k": 3}).json()
    found = client.post(RECOMMEND, json={"user": user, "k": 3})
    assert found.status_code == 200, found.text
    assert (found.json()["user"], found.json()["known"]) == (user, False)
    cold = client.post(RECOMMEND, json={"user": "nobody", "k": 3}).json()
    assert found.json()["items"] == by_get["items"] == cold["items"]


def test_a_client_that_leaves_is_no_error(client, server, caplog, monkeypatch) -> None:
    async def leave(request, server, time_left) -> None:
        raise ClientDisconnect

    monkeypatch.setattr("training.serving.app._read_request", leave)
    assert client.post(PREDICT, json={}).status_code == 499
    assert [one for one in caplog.records if one.name.startswith("sluice")] == []
    assert 'method="predict",status="499"' in server.metrics.render().decode()


def test_a_folder_that_vanishes_and_a_second_server_change_nothing(models, tmp_path) -> None:
    for name in ("towers", "scores"):
        shutil.copytree(models / name, tmp_path / "models" / name)
    first, second = (Server(ServerConfig(tmp_path / "models", 60.0)) for _ in range(2))
    with TestClient(build_app(first), "http://localhost") as client:

        def ask() -> list:
            found = [client.post(RECOMMEND, json={"user": 1003, "k": 3}).json()["items"],
                     client.get("/v1/models/towers/metadata").json()["model_spec"]]  # fmt: skip
            assert client.get("/healthz").json()["models"] == {"scores": 1, "towers": 1}
            return found

        before = ask()
        second.close()
        assert ask() == before
        shutil.rmtree(tmp_path / "models" / "towers")
        first.store.refresh()
        assert ask() == before
        state = client.get("/v1/models/towers").json()["model_version_status"]
        assert [one["state"] for one in state] == ["AVAILABLE"]

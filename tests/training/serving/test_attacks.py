"""What a request may cost; requests that ask for far more than they say, and bad input."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import shutil
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from starlette.requests import ClientDisconnect

from tests.browser import wait_for
from tests.machine import growth
from tests.training.serving.tiny_models import PAD, ROW, serve, write_example
from training.serving.errors import MESSAGE_CHARACTERS, RequestError, hide_folders
from training.serving.limits import NESTING, Cost, RequestLimits, SignatureCost, check_json

PREDICT, RECOMMEND, NAMED = "/v1/models/scores:predict", "/v1/recommend", "/v1/models/%s"
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
    [said] = answer.json().values()
    assert len(said) <= MESSAGE_CHARACTERS
    assert client.post(PREDICT, json={"instances": [ROW]}).status_code == 200
    return answer.status_code, said


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        (RECOMMEND, {}, 400, "needs 'user', 'features', or both"),
        (RECOMMEND, {"user": True}, 400, "user"),
        (RECOMMEND, {"features": {"user_id": 1003}}, 400, "user_id names the user"),
        (RECOMMEND, {"user": 1003, "k": "5"}, 400, "k: "),
        (RECOMMEND, {"user": 1003, "features": []}, 400, "features"),
        (RECOMMEND, {"user": 1003, "filter": {"colour": 1}}, 400, "unknown columns ['colour']"),
        (RECOMMEND, {"features": {"history": "x"}}, 400, "input history"),
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
        (NAMED % "none:predict", {"instances": [1]}, 404, "not found for request: Latest(none)"),
        (NAMED % "towers/versions/9:predict", {"instances": [1]}, 404, "Specific(towers, 9)"),
        (NAMED % "towers/labels/stable:predict", {"instances": [1]}, 400, "label: stable"),
        (NAMED % "scores:classify", {"examples": [{}]}, 400, "POST /v1/models/scores:classify"),
        (PREDICT, {"signature_name": "no", "instances": [ROW]}, 400, '"no" not found in signature'),
        (PREDICT, "[]", 400, "must be a JSON object"),
        (PREDICT, {"instances": [ROW], "inputs": {}}, 400, "and not both"),
        (PREDICT, {"instances": []}, 400, "at least one row"),
        (PREDICT, {"instances": [ROW, 7]}, 400, "instance 1 is no object"),
        (PREDICT, {"instances": [{**ROW, "extra": 1}]}, 400, "unknown: extra"),
        (PREDICT, {"instances": [{**ROW, "history": 7}]}, 400, "input history must be a list"),
        (PREDICT, {"instances": [{**ROW, "gender": {"b64": "?"}}]}, 400, "b64 does not decode"),
        (PREDICT, {"instances": [ROW, {**ROW, "history": [1]}]}, 400, "one length"),
        (PREDICT, score(1, 25_000), 400, "20000 candidates"),
        (PREDICT, score(50, 500), 400, "20000 candidates"),
        (NAMED % "towers:predict", TOP_K, 400, "items of lists"),
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
        (NAMED % f"scores:{'x' * 9000}", {}, 400, "Malformed request"),
        (NAMED % f"scores/versions/{'9' * 9000}:predict", {}, 400, "Malformed request"),
    ],
)  # fmt: skip
def test_what_multiplies_and_what_is_broken_is_refused(client, path, body, status, said) -> None:
    found, message = refuse(client, path, body)
    assert (found, said in message) == (status, True), message


def test_text_that_is_not_utf_8_is_an_unknown_value(client) -> None:
    def ask(gender: bytes) -> dict:
        asked = {"signature_name": "examples", "instances": [write_example(gender=gender)]}
        answer = client.post(PREDICT, json=asked)
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
    monkeypatch.setattr("training.serving.recommend.parse_json", watch)
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


@pytest.mark.parametrize("user", [2**63, -(2**63) - 1, 10**30])
def test_a_user_beyond_64_bits_is_unknown(client, user) -> None:
    by_get = client.get(RECOMMEND, params={"user": str(user), "k": 3}).json()
    found = client.post(RECOMMEND, json={"user": user, "k": 3})
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
    with serve(tmp_path / "models") as (first, client):

        def ask() -> list:
            assert client.get("/healthz").json()["models"] == {"scores": 1, "towers": 1}
            return [client.post(RECOMMEND, json={"user": 1003, "k": 3}).json()["items"],
                    client.get("/v1/models/towers/metadata").json()["model_spec"]]  # fmt: skip

        before = ask()
        with serve(tmp_path / "models"):
            pass
        shutil.rmtree(tmp_path / "models" / "towers")
        first.store.refresh()
        assert ask() == before
        state = client.get("/v1/models/towers").json()["model_version_status"]
        assert [one["state"] for one in state] == ["AVAILABLE"]


LIMITS = RequestLimits(rows=8, pairs=100, values=1000, text_bytes=20)
PAIRED = SignatureCost(candidates=("items",))
LISTS = SignatureCost(length="k", catalogue=1 << 24)
SERIALIZED = SignatureCost(examples=("examples",))


def ones(*shape: int) -> np.ndarray:
    return np.broadcast_to(np.int8(1), shape)


def texts(*values: bytes) -> np.ndarray:
    return np.array(values, object)


def nest(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


def test_texts_are_neither_nesting_nor_values() -> None:
    texts = {"a": ["[" * 500, '"' * 40, "\\" * 41, '\\"[' * 40, ",:{" * 900]}
    for body in (nest(NESTING), json.dumps(texts).encode(), b"", b'"', b'"\\'):
        check_json(body, 100)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (nest(NESTING + 1), "inside each other; received 33"),
        (b'{"]]]]": ' * 33 + b"1" + b"}" * 33, "32 lists and objects inside"),
        (b'["\\\\", ' * 33 + b"]" * 33, "32 lists and objects inside"),
        (nest(NESTING) + b"," + nest(NESTING + 1), "32 lists and objects inside"),
        (b"[" + b"1," * 200 + b"1]", "may have (100 values|200 quotes)"),
        (b"[" + b"[]," * 90 + b"[]]", "may have (100 values|200 quotes)"),
        (b"{" + b'"a":1,' * 90 + b"}", "may have (100 values|200 quotes)"),
        (b"[" + b'""' * 300 + b"]", "may have (100 values|200 quotes)"),
    ],
)
def test_bodies_that_are_much_work_are_refused_before_they_are_parsed(body, said) -> None:
    with pytest.raises(RequestError, match=said):
        check_json(body, 100)


@pytest.mark.parametrize(
    ("cost", "inputs", "said"),
    [
        (PAIRED, {"user": ones(9), "items": ones(9, 1)}, "8 rows; received 9"),
        (PAIRED, {"user": ones(1), "items": ones(1, 101)}, "all rows; received 101"),
        (PAIRED, {"user": ones(4), "items": ones(4, 26)}, "all rows; received 104"),
        (PAIRED, {"history": ones(1, 10**12), "items": ones(1, 1)}, "received 1000000000001"),
        (SignatureCost(candidates=("genres",)), {"genres": ones(2, 50, 11)}, "received 1100"),
        (LISTS, {"user": ones(5), "k": ones(5)}, "4 rows, as each is compared with 16777216 items"),
        (LISTS, {"user": ones(3), "k": np.array([5, 40, 1])}, "items of lists; received 120"),
        (PAIRED, {"user": texts(b"x" * 21)}, "20 bytes in a text, as of input user; received 21"),
        (SERIALIZED, {"examples": texts(*[b""] * 7, b"x" * 6400)}, "received 1600"),
    ],
)
def test_inputs_are_measured_before_tensors_are_filled(cost, inputs, said) -> None:
    with pytest.raises(RequestError, match=said):
        cost.measure(inputs, LIMITS)


def test_requests_share_a_call_only_within_the_limits_of_one() -> None:
    one = Cost(rows=1, pairs=60, width=70)
    assert PAIRED.can_share(one, LIMITS)
    assert not PAIRED.can_share(one.join(one), LIMITS)
    wide, narrow = Cost(1, 0, 400), Cost(2, 0, 1)
    assert wide.join(narrow) == Cost(3, 0, 400)
    assert not SERIALIZED.can_share(wide.join(narrow), LIMITS)
    assert not LISTS.can_share(Cost(5, 0, 1), LIMITS)
    assert LISTS.measure({"k": np.array([50, 2])}, LIMITS) == Cost(2, 0, 1)
    long = SERIALIZED.measure({"examples": texts(b"", b"x" * 6400)}, LIMITS)
    assert (long.rows, long.values) == (2, 400)  # All rows are padded to the longest.


def test_errors_are_short_and_name_no_folders() -> None:
    assert len(RequestError("x" * 10**6).message) == MESSAGE_CHARACTERS
    for text, shown in (
        ("cannot open /srv/models/demo/1/saved_model.pb: gone", "cannot open saved_model.pb: gone"),
        ("s3://bucket/models/demo/1/variables failed", "variables failed"),
        ("'/a/b c/d.txt' and (/x/y/z), 1/2 of and/or", "'b c/d.txt' and (z), 1/2 of and/or"),
    ):
        assert hide_folders(text) == shown


@pytest.mark.parametrize("part", ["a.", "/a ", "file:/"])
def test_no_text_takes_long_to_be_searched_for_folders(part) -> None:
    assert growth(lambda count: lambda: hide_folders(part * count), 1 << 12, 1 << 16) < 40

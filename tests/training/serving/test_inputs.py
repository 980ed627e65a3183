"""What requests hold as inputs of signatures: tensors, Examples, rows of users; outputs as JSON."""

from __future__ import annotations

import base64
import json
import tracemalloc
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf

from tests.training.serving.tiny_models import write_example
from training.index.known_entities import KnownEntities, Users, _read_users
from training.raw_inputs.inputs import InputColumn
from training.raw_inputs.requests import RawValueError, build_array, read_names
from training.serving.errors import RequestError
from training.serving.limits import RequestLimits
from training.serving.recommend import find_allowed
from training.serving.row_inputs import ListModel, parse_request
from training.serving.tensors import check_examples, encode_json, format_predict, parse_predict

NULL = -(2**61)
HOUR = InputColumn("hour", "hour", "ts", "int64", False, None, None, None, NULL,
                   time_unit="ms", time_kind="event")  # fmt: skip
VIEWED = InputColumn("viewed", "viewed", "viewed", "string", True, None, 15, "<pad>", "<null>")
AGES = InputColumn("ages", "ages", "ages", "float32", True, None, 15, None, None, True)
HISTORY = InputColumn("history", "history", "history", "int64", True, None, 15, 0)
GENDER = InputColumn("gender", "gender", "gender", "string", False, None, None, None, "<null>")
INPUTS = (HOUR, VIEWED, AGES)
MS = 1_794_268_800_297
ROW = {"hour": MS, "viewed": ["a", "b"], "ages": [1.0, 2.0]}


def predict(
    rows: list[dict], inputs: tuple[InputColumn, ...] = INPUTS, limits: RequestLimits | None = None
) -> dict[str, np.ndarray]:
    names = read_names(item.to_json() for item in inputs)
    specs = {
        item.name: tf.TensorSpec([None, None] if item.is_list else [None], item.dtype)
        for item in inputs
    }
    return parse_predict({"instances": rows}, specs, names, limits)[0]


def write(*rows: dict[str, list[int]]) -> np.ndarray:
    return np.array([base64.b64decode(write_example(**row)["b64"]) for row in rows], object)


@pytest.mark.parametrize("value", [MS // 1000, MS * 1000, 14, 0])
def test_times_of_another_unit_are_refused_in_rows_and_examples(value) -> None:
    with pytest.raises(RawValueError, match="input hour holds"):
        predict([ROW, {**ROW, "hour": value}])
    with pytest.raises(RawValueError, match="input hour holds"):
        check_examples(write({"hour": [MS]}, {"hour": [value]}), [HOUR.to_json()])


def test_null_is_the_empty_list() -> None:
    rows = [{**ROW, "viewed": None, "ages": None}, ROW]
    assert predict(rows)["viewed"].tolist() == [[b"<pad>", b"<pad>"], [b"a", b"b"]]
    assert predict(rows)["ages"].tolist() == [[0.0, 0.0], [1.0, 2.0]]
    assert predict(rows[:1])["ages"].tolist() == [[0.0]]
    per_item = tf.TensorSpec([None, None, None], tf.string)
    found = build_array("viewed", [[["a", "b"], None]], per_item, VIEWED.to_json())
    assert found.tolist() == [[[b"a", b"b"], [b"<pad>", b"<pad>"]]]


def test_text_among_numbers_is_refused_before_it_takes_room() -> None:
    """An array of texts has the room of the longest one for each: 160 MB here."""
    values, spec = [["x" * 20_000, *[1] * 2000]], tf.TensorSpec([None, None], tf.int64)
    tracemalloc.start()
    try:
        with pytest.raises(RawValueError, match="must be whole numbers"):
            build_array("count", values, spec)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_padding_is_bounded_by_the_values_of_a_request() -> None:
    rows = [{"viewed": ["a"] * 90}, {"viewed": None}]
    with pytest.raises(RawValueError, match="more than 179 values"):
        predict(rows, (VIEWED,), RequestLimits(values=179))
    assert predict(rows, (VIEWED,), RequestLimits(values=180))["viewed"].shape == (2, 90)


def test_lists_of_examples_count_as_they_are_padded() -> None:
    rows = write({"history": [1] * 7, "seen": [1]}, {"history": [1], "seen": [1] * 5}, {})
    holds = [HISTORY.to_json(), replace(HISTORY, name="seen").to_json()]
    assert check_examples(rows, holds) == 12
    fixed = [replace(HISTORY, length=4).to_json(), GENDER.to_json()]
    assert check_examples(rows, fixed) == 0
    texts = [replace(HISTORY, dtype="string").to_json()]
    for broken in (rows, np.array([b"\xff"], object)):
        with pytest.raises(RequestError):
            check_examples(broken, texts)


def test_a_long_list_in_few_bytes_is_refused_before_a_call(client) -> None:
    rows = [write_example(history=[1] * 130_000), write_example(history=[1])]
    asked = {"signature_name": "examples", "instances": rows}
    answer = client.post("/v1/models/scores:predict", json=asked)
    assert (answer.status_code, "padded to the longest" in answer.json()["error"]) == (400, True)


def test_floats_are_read_back_to_the_bit_and_short() -> None:
    bits = np.random.default_rng(1).integers(0, 2**32, 20_000, dtype=np.uint32)
    drawn = bits.view(np.float32)  # Every exponent, both signs.
    bounds = np.array([0.0, -0.0, 0.1, 1.0, 1e-45, np.finfo(np.float32).max], np.float32)
    drawn = np.concatenate([bounds, drawn[np.isfinite(drawn)]])
    text = encode_json(format_predict({"scores": drawn[None]}, is_row=True))
    [found] = json.loads(text)["predictions"]
    np.testing.assert_array_equal(np.float32(found).view(np.int32), drawn.view(np.int32))
    body = format_predict({"scores": np.array([0.1, 1 / 3, 1.0], np.float32)}, is_row=False)
    assert encode_json(body) == b'{"outputs":[0.1,0.33333334,1.0]}'


@pytest.mark.parametrize("is_row", [True, False])
def test_outputs_of_all_types_and_shapes(is_row) -> None:
    outputs = {
        "score": np.array([0.5, 2.0], np.float32),
        "pairs": np.arange(12, dtype=np.int64).reshape(3, 2, 2).transpose(1, 0, 2),
        "none": np.zeros((2, 0), np.float32),
        "known": np.array([True, False]),
        "item": np.array(["Müller".encode(), b"\xff"], object),
        "raw_bytes": np.array([[b"a"], [b"b"]], object),
    }
    found = json.loads(encode_json(format_predict(outputs, is_row=is_row)))
    expected = {name: value.tolist() for name, value in outputs.items()}
    expected["item"] = ["Müller", {"b64": "/w=="}]
    expected["raw_bytes"] = [[{"b64": "YQ=="}], [{"b64": "Yg=="}]]
    rows = [{name: value[n] for name, value in expected.items()} for n in range(2)]
    assert found == ({"predictions": rows} if is_row else {"outputs": expected})


SIGNATURE = "user_embedding"
SHAPES = {False: [None], True: [None, None]}


def describe(name: str, dtype: str = "int64", **more: Any) -> dict[str, Any]:
    column = InputColumn(name, name, name, dtype, False, None, None, None)
    return {**column.to_json(), **more}


def build_model(inputs: list[dict[str, Any]], users: dict[str, Any] | None) -> ListModel:
    specs = {
        item["name"]: tf.TensorSpec(SHAPES[item["is_list"]], tf.as_dtype(item["dtype"]))
        for item in inputs
    }
    about = {"inputs": inputs}
    card = {"kind": "retrieval", "users": users, "signatures": {SIGNATURE: about}, "user": "user"}
    taken = SimpleNamespace(specs=specs)
    version: Any = SimpleNamespace(name="m", card=card, find_signature=lambda _: taken)
    return ListModel(version)


def test_numbers_of_a_request_may_be_whole_floats_and_long() -> None:
    found = parse_request({"user": 2**70, "k": 3.0, "filter": {"year": 1999.5, "kind": ["a", 2]}})
    assert (found.user, found.k) == (2**70, 3)
    assert found.filter == {"year": [1999.5], "kind": ["a", 2]}


MET = describe("history", is_list=True, is_required=True)
TIMES = describe("times", is_list=True, is_required=True)
USERS = {"key": "user", "features": ["user", "history", "times"], "histories": ["history"]}


def test_what_is_stored_is_replaced_with_all_that_stands_beside_it() -> None:
    model = build_model([MET, TIMES], {**USERS, "aligned": [["history", "times"]]})
    assert model.find_stored({}) == {"history", "times"}
    assert model.find_stored({"history": [1], "times": [2]}) == frozenset()
    with pytest.raises(RequestError, match="history came without times"):
        model.find_stored({"history": [1]})
    cross = [describe(name, feature="cross", column=f"own_{name}") for name in ("a", "b")]
    model = build_model(cross, {"key": "user", "features": ["cross"]})
    assert model.find_stored({}) == {"cross"}
    assert model.find_stored({"own_a": 1, "own_b": 2}) == frozenset()
    with pytest.raises(RequestError, match="cross is made of own_a, own_b; received own_a"):
        model.find_stored({"own_a": 1})


def read_raw(model: ListModel, user: Any, stored: Any = (), most: int = 100) -> dict[str, Any]:
    request = parse_request({"user": user})
    return model.read_raw(SIGNATURE, request, stored, most)


def test_the_place_of_what_is_stored_is_filled_with_what_is_not_read() -> None:
    """0 is no time of an event, and no list."""
    asked = describe("asked_at", is_required=True, time_unit="ms", time_kind="event")
    model = build_model([MET, asked], USERS)
    found = read_raw(model, 7, {"history", "asked_at"})
    assert found["asked_at"].tolist() == [0]
    assert found["history"].shape[0] == 1
    with pytest.raises(RawValueError, match="asked_at has no value for a missing one"):
        read_raw(model, 7, {"history"})


def test_users_that_are_not_stored_are_known_to_the_model() -> None:
    model = build_model([describe("user", null_token=-1)], None)
    wanted = {7: 7, "7": 7, "007": -1, "+7": -1, "7_0": -1, "x": -1, "²": -1, "--7": -1}
    for user, key in wanted.items():
        assert read_raw(model, user)["user"].tolist() == [key], user


def test_stored_bytes_are_read_as_they_are() -> None:
    model = build_model([describe("vector", "string")], {"key": "user", "features": ["vector"]})
    users = Users(pa.table({"key": [7], "feature:vector": [b"\x00\xff"]}), {"7": 0})
    model.version.known = SimpleNamespace(users=users)  # type: ignore[assignment]
    found = model.read_stored(SIGNATURE, 0, {"vector"})
    assert found["vector"].tolist() == [b"\x00\xff"]


def test_text_of_a_history_is_bounded_before_its_items_are_looked_up() -> None:
    """Nothing else has looked at the text by then."""
    text = " ".join(["1"] * RequestLimits.values)
    written = {"column": "history", "separator": " "}
    model = build_model([{**MET, "written": written}], USERS)
    assert model.read_histories({"history": [10.0, 20, None]}) == {"history": [10, 20]}
    assert len(model.read_histories({"history": text})["history"]) == RequestLimits.values
    with pytest.raises(RawValueError, match="more than 250,000 values"):
        model.read_histories({"history": f"{text} 1"})


@pytest.mark.parametrize("has_seen", [True, False])
def test_without_seen_items_the_stored_histories_are_left_out(tmp_path, has_seen) -> None:
    columns = {"key": [7], "feature:history": [[4]], **({"seen": [[3]]} if has_seen else {})}
    pa.parquet.write_table(pa.table(columns), tmp_path / "users.parquet")
    card = {"files": {"users.parquet": {}}, "users": {"histories": ["history"]}}
    users = _read_users(tmp_path, card)
    assert users is not None
    assert users.met == (("seen",) if has_seen else ("feature:history",))
    model = build_model([], {"key": "user", "features": []})
    known = KnownEntities(["x", "y"], np.array([3, 4]), np.ones(2, bool), users=users)
    model.version.known = known
    request = parse_request({"user": 7})
    assert find_allowed(model, request, {}).tolist() == [not has_seen, has_seen]

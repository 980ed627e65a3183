"""What a row is made of: what a request says, what is stored, what stands for neither."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf

from training.index.known_entities import KnownEntities, Users, _read_users
from training.raw_inputs.requests import RawValueError
from training.serving.lists.row_inputs import ListModel, parse_request
from training.serving.requests.errors import RequestError
from training.serving.requests.limits import RequestLimits

SIGNATURE = "user_embedding"
LONG: list[tuple[dict[str, Any], str]] = [
    ({"exclude": [None] * 30_000}, "exclude: must be text or a whole number"),
    ({"exclude": [1] * 10_001}, "exclude: "),
    ({f"key{n}": n for n in range(9_000)}, "key0: unknown"),
    ({"filter": {"kind": ["a"] * 20_000}}, "may have 1000 values"),
    ({"filter": {f"c{n}": 1 for n in range(5000)}}, "filter: "),
    ({"filter": {"kind": [None] * 900}}, "filter: must be text"),
    ({"user": "x" * 150_000}, "a key may have 1024 bytes; received 150000"),
    ({"user": "\ud800"}, "holds half of a character"),
    ({"user": {"a": [1] * 20_000}}, "user: must be text or a whole number"),
    ({"user": True}, "user: "),
    ({"k": 10**300}, "k: "),
    ({"k": float("nan")}, "k: "),
    ({"k": 0}, "k: "),
    ({"k": "5"}, "k: "),
    ({"seen": "x" * 100_000}, "seen: "),
    ({"features": []}, "features: "),
    ({}, "needs 'user', 'features', or both"),
]
SHAPES = {False: [None], True: [None, None]}


def describe(name: str, dtype: str = "int64", **more: Any) -> dict[str, Any]:
    column = {
        "name": name, "feature": name, "column": name, "dtype": dtype, "is_list": False,
        "length": None, "max_len": None, "pad_token": None, "null_token": None,
        "is_required": False,
    }  # fmt: skip
    return {**column, **more}


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


@pytest.mark.parametrize(("body", "said"), LONG)
def test_a_request_ends_at_its_first_error(body, said) -> None:
    with pytest.raises(RequestError) as refused:
        parse_request(body if "user" in body or not body else {"user": 1, **body})
    assert said in refused.value.message
    assert len(refused.value.message) < 300


def test_numbers_of_a_request_may_be_whole_floats_and_long() -> None:
    found = parse_request({"user": 2**70, "k": 3.0, "filter": {"year": 1999.5, "kind": ["a", 2]}})
    assert (found.user, found.k) == (2**70, 3)
    assert found.filter == {"year": [1999.5], "kind": ["a", 2]}


HISTORY = describe("history", is_list=True, is_required=True)
TIMES = describe("times", is_list=True, is_required=True)
USERS = {"key": "user", "features": ["user", "history", "times"], "histories": ["history"]}


def test_a_list_comes_with_those_that_stand_beside_it() -> None:
    model = build_model([HISTORY, TIMES], {**USERS, "aligned": [["history", "times"]]})
    assert model.find_stored({}) == {"history", "times"}
    assert model.find_stored({"history": [1], "times": [2]}) == frozenset()
    with pytest.raises((RequestError, RawValueError), match="history came without times"):
        model.find_stored({"history": [1]})


def test_a_stored_feature_is_replaced_with_all_of_its_columns() -> None:
    cross = [describe("a", feature="cross", column="gender"),
             describe("b", feature="cross", column="group")]  # fmt: skip
    model = build_model(cross, {"key": "user", "features": ["cross"]})
    assert model.find_stored({}) == {"cross"}
    assert model.find_stored({"gender": 1, "group": 2}) == frozenset()
    with pytest.raises(
        (RequestError, RawValueError), match="cross is made of gender, group; received gender"
    ):
        model.find_stored({"gender": 1})


def read_raw(model: ListModel, user: Any, stored: Any = (), most: int = 100) -> dict[str, Any]:
    request = parse_request({"user": user})
    return model.read_raw(SIGNATURE, request, stored, most)


def test_the_place_of_what_is_stored_is_filled_with_what_is_not_read() -> None:
    """0 is no time of an event, and no list."""
    asked = describe("asked_at", is_required=True, time_unit="ms", time_kind="event")
    model = build_model([HISTORY, asked], USERS)
    found = read_raw(model, 7, {"history", "asked_at"})
    assert found["asked_at"].tolist() == [0]
    assert found["history"].shape[0] == 1
    with pytest.raises(
        (RequestError, RawValueError), match="asked_at has no value for a missing one"
    ):
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


def test_keys_of_a_history_may_be_whole_floats() -> None:
    model = build_model([HISTORY], USERS)
    assert model.read_histories({"history": [10.0, 20, None]}) == {"history": [10, 20]}


def test_text_of_a_history_is_bounded_before_its_items_are_looked_up() -> None:
    """Nothing else has looked at the text by then."""
    text = " ".join(["1"] * RequestLimits.values)
    written = {"column": "history", "separator": " "}
    model = build_model([{**HISTORY, "written": written}], USERS)
    assert len(model.read_histories({"history": text})["history"]) == RequestLimits.values
    with pytest.raises((RequestError, RawValueError), match="more than 250,000 values"):
        model.read_histories({"history": f"{text} 1"})


@pytest.mark.parametrize("has_seen", [True, False])
def test_without_seen_items_the_stored_histories_are_left_out(tmp_path, has_seen) -> None:
    columns = {"key": [7], "feature:history": [[4]], **({"seen": [[3]]} if has_seen else {})}
    pa.parquet.write_table(pa.table(columns), tmp_path / "users.parquet")
    card = {"files": {"users.parquet": {}}, "users": {"histories": ["history"]}}
    users = _read_users(tmp_path, card)
    assert users is not None
    assert users.met == (("seen",) if has_seen else ("feature:history",))
    known = KnownEntities(["x", "y"], np.array([3, 4]), np.ones(2, bool),
                          users=users)  # fmt: skip
    met = [known.find_positions(users.read_list(column, 0)).tolist() for column in users.met]
    assert met == ([[0]] if has_seen else [[1]])

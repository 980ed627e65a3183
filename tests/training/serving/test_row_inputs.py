"""What a row is made of: what a request says, what is stored, what stands for neither."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf

from training.index.known_entities import KnownEntities, Users, _read_users
from training.serving.lists.row_inputs import find_stored, read_encoded, read_given, read_raw
from training.serving.requests.errors import RequestError
from training.serving.requests.recommend_request import RecommendRequest, parse_recommend

SIGNATURE = "user_embedding"
SHAPES = {False: [None], True: [None, None]}


def describe(name: str, dtype: str = "int64", **more: Any) -> dict[str, Any]:
    column = {
        "name": name, "feature": name, "column": name, "dtype": dtype, "is_list": False,
        "length": None, "max_len": None, "pad_token": None, "null_token": None,
        "is_required": False,
    }  # fmt: skip
    return {**column, **more}


def build_version(inputs: list[dict[str, Any]], users: dict[str, Any] | None, **card: Any) -> Any:
    specs = {
        item["name"]: tf.TensorSpec(SHAPES[item["is_list"]], tf.as_dtype(item["dtype"]))
        for item in inputs
    }
    about = {
        "kind": "retrieval",
        "users": users,
        "signatures": {SIGNATURE: {"inputs": inputs}},
        **card,
    }
    return SimpleNamespace(name="m", card=about, find_specs=lambda _: specs)


def ask(**body: Any) -> RecommendRequest:
    return parse_recommend({"k": 3, **body})


def know(**columns: Any) -> Any:
    table = pa.table({"key": [7], **{f"feature:{name}": [one] for name, one in columns.items()}})
    return SimpleNamespace(users=Users(table, {"7": 0}))


HISTORY = describe("history", is_list=True, is_required=True)
TIMES = describe("times", is_list=True, is_required=True)
USERS = {"key": "user", "features": ["user", "history", "times"], "histories": ["history"]}


def test_a_list_comes_with_those_that_stand_beside_it() -> None:
    version = build_version([HISTORY, TIMES], {**USERS, "aligned": [["history", "times"]]})
    known = know(history=[5], times=[9])
    assert find_stored(version, SIGNATURE, known, ask(user=7), 0) == {"history", "times"}
    whole = ask(user=7, features={"history": [1], "times": [2]})
    assert find_stored(version, SIGNATURE, known, whole, 0) == frozenset()
    with pytest.raises(RequestError, match="history came without times"):
        find_stored(version, SIGNATURE, known, ask(user=7, features={"history": [1]}), 0)


def test_a_stored_feature_is_replaced_with_all_of_its_columns() -> None:
    cross = [describe("a", feature="cross", column="gender"),
             describe("b", feature="cross", column="group")]  # fmt: skip
    version = build_version(cross, {"key": "user", "features": ["cross"]})
    known = know(cross=3)
    assert find_stored(version, SIGNATURE, known, ask(user=7), 0) == {"cross"}
    both = ask(user=7, features={"gender": 1, "group": 2})
    assert find_stored(version, SIGNATURE, known, both, 0) == frozenset()
    with pytest.raises(RequestError, match="cross is made of gender, group; received gender"):
        find_stored(version, SIGNATURE, known, ask(user=7, features={"gender": 1}), 0)


def test_the_place_of_what_is_stored_is_filled_with_what_is_not_read() -> None:
    """0 is no time of an event, and no list."""
    asked = describe("asked_at", is_required=True, time_unit="ms", time_kind="event")
    version = build_version([HISTORY, asked], USERS)
    found = read_raw(version, SIGNATURE, ask(user=7), {"history", "asked_at"}, 100)
    assert found["asked_at"].tolist() == [0]
    assert found["history"].shape[0] == 1
    with pytest.raises(RequestError, match="asked_at has no value for a missing one"):
        read_raw(version, SIGNATURE, ask(user=7), {"history"}, 100)


def test_users_that_are_not_stored_are_known_to_the_model() -> None:
    version = build_version([describe("user", null_token=-1)], None, user="user")
    wanted = {7: 7, "7": 7, "007": -1, "+7": -1, "7_0": -1, "x": -1, "²": -1, "--7": -1}
    for user, key in wanted.items():
        assert read_raw(version, SIGNATURE, ask(user=user), (), 9)["user"].tolist() == [key], user


def test_stored_bytes_are_read_as_they_are() -> None:
    version = build_version([describe("vector", "string")], {"key": "user", "features": ["vector"]})
    found = read_encoded(version, SIGNATURE, know(vector=b"\x00\xff"), 0, {"vector"})
    assert found["vector"].tolist() == [b"\x00\xff"]


def test_keys_of_a_history_may_be_whole_floats() -> None:
    version = build_version([HISTORY], USERS)
    found = read_given(version, ask(features={"history": [10.0, 20, None]}), ["history"])
    assert found == {"history": [10, 20]}


@pytest.mark.parametrize("has_seen", [True, False])
def test_without_seen_items_the_stored_histories_are_left_out(tmp_path, has_seen) -> None:
    columns = {"key": [7], "feature:history": [[4]], **({"seen": [[3]]} if has_seen else {})}
    pa.parquet.write_table(pa.table(columns), tmp_path / "users.parquet")
    card = {"files": {"users.parquet": {}}, "users": {"histories": ["history"]}}
    users = _read_users(tmp_path, card)
    assert users is not None
    assert users.met == (("seen",) if has_seen else ("feature:history",))
    known = KnownEntities(["x", "y"], np.array([3, 4]), {"x": 0, "y": 1}, np.ones(2, bool),
                          users=users)  # fmt: skip
    met = [known.find_positions(users.read_list(column, 0)).tolist() for column in users.met]
    assert met == ([[0]] if has_seen else [[1]])

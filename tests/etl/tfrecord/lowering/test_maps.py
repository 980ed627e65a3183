"""Maps as entries or as features of some keys."""

from __future__ import annotations

import pyarrow as pa
import pytest

from conf.errors import ConfigError
from etl.tfrecord.lowering import plan_lowering
from etl.tfrecord.policies import ColumnPolicy, LoweringOptions

MAP = pa.map_(pa.string(), pa.float64())
VALUES = [[("z", 9.0)], [("a", 1.0), ("b", None)], None, [], [("b", 2.0)]]


def lower(column: pa.Array, record_type: str = "Example", **policy: object) -> list[dict]:
    batch = pa.record_batch({"m": column}).slice(1)
    options = LoweringOptions(ColumnPolicy(**policy))  # type: ignore[arg-type]
    return plan_lowering(batch.schema, record_type, options).apply(batch).to_pylist()


def test_entries_drop_keys_with_their_null_values() -> None:
    assert lower(pa.array(VALUES, MAP), maps="entries", null_elements="drop") == [
        {"m.keys": ["a"], "m.values": [1.0]}, {"m.keys": None, "m.values": None},
        {"m.keys": [], "m.values": []}, {"m.keys": ["b"], "m.values": [2.0]},
    ]  # fmt: skip


def test_entries_fill_null_values_and_rows() -> None:
    given = {"maps": "entries", "null_elements": "default", "nulls": "default", "default": -1}
    column = pa.array([None, [("a", None)], None], MAP)
    assert lower(column, **given) == [
        {"m.keys": ["a"], "m.values": [-1.0]}, {"m.keys": [], "m.values": []}
    ]  # fmt: skip


def test_keys_become_features() -> None:
    assert lower(pa.array(VALUES, MAP), maps="keys", map_keys=("b", "a", "c")) == [
        {"m.b": None, "m.a": 1.0, "m.c": None}, {"m.b": None, "m.a": None, "m.c": None},
        {"m.b": None, "m.a": None, "m.c": None}, {"m.b": 2.0, "m.a": None, "m.c": None},
    ]  # fmt: skip


def test_a_key_that_occurs_twice_counts_once() -> None:
    column = pa.array([None, [("a", 1.0), ("a", 2.0)]], MAP)
    assert lower(column, maps="keys", map_keys=("a",)) == [{"m.a": 2.0}]


def test_keys_may_be_numbers_and_values_structs() -> None:
    kind = pa.map_(pa.int32(), pa.struct({"x": pa.int64(), "l": pa.list_(pa.string())}))
    column = pa.array([None, [(7, {"x": 1, "l": ["u"]})], [(8, None)]], kind)
    assert lower(column, maps="keys", map_keys=("7",)) == [
        {"m.7.x": 1, "m.7.l": ["u"]}, {"m.7.x": None, "m.7.l": None}
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"mapKeys are no int32"):
        lower(column, maps="keys", map_keys=("seven",))


def test_entries_of_lists_need_a_sequence_example() -> None:
    column = pa.array(
        [None, [("a", [1, 2]), ("b", [])]], pa.map_(pa.string(), pa.list_(pa.int64()))
    )
    with pytest.raises(ConfigError, match="SequenceExample"):
        lower(column, maps="entries")
    assert lower(column, "SequenceExample", maps="entries") == [
        {"m.keys": ["a", "b"], "m.values": [[1, 2], []]}
    ]


def test_dictionary_encoded_keys() -> None:
    keys = pa.array(["q", "a", "b"]).dictionary_encode()
    column = pa.MapArray.from_arrays(pa.array([0, 1, 3], pa.int32()), keys, pa.array([0, 1, 2]))
    assert lower(column, maps="keys", map_keys=("b",)) == [{"m.b": 2}]
    assert lower(column, maps="entries") == [{"m.keys": ["a", "b"], "m.values": [1, 2]}]

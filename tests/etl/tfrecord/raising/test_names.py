"""What features are called: case and renames."""

from __future__ import annotations

import pyarrow as pa
import pytest

from conf.errors import ConfigError
from etl.tfrecord.lowering import plan_lowering
from etl.tfrecord.lowering.types import UnfitError
from etl.tfrecord.policies import ColumnPolicy, LoweringOptions
from etl.tfrecord.raising import plan_raising
from etl.tfrecord.raising.names import FeatureNames, find_name


def test_a_name_stands_for_itself_before_it_stands_for_another_case() -> None:
    assert find_name("a", ["A", "a", "b"]) == ("a",)
    assert find_name("X", ["x", "y"]) == ("x",)
    assert find_name("x", ["X", "x ", "y"]) == ("X",)
    assert find_name("aB", ["AB", "ab"]) == ("AB", "ab")
    assert find_name("z", ["x"]) == ()


def test_structs_and_fields_are_found_in_another_case() -> None:
    names = FeatureNames(("user.Age", "user.name", "Id"))
    assert [names.find(path) for path in ("USER", "user.age", "ID", "user.Age", "other")] == [
        "user", "user.Age", "Id", "user.Age", "other",
    ]  # fmt: skip
    with pytest.raises(UnfitError, match="which of Ab, aB is meant"):
        FeatureNames(("Ab.x", "aB.y")).find("ab")


def test_policies_of_a_column_hold_in_another_case() -> None:
    options = LoweringOptions(ColumnPolicy(timestamps="ms"), {"ts": ColumnPolicy(timestamps="us")})
    target = pa.schema({"TS": pa.timestamp("us", "UTC")})
    raising = plan_raising(target, "Example", options, None, FeatureNames(("ts",)))
    batch = raising.apply(pa.record_batch({"ts": [1_500_000]}))
    assert batch.schema.names == ["TS"]
    assert batch.column("TS").cast(pa.int64()).to_pylist() == [1_500_000]


def test_what_differs_in_case_alone_is_not_guessed() -> None:
    names = FeatureNames(("AB", "ab"))
    with pytest.raises(ConfigError, match="which of AB, ab is meant"):
        plan_raising(pa.schema({"Ab": pa.int64()}), "Example", None, None, names)
    exact = plan_raising(pa.schema({"AB": pa.int64()}), "Example", None, None, names)
    assert [feature.name for feature in exact.features] == ["AB"]


def test_renamed_features_find_their_way_back() -> None:
    struct = pa.struct([("b", pa.int64()), ("c", pa.int64())])
    batch = pa.record_batch({"a.b": pa.array([1]), "a": pa.array([{"b": 2, "c": 3}], struct)})
    options = LoweringOptions(name_collisions="rename")
    lowering = plan_lowering(batch.schema, "Example", options)
    assert lowering.renames == {"a": {"a.b": "a.b_2"}}
    names = FeatureNames(tuple(lowering.schema.names), lowering.renames)
    raising = plan_raising(batch.schema, "Example", options, None, names)
    lowered = lowering.apply(batch)
    wanted = pa.record_batch({f.name: lowered.column(f.name) for f in raising.features})
    assert raising.apply(wanted).equals(batch)


def test_two_parts_of_one_column_under_one_name_cannot_be_told_apart() -> None:
    inner = pa.struct([("c", pa.int64())])
    schema = pa.schema({"a": pa.struct([("b.c", pa.int64()), ("b", inner)])})
    options = LoweringOptions(name_collisions="rename")
    assert plan_lowering(schema, "Example", options).renames is None

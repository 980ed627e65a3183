"""Structs flattened, at any depth."""

from __future__ import annotations

import pyarrow as pa
import pytest

from conf.errors import ConfigError
from etl.tfrecord.lowering import plan_lowering
from etl.tfrecord.policies import LoweringOptions

STRUCT = pa.struct({"x": pa.int64(), "y": pa.struct({"z": pa.list_(pa.string())})})


def test_a_null_struct_makes_its_fields_absent() -> None:
    values = [{"x": 1, "y": {"z": ["a"]}}, None, {"x": 2, "y": None}]
    full = pa.StructArray.from_arrays(
        [pa.array([1, 7, 2]), pa.array([5, 6, 7])], ["a", "b"], mask=pa.array([False, True, False])
    )
    batch = pa.record_batch({"s": pa.array(values, STRUCT), "hidden": full})
    lowered = plan_lowering(batch.schema, "Example").apply(batch.slice(1))
    assert lowered.to_pylist() == [
        {"s.x": None, "s.y.z": None, "hidden.a": None, "hidden.b": None},
        {"s.x": 2, "s.y.z": None, "hidden.a": 2, "hidden.b": 7},
    ]


def test_the_separator_can_be_chosen() -> None:
    options = LoweringOptions(struct_separator="/")
    schema = pa.schema({"s": STRUCT, "s.x": pa.int64()})
    assert plan_lowering(schema, "Example", options).schema.names == ["s/x", "s/y/z", "s.x"]


def test_names_that_collide_are_refused_or_numbered() -> None:
    schema = pa.schema({"s": STRUCT, "s.x": pa.int64(), "s.x_2": pa.int64()})
    with pytest.raises(ConfigError, match=r"s\.x: 2 columns end up.*nameCollisions=rename"):
        plan_lowering(schema, "Example")
    options = LoweringOptions(name_collisions="rename")
    names = plan_lowering(schema, "Example", options).schema.names
    assert names == ["s.x", "s.y.z", "s.x_3", "s.x_2"]

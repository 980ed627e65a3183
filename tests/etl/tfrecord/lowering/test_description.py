"""What a manifest says of the lowering is enough to read the columns back."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest

from conf.errors import InputDataError
from etl.tfrecord.lowering import plan_lowering, read_description
from etl.tfrecord.policies import ColumnPolicy, LoweringOptions


def test_comes_back_from_json() -> None:
    options = LoweringOptions(
        ColumnPolicy(dates="iso", nulls="default", maps="keys", map_keys=("a", "b")),
        {"x": ColumnPolicy(nulls="default", default=-1), "y": ColumnPolicy()},
        struct_separator="/",
        name_collisions="rename",
        layout="packed",
    )
    schema = pa.schema({"x": pa.int64(), "y": pa.list_(pa.float32(), 3)})
    lowering = plan_lowering(schema, "Example", options)
    text = json.dumps(lowering.describe())
    assert read_description(json.loads(text)) == (options, dict(lowering.slots))


def test_nothing_said_means_the_defaults() -> None:
    assert read_description({}) == (LoweringOptions(), {})
    lowering = plan_lowering(pa.schema({"x": pa.int64()}), "Example")
    assert read_description(lowering.describe()) == (LoweringOptions(), {})


@pytest.mark.parametrize(
    "damaged",
    [{"policy": {"dats": "iso"}}, {"slots": {"packed.int64": [{"name": "x"}]}}, {"columns": []},
     {"slots": {"p": [{"name": "x", "width": "wide"}]}}],
)  # fmt: skip
def test_damage_is_refused(damaged: dict) -> None:
    with pytest.raises(InputDataError, match="damaged"):
        read_description(damaged)

"""The planner: one node per column, problems collected, policies that mean something noted."""

from __future__ import annotations

import pyarrow as pa

from etl.tfrecord.lowering.maps import MapKeys
from etl.tfrecord.lowering.nodes import Leaf
from etl.tfrecord.lowering.structs import FlattenStruct
from etl.tfrecord.lowering.tree import Planner
from etl.tfrecord.policies import ColumnPolicy, LoweringOptions


def test_collects_problems_and_goes_on() -> None:
    planner = Planner("Example", LoweringOptions())
    kind = pa.struct({"t": pa.timestamp("us"), "x": pa.int64(), "d": pa.date32()})
    node = planner.plan("s", pa.field("s", kind))
    assert isinstance(node, FlattenStruct)
    assert [output.name for output in node.outputs] == ["s.x"]
    assert [problem.split(" ")[0] for problem in planner.problems] == ["s.t", "s.d"]


def test_parts_of_a_map_have_policies_of_their_own() -> None:
    by_keys = ColumnPolicy(maps="keys", map_keys=("a", "b"))
    own = ColumnPolicy(nulls="error")
    planner = Planner("Example", LoweringOptions(columns={"m": by_keys, "m.b": own}))
    node = planner.plan("m", pa.field("m", pa.map_(pa.string(), pa.int64())))
    assert isinstance(node, MapKeys)
    assert [c.nulls for c in node.children if isinstance(c, Leaf)] == ["absent", "error"]


def test_notes_which_policies_mean_something() -> None:
    planner = Planner("Example", LoweringOptions())
    planner.plan("l", pa.field("l", pa.list_(pa.float64())))
    assert planner.meanings == {"l": {"nulls", "default", "null_elements", "float64"}}

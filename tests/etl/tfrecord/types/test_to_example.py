"""Columns to features: against a plain reference, free where nothing is to do, errors at once."""

from __future__ import annotations

import json
import pickle
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.errors import ConfigError, InputDataError
from etl.tfrecord.codec.encode_columns import plan_columns
from etl.tfrecord.types.column_nodes import ColumnBranch, ColumnLeaf
from etl.tfrecord.types.column_policies import ColumnPolicy, TypeOptions
from etl.tfrecord.types.to_example import ToExamplePlanner, plan_to_example, read_description
from tests.etl.tfrecord.types.reference import batches, features_of
from tests.machine import examples

POLICIES = st.builds(
    ColumnPolicy,
    float64=st.sampled_from(["error", "cast", "clip"]),
    nulls=st.sampled_from(["absent", "default"]),
    null_elements=st.sampled_from(["error", "drop", "default"]),
    dates=st.sampled_from(["days", "iso"]),
    timestamps=st.sampled_from(["s", "ms", "us", "iso"]),
    maps=st.just("entries"),
    vectors=st.sampled_from(["dense", "sparse", "bytes"]),
) | st.builds(
    ColumnPolicy,
    nulls=st.sampled_from(["absent", "default"]),
    dates=st.just("days"),
    timestamps=st.just("us"),
    maps=st.just("keys"),
    map_keys=st.just(("b", "a", "z")),
)


def normal(value: Any) -> Any:
    """Comparable form: booleans as integers, doubles as the float32 that the encoder writes."""
    if isinstance(value, list):
        return [normal(v) for v in value]
    if isinstance(value, float):
        return float(np.float32(value))
    return int(value) if isinstance(value, bool) else value


@settings(max_examples=examples(150), deadline=None)
@given(batches(), POLICIES)
def test_equals_the_reference(batch: pa.RecordBatch, policy: ColumnPolicy) -> None:
    options = TypeOptions(policy)
    to_example = plan_to_example(batch.schema, "Example", options)
    features = pickle.loads(pickle.dumps(to_example)).apply(batch)
    features.validate(full=True)
    assert features.schema == to_example.schema
    assert features.num_rows == batch.num_rows
    plan_columns(features.schema)  # the encoder takes it
    expected = [features_of(row, batch.schema, options) for row in batch.to_pylist()]
    assert [{n: normal(v) for n, v in row.items()} for row in features.to_pylist()] == expected


def test_costs_nothing_where_nothing_is_to_do() -> None:
    batch = pa.record_batch(
        {"x": pa.array([1, None]), "d": [0.1, 1e300], "l": pa.array([["a"], None]),
         "c": pa.array(["u", None]).dictionary_encode()}
    )  # fmt: skip
    to_example = pickle.loads(pickle.dumps(plan_to_example(batch.schema, "Example")))
    assert to_example.is_identity
    assert to_example.apply(batch) is batch


def test_one_error_names_every_column_and_what_would_make_it_fit() -> None:
    schema = pa.schema(
        {
            "good": pa.int64(),
            "when": pa.timestamp("us", "UTC"),
            "day": pa.date32(),
            "counts": pa.map_(pa.string(), pa.int64()),
            "grid": pa.list_(pa.list_(pa.int64())),
            "gap": pa.duration("us"),
            "nothing": pa.null(),
            "s": pa.struct({"t": pa.timestamp("us"), "fine": pa.int8()}),
            "s.fine": pa.int64(),
            "items": pa.list_(pa.struct({"a": pa.int64()})),
        }
    )
    with pytest.raises(ConfigError) as caught:
        plan_to_example(schema, "Example")
    text = str(caught.value)
    for part in (
        "9 column(s)", "when (timestamp[us, tz=UTC]): option timestamps=s, ms, us or iso",
        "day (date32[day]): option dates", "counts (map<string, int64>): option maps=entries",
        "grid (list<item: list<item: int64>>): arrays of arrays need record type SequenceExample",
        "gap (duration[us]): cast", "nothing (null): no Arrow form", "s.t (timestamp[us])",
        "s.fine: 2 columns end up under this name", "items (", "array_of_structs.field",
    ):  # fmt: skip
        assert part in text, part
    assert "good" not in text


def test_a_column_without_arrow_form_is_named_by_its_spark_type() -> None:
    field = pa.field("gap", pa.null(), metadata={b"sluice.spark_type": b"interval day"})
    with pytest.raises(ConfigError, match=r"gap \(interval day\)"):
        plan_to_example(pa.schema([field]), "Example")


def test_sequence_example_takes_arrays_of_arrays_and_no_deeper_ones() -> None:
    two = pa.list_(pa.list_(pa.float64()))
    schema = pa.schema({"x": two, "y": pa.list_(pa.int64())})
    assert plan_to_example(schema, "SequenceExample").is_identity
    options = TypeOptions(ColumnPolicy(float64="cast", null_elements="drop"))
    batch = pa.record_batch({"x": pa.array([[[1.0, None], None, []], None], two), "y": [[1], []]},
                            schema=schema)  # fmt: skip
    features = plan_to_example(schema, "SequenceExample", options).apply(batch)
    assert features.to_pylist() == [{"x": [[1.0], []], "y": [1]}, {"x": None, "y": []}]
    with pytest.raises(ConfigError, match="nested twice at most"):
        plan_to_example(pa.schema({"x": pa.list_(two)}), "SequenceExample")


def test_value_errors_name_column_and_row() -> None:
    batch = pa.record_batch({"s": pa.array([{"l": [1.0]}, None, {"l": [2.0, 0.1]}])})
    exact = TypeOptions(ColumnPolicy(float64="exact"))
    with pytest.raises(InputDataError, match=r"(?s)'s\.l'.*0\.1 in row 2 of the batch"):
        plan_to_example(batch.schema, "Example", exact).apply(batch)
    with pytest.raises(InputDataError, match=r"(?s)'s\.l'.*row 0 of the batch"):
        plan_to_example(batch.schema, "Example", exact).apply(batch.slice(2))
    nulls = TypeOptions(ColumnPolicy(nulls="error"))
    with pytest.raises(InputDataError, match=r"(?s)'s\.l' has a null.*row 1"):
        plan_to_example(batch.schema, "Example", nulls).apply(batch)


def test_batches_may_differ_in_zone_and_nullability_only() -> None:
    planned = pa.schema({"t": pa.timestamp("us", "UTC"), "l": pa.list_(pa.int64())})
    to_example = plan_to_example(planned, "Example", TypeOptions(ColumnPolicy(timestamps="us")))
    lists = pa.list_(pa.field("element", pa.int64(), nullable=False))
    zoned = pa.timestamp("us", "Europe/Berlin")
    batch = pa.record_batch({"t": pa.array([5], zoned), "l": pa.array([[1]], lists)})
    assert to_example.apply(batch).to_pylist() == [{"t": 5, "l": [1]}]
    for other in ({"t": pa.array([5], zoned), "l": [["a"]]}, {"t": [5], "l": [[1]]},
                  {"t": pa.array([5], zoned), "k": [[1]]}):  # fmt: skip
        with pytest.raises(InputDataError, match="another schema"):
            to_example.apply(pa.record_batch(other))


def test_keeps_rows_where_there_is_no_column() -> None:
    batch = pa.RecordBatch.from_struct_array(pa.array([{}] * 3, pa.struct([])))
    assert plan_to_example(batch.schema, "Example").apply(batch).num_rows == 3


def test_columns_have_their_own_policies() -> None:
    batch = pa.record_batch({"a": [1e300], "s": pa.array([{"x": None, "y": None}],
                             pa.struct({"x": pa.int64(), "y": pa.string()}))})  # fmt: skip
    options = TypeOptions(
        columns={
            "a": ColumnPolicy(float64="clip"),
            "s": ColumnPolicy(nulls="default"),
            "s.x": ColumnPolicy(nulls="default", default=7),
        }
    )
    features = plan_to_example(batch.schema, "Example", options).apply(batch).to_pylist()
    assert features == [{"a": float(np.finfo(np.float32).max), "s.x": 7, "s.y": ""}]


def test_bytes_that_need_not_be_text_are_described() -> None:
    schema = pa.schema({"b": pa.binary(), "s": pa.string(), "l": pa.list_(pa.binary())})
    described = plan_to_example(schema, "Example").describe()
    assert described["binary"] == ["b", "l"]


def test_collects_problems_and_goes_on() -> None:
    planner = ToExamplePlanner("Example", TypeOptions())
    kind = pa.struct({"t": pa.timestamp("us"), "x": pa.int64(), "d": pa.date32()})
    node = planner.plan("s", pa.field("s", kind))
    assert isinstance(node, ColumnBranch)
    assert [output.name for output in node.outputs] == ["s.x"]
    assert [problem.split(" ")[0] for problem in planner.problems] == ["s.t", "s.d"]


def test_parts_of_a_map_have_policies_of_their_own() -> None:
    by_keys = ColumnPolicy(maps="keys", map_keys=("a", "b"))
    own = ColumnPolicy(nulls="error")
    planner = ToExamplePlanner("Example", TypeOptions(columns={"m": by_keys, "m.b": own}))
    node = planner.plan("m", pa.field("m", pa.map_(pa.string(), pa.int64())))
    assert isinstance(node, ColumnBranch)
    assert [c.nulls for c in node.children if isinstance(c, ColumnLeaf)] == ["absent", "error"]


def test_notes_which_policies_mean_something() -> None:
    planner = ToExamplePlanner("Example", TypeOptions())
    planner.plan("l", pa.field("l", pa.list_(pa.float64())))
    assert planner.meanings == {"l": {"nulls", "default", "null_elements", "float64"}}


SCHEMA = pa.schema(
    {
        "price": pa.float64(),
        "s": pa.struct({"when": pa.timestamp("us"), "n": pa.int64()}),
        "m": pa.map_(pa.string(), pa.float64()),
        "tags": pa.list_(pa.string()),
    }
)
FITTING = ColumnPolicy(timestamps="ms", maps="entries")


def plan(columns: dict[str, ColumnPolicy], default: ColumnPolicy = FITTING) -> None:
    plan_to_example(SCHEMA, "Example", TypeOptions(default, columns))


def policy(**given: Any) -> ColumnPolicy:
    return ColumnPolicy(**{"timestamps": "ms", "maps": "entries", **given})


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"prize": policy()}, r"prize: option columns names no such column, did you mean 'price'"),
        ({"s.win": policy()}, r"did you mean 's\.n'"),
        ({"price": policy(timestamps="s")}, r"price: timestamps=s means nothing for its type"),
        ({"tags": policy(float64="cast")}, r"tags: float64=cast means nothing"),
        ({"price": policy(null_elements="drop")}, r"price: nullElements=drop means nothing"),
        ({"s": policy(float64="cast")}, r"s: float64=cast means nothing"),
        ({"m": policy(maps="keys")}, r"(?s)^1 column.*m \(map.*\): maps=keys needs option mapKeys"),
        ({"m": policy(map_keys=("a",))}, r"m: option mapKeys needs maps=keys"),
        ({"price": policy(default=1)}, r"price: option default needs nulls=default"),
        ({"price": policy(nulls="default", default="x")}, r"price \(double\): default 'x' is no"),
    ],
)
def test_policies_that_make_no_sense(columns: dict[str, ColumnPolicy], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(columns)


def test_a_struct_without_fields_is_refused_beside_all_else() -> None:
    hollow = pa.struct([("inner", pa.struct([])), ("n", pa.int64())])
    schema = pa.schema({"s": hollow, "t": pa.struct([]), "d": pa.date32()})
    with pytest.raises(ConfigError) as caught:
        plan_to_example(schema, "Example", TypeOptions())
    for part in ("3 column(s)", "s.inner (", "t (", "a struct without fields", "d (date32"):
        assert part in str(caught.value)


def test_policies_that_do() -> None:
    plan({})
    plan(
        {
            "price": policy(float64="clip", nulls="default", default=-1),
            "s": policy(timestamps="iso"),
            "s.n": policy(nulls="error"),
            "m": policy(float64="cast", null_elements="drop"),
            "tags": policy(null_elements="default", default="?"),
        }
    )
    plan({"m": policy(maps="keys", map_keys=("a",)), "m.a": policy(float64="cast")})  # fmt: skip


def test_all_problems_are_in_one_message() -> None:
    with pytest.raises(ConfigError) as caught:
        plan({"prize": ColumnPolicy(), "tags": policy(dates="iso")}, ColumnPolicy(default=1))
    for part in ("prize: ", "tags: ", "s.when (", "m (", "all columns: option default needs"):
        assert part in str(caught.value), part


def test_payloads_are_one_column_of_bytes() -> None:
    options = TypeOptions(ColumnPolicy(nulls="default"))
    batch = pa.record_batch({"p": pa.array([b"x", None])})
    assert plan_to_example(batch.schema, "ByteArray").is_identity
    filled = plan_to_example(batch.schema, "ByteArray", options).apply(batch)
    assert filled.to_pylist() == [{"p": b"x"}, {"p": b""}]
    for schema in (pa.schema({"x": pa.int64()}), pa.schema({"p": pa.binary(), "q": pa.binary()}),
                   pa.schema([]), pa.schema({"l": pa.list_(pa.binary())})):  # fmt: skip
        with pytest.raises(ConfigError, match="one binary or string column"):
            plan_to_example(schema, "ByteArray")


def test_comes_back_from_json() -> None:
    options = TypeOptions(
        ColumnPolicy(dates="iso", nulls="default", maps="keys", map_keys=("a", "b")),
        {"x": ColumnPolicy(nulls="default", default=-1), "y": ColumnPolicy()},
        struct_separator="/",
        name_collisions="rename",
    )
    schema = pa.schema({"x": pa.int64(), "y": pa.list_(pa.float32(), 3)})
    to_example = plan_to_example(schema, "Example", options)
    text = json.dumps(to_example.describe())
    assert read_description(json.loads(text)) == options


def test_nothing_said_means_the_defaults() -> None:
    assert read_description({}) == TypeOptions()
    to_example = plan_to_example(pa.schema({"x": pa.int64()}), "Example")
    assert read_description(to_example.describe()) == TypeOptions()


@pytest.mark.parametrize(
    "damaged",
    [{"policy": {"dats": "iso"}}, {"columns": []}, {"columns": {"x": 1}}],
)
def test_damage_is_refused(damaged: dict) -> None:
    with pytest.raises(InputDataError, match="damaged"):
        read_description(damaged)

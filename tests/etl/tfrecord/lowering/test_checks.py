"""Policies that contradict each other, name no column, or mean nothing; payload schemas."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from conf.errors import ConfigError
from etl.tfrecord.lowering import plan_lowering
from etl.tfrecord.policies import ColumnPolicy, LoweringOptions

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
    plan_lowering(SCHEMA, "Example", LoweringOptions(default, columns))


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
        plan_lowering(schema, "Example", LoweringOptions())
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
    options = LoweringOptions(ColumnPolicy(nulls="default"))
    batch = pa.record_batch({"p": pa.array([b"x", None])})
    assert plan_lowering(batch.schema, "ByteArray").is_identity
    filled = plan_lowering(batch.schema, "ByteArray", options).apply(batch)
    assert filled.to_pylist() == [{"p": b"x"}, {"p": b""}]
    for schema in (pa.schema({"x": pa.int64()}), pa.schema({"p": pa.binary(), "q": pa.binary()}),
                   pa.schema([]), pa.schema({"l": pa.list_(pa.binary())})):  # fmt: skip
        with pytest.raises(ConfigError, match="one binary or string column"):
            plan_lowering(schema, "ByteArray")
    with pytest.raises(ConfigError, match="no features to pack"):
        plan_lowering(batch.schema, "ByteArray", LoweringOptions(layout="packed"))

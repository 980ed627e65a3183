"""Arrays taken apart and put together."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.errors import ConfigError
from etl.tfrecord.types.arrays import holds_same, split_lists
from etl.tfrecord.types.parts import flatten_lists, nest_lists, nest_schema

LISTS = st.lists(st.none() | st.lists(st.none() | st.integers(0, 9), min_size=2, max_size=2))
TYPES = [pa.list_(pa.int64()), pa.large_list(pa.int64()), pa.list_(pa.int64(), 2)]


@given(LISTS, st.sampled_from(TYPES), st.data())
def test_split_and_build_are_inverse(values: list, kind: pa.DataType, data: Any) -> None:
    start = data.draw(st.integers(0, len(values)))
    column = pa.array(values, kind).slice(start)
    flat, rows = split_lists(column)
    assert flat.to_pylist() == [v for row in values[start:] if row is not None for v in row]
    built = rows.build(flat, kind)
    built.validate(full=True)
    assert built.equals(column)


lists = st.lists(st.one_of(st.none(), st.lists(st.integers(-5, 5), max_size=4)), max_size=12)


@given(lists, st.integers(0, 3))
def test_nesting_is_undone_by_flattening_also_in_slices(rows, first):
    batch = pa.record_batch({"h": pa.array(rows, pa.list_(pa.int64())), "x": [1] * len(rows)})
    batch = batch.slice(min(first, len(rows)))
    nested = nest_lists(batch, ("h",))
    wanted = [None if row is None else [[v] for v in row] for row in batch.column("h").to_pylist()]
    assert nested.column("h").to_pylist() == wanted
    assert nested.schema == nest_schema(batch.schema, ("h",))
    assert flatten_lists(nested, ("h",)).to_pylist() == batch.to_pylist()


def test_only_list_columns_are_taken():
    schema = pa.schema([("user", pa.int64()), ("history", pa.list_(pa.int64()))])
    for name in ("user", "histroy"):
        with pytest.raises(ConfigError, match="history"):
            nest_schema(schema, (name,))


TIMES = pa.timestamp("us", "UTC"), pa.timestamp("us", "Etc/UTC")


@pytest.mark.parametrize(
    ("given", "planned", "same"),
    [
        (*TIMES, True),
        (pa.timestamp("us"), TIMES[0], False),
        (pa.timestamp("ms", "UTC"), TIMES[0], False),
        (pa.large_string(), pa.string(), True),
        (pa.binary(), pa.string(), False),
        (pa.list_(TIMES[0]), pa.large_list(TIMES[1]), True),
        (pa.list_(pa.int64()), pa.list_(pa.int32()), False),
        (pa.struct({"a": TIMES[0]}), pa.struct({"a": TIMES[1]}), True),
        (pa.struct({"a": TIMES[0]}), pa.struct({"b": TIMES[0]}), False),
        (pa.struct({"a": TIMES[0]}), pa.struct({"a": TIMES[0], "b": pa.int8()}), False),
        (pa.map_(pa.string(), TIMES[0]), pa.map_(pa.string(), TIMES[1]), True),
        (pa.map_(pa.string(), pa.int64()), pa.map_(pa.string(), pa.int32()), False),
        (pa.decimal128(10, 2), pa.decimal128(10, 3), False),
        (pa.list_(pa.int64(), 2), pa.list_(pa.int64(), 3), False),
    ],
)
def test_same_values_apart_from_zones_nullability_and_width(
    given: pa.DataType, planned: pa.DataType, same: bool
) -> None:
    assert holds_same(given, planned) is same
    assert holds_same(planned, given) is same

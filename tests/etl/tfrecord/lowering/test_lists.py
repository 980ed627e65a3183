"""Lists taken apart and put together: nulls, slices, fixed sizes."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etl.tfrecord.lowering.floats import NarrowDoubles
from etl.tfrecord.lowering.lists import ConvertLists, fill_nulls, split_lists
from etl.tfrecord.lowering.values import Cast, Keep

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


def test_what_lies_below_a_null_is_not_seen() -> None:
    hidden = pa.array([1e300, 0.5, 0.25])
    column = pa.ListArray.from_arrays(
        pa.array([0, 1, 2, 3], pa.int32()), hidden, mask=pa.array([True, False, False])
    )
    rule = ConvertLists(column.type, NarrowDoubles("exact"))
    assert rule.convert(column)[0].to_pylist() == [None, [0.5], [0.25]]
    fixed = pa.FixedSizeListArray.from_arrays(hidden, 1, mask=pa.array([True, False, False]))
    rule = ConvertLists(fixed.type, NarrowDoubles("exact"))
    assert rule.convert(fixed)[0].to_pylist() == [None, [0.5], [0.25]]


def test_a_refusal_names_the_row() -> None:
    column = pa.array([[0.5], [], None, [0.5, 0.25], [0.1]])
    rule = ConvertLists(column.type, NarrowDoubles("exact"))
    assert rule.convert(column)[1].index == 4  # type: ignore[union-attr]
    nested = pa.array([[[0.5]], None, [[], [0.5, 0.1]]])
    outer = ConvertLists(nested.type, ConvertLists(nested.type.value_type, NarrowDoubles("exact")))
    assert outer.convert(nested)[1].index == 2  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", TYPES)
def test_null_elements(kind: pa.DataType) -> None:
    column = pa.array([[9, 9], [1, None], None, [None, None], [2, 3]], kind).slice(1)
    dropped = ConvertLists(kind, Keep(pa.int64()), "drop")
    assert dropped.convert(column)[0].to_pylist() == [[1], None, [], [2, 3]]
    filled = ConvertLists(kind, Keep(pa.int64()), "default", 7)
    assert filled.convert(column)[0].to_pylist() == [[1, 7], None, [7, 7], [2, 3]]
    assert filled.convert(column)[0].type == filled.target == kind


def test_fixed_sizes_stay_where_no_element_is_left_out() -> None:
    fixed = pa.list_(pa.string_view(), 2)
    assert ConvertLists(fixed, Cast(pa.large_string())).target == pa.list_(pa.large_string(), 2)
    assert ConvertLists(fixed, Cast(pa.large_string()), "drop").target == pa.list_(
        pa.large_string()
    )


def test_lists_of_no_length_at_all() -> None:
    column = pa.array([[], None], pa.list_(pa.float64(), 0))
    rule = ConvertLists(column.type, NarrowDoubles("cast"))
    assert rule.convert(column)[0].to_pylist() == [[], None]


def test_filling_null_rows() -> None:
    assert fill_nulls(pa.array([1, None]), 5).to_pylist() == [1, 5]
    assert fill_nulls(pa.array([[1], None]), None).to_pylist() == [[1], []]
    pairs = pa.array([[9, 9], None, [1, None]], pa.list_(pa.int64(), 2)).slice(1)
    assert fill_nulls(pairs, 5).to_pylist() == [[5, 5], [1, None]]

"""Arrays taken apart and put together."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from etl.tfrecord.types.parts import split_lists

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

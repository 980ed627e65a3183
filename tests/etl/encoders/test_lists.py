from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.encoders.lists import flatten_lists

ROWS = st.lists(
    st.one_of(st.none(), st.lists(st.one_of(st.none(), st.integers(0, 99)), max_size=6)),
    max_size=20,
)


@settings(deadline=None)
@given(
    ROWS,
    st.one_of(st.none(), st.integers(1, 4)),
    st.sampled_from([pa.list_(pa.int64()), pa.large_list(pa.int64())]),
    st.data(),
)
def test_lists_keep_their_first_values(rows, max_len, data_type, data):
    start = data.draw(st.integers(0, len(rows)))
    flat = flatten_lists(pa.array(rows, data_type)[start:], max_len)
    rebuilt = flat.rebuild(flat.values)
    rebuilt.validate(full=True)
    assert rebuilt.to_pylist() == [row if row is None else row[:max_len] for row in rows[start:]]


def test_values_under_null_rows_do_not_come_back():
    hidden = pa.ListArray.from_arrays(
        pa.array([0, 2, 4], pa.int32()), pa.array([1, 2, 3, 4]), mask=pa.array([True, False])
    )
    flat = flatten_lists(hidden)
    assert flat.values.to_pylist() == [3, 4]
    assert flat.rebuild(flat.values).to_pylist() == [None, [3, 4]]


def test_fixed_length_is_checked():
    lists = pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int64(), 2))
    assert flatten_lists(lists, exact_len=2).values.to_pylist() == [1, 2, 3, 4]
    with pytest.raises(pa.ArrowInvalid, match="row 1 has 1 values, not 2"):
        flatten_lists(pa.array([[1, 2], [3]]), exact_len=2)

from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etl.encoders.lists import MAX_VALUES, FlatLists, flatten_lists
from etl.encoders.products import multiply_lists

rows = st.lists(st.tuples(*[st.none() | st.lists(st.integers(0, 9), max_size=4)] * 3), max_size=6)


@given(rows, st.none() | st.integers(1, 70))
def test_combinations_are_those_of_itertools(lists, max_len):
    columns = [[row[i] for row in lists] for i in range(3)]
    flat = [flatten_lists(pa.array(c, pa.list_(pa.int64())), max_len) for c in columns]
    product = multiply_lists(flat, max_len)
    values = [part.values.to_numpy()[at] for part, at in zip(flat, product.positions, strict=True)]
    joined = 100 * values[0] + 10 * values[1] + values[2]
    expected = [
        None
        if None in row
        else [100 * a + 10 * b + c for a, b, c in itertools.product(*row)][:max_len]
        for row in lists
    ]
    assert product.rebuild(pa.array(joined)).to_pylist() == expected
    assert product.rows.tolist() == [i for i, row in enumerate(expected) for _ in row or []]


def test_more_combinations_than_a_column_holds_are_refused_before_memory_is_taken():
    length = np.array([0, 2**30], np.int32)
    wide = FlatLists(pa.nulls(0), length, None)
    with pytest.raises(pa.ArrowInvalid, match=f"less than {MAX_VALUES}"):
        multiply_lists([wide, wide, wide], None)
    # Cut to a few, the same lists are no trouble.
    assert len(multiply_lists([wide, wide, wide], 3).rows) == 3

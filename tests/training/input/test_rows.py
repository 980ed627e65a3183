from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from training.input.rows import Rows, concat_rows, regroup


def rows(first: int, count: int) -> Rows:
    values = np.arange(first, first + count)
    lists = pa.array([[int(value)] * (value % 3) for value in values], pa.list_(pa.int64()))
    return Rows(count, {"v": values, "m": np.stack([values, values], 1)}, {"l": lists})


@given(
    sizes=st.lists(st.integers(0, 23), max_size=8),
    batch=st.integers(1, 9),
    times=st.integers(1, 3),
    drop=st.booleans(),
)
def test_regrouped_rows_are_the_same_in_whole_batches(sizes, batch, times, drop):
    starts = np.cumsum([0, *sizes])
    parts = [rows(int(start), size) for start, size in zip(starts, sizes, strict=False)]
    groups = list(regroup(iter(parts), batch, batch * times, drop))
    values = [value for group in groups for value in group.dense["v"].tolist()]
    total = sum(sizes)
    assert values == list(range(total - total % batch if drop else total))
    assert [r for group in groups for r in group.lists["l"].to_pylist()] == [
        [value] * (value % 3) for value in values
    ]
    assert all(group.count <= batch * times for group in groups)
    whole = groups if drop else groups[:-1]
    assert all(group.count % batch == 0 for group in whole)


def test_rows_are_taken_and_joined():
    taken = concat_rows([rows(0, 4), rows(4, 4)]).take(np.array([7, 0, 5]))
    assert taken.dense["m"].tolist() == [[7, 7], [0, 0], [5, 5]]
    assert taken.lists["l"].to_pylist() == [[7], [], [5, 5]]

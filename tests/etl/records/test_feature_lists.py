"""Feature lists of SequenceExamples."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from etl.records.feature_lists import flatten_lists, nest_lists, nest_schema

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

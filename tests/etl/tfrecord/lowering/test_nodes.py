"""Leaves: null rows by policy, and errors that name the column and the row."""

from __future__ import annotations

import pyarrow as pa
import pytest

from conf.errors import InputDataError
from etl.tfrecord.lowering.integers import NarrowUnsigned
from etl.tfrecord.lowering.nodes import Leaf, Output
from etl.tfrecord.lowering.values import Keep


def test_a_leaf_that_does_nothing_gives_the_column_itself() -> None:
    leaf, column = Leaf("x", Keep(pa.int64())), pa.array([1, None])
    assert leaf.is_identity
    assert leaf.outputs == (Output("x", pa.int64()),)
    assert leaf.apply(column)[0] is column


def test_null_rows_take_the_default_or_are_refused() -> None:
    column = pa.array([1, None, 3])
    assert Leaf("x", Keep(pa.int64()), "default", 9).apply(column)[0].to_pylist() == [1, 9, 3]
    with pytest.raises(InputDataError, match=r"(?s)column 'x' has a null.*row 1 of the batch"):
        Leaf("x", Keep(pa.int64()), "error").apply(column)


def test_refused_values_are_named() -> None:
    column = pa.array([1, 2**63], pa.uint64())
    with pytest.raises(InputDataError, match=rf"(?s)'x' has an unsigned.*{2**63} in row 1.*clip"):
        Leaf("x", NarrowUnsigned("error")).apply(column)

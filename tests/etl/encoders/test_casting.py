from __future__ import annotations

import decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.encoders.casting import cast_values


@settings(deadline=None)
@given(st.lists(st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1))))
def test_integers_become_the_nearest_float32(values):
    result = cast_values(pa.array(values, pa.int64()), pa.float32()).to_pylist()
    assert result == [None if value is None else float(np.float32(value)) for value in values]


@settings(deadline=None)
@given(st.lists(st.floats(allow_nan=False)))
def test_floats_are_rounded_or_refused_but_never_become_infinite(values):
    with np.errstate(over="ignore"):
        expected = np.array(values, np.float64).astype(np.float32)
    array = pa.array(values, pa.float64())
    if (np.isinf(expected) & ~np.isinf(np.array(values, np.float64))).any():
        with pytest.raises(pa.ArrowInvalid, match="float32"):
            cast_values(array, pa.float32())
    else:
        assert cast_values(array, pa.float32()).to_pylist() == expected.tolist()


def test_infinity_that_was_meant_stays():
    inf = float("inf")
    assert cast_values(pa.array(["-inf", "Infinity"]), pa.float32()).to_pylist() == [-inf, inf]
    assert cast_values(pa.array([inf, None, 1.0]), pa.float32()).to_pylist() == [inf, None, 1.0]


@pytest.mark.parametrize(
    ("values", "target", "expected"),
    [
        (pa.array([2.0, None]), pa.int64(), [2, None]),
        (pa.array(["12", None, "-3"]), pa.int64(), [12, None, -3]),
        (pa.array(["1.5"], pa.large_string()), pa.float32(), [1.5]),
        (pa.array([decimal.Decimal("12.25")]), pa.float32(), [12.25]),
        (pa.array([True, False]), pa.float32(), [1.0, 0.0]),
        (pa.array([7]), pa.string(), ["7"]),
        (pa.array([b"a"], pa.large_binary()), pa.string(), ["a"]),
        (pa.array(["é"]), pa.binary(), ["é".encode()]),
        (pa.nulls(2), pa.string(), [None, None]),
    ],
)
def test_lossless_casts(values, target, expected):
    result = cast_values(values, target)
    assert result.type == target
    assert result.to_pylist() == expected


@pytest.mark.parametrize(
    ("values", "target"),
    [
        (pa.array([1.5]), pa.int64()),
        (pa.array([float("nan")]), pa.int64()),
        (pa.array([2**63], pa.uint64()), pa.int64()),
        (pa.array(["twelve"]), pa.int64()),
        (pa.array([" 1"]), pa.float32()),
        (pa.array([""]), pa.float32()),
        (pa.array(["1e300"]), pa.float32()),
        (pa.array([b"\xff"]), pa.string()),
        (pa.array([1.0]), pa.string()),
        (pa.array([1]), pa.binary()),
        (pa.array([1], pa.timestamp("ms")), pa.int64()),
    ],
)
def test_losses_are_refused(values, target):
    with pytest.raises(pa.ArrowInvalid):
        cast_values(values, target)

"""Doubles and decimals to float32, compared with exact arithmetic."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etl.tfrecord.lowering.floats import FLOAT32_MAX, NarrowDecimals, NarrowDoubles
from etl.tfrecord.lowering.types import plan_value
from etl.tfrecord.policies import ColumnPolicy

INF = float("inf")


@given(st.lists(st.none() | st.floats(), max_size=10))
def test_exact_refuses_the_first_value_that_changes(values: list[float | None]) -> None:
    array = pa.array(values, pa.float64())
    _, refusal = NarrowDoubles("exact").convert(array)
    with np.errstate(over="ignore"):
        changed = [
            v is not None and v == v and float(np.float32(v)) != v for v in values
        ]  # fmt: skip
    assert (None if refusal is None else refusal.index) == (
        changed.index(True) if any(changed) else None
    )


@pytest.mark.parametrize("value", [1e39, -1e300, 16777217.0, 2.0**53 + 2, 1e-60, -5e-324])
def test_error_refuses_gross_changes(value: float) -> None:
    _, refusal = NarrowDoubles("error").convert(pa.array([None, 0.1, value, value]))
    assert refusal is not None
    assert refusal.index == 2


def test_error_rounds_everything_else() -> None:
    values = [0.1, 16777216.0, 16777217.5, INF, -INF, 1e-40, FLOAT32_MAX, None, -0.0]
    narrowed, refusal = NarrowDoubles("error").convert(pa.array(values))
    assert refusal is None
    assert narrowed.to_pylist() == [None if v is None else float(np.float32(v)) for v in values]
    assert np.isnan(NarrowDoubles("exact").convert(pa.array([float("nan")]))[0][0].as_py())


def test_beyond_the_range_casts_to_infinity_and_clips_to_the_largest() -> None:
    values = pa.array([1e300, -1e39, INF, -INF, 1.0, None])
    cast, _ = NarrowDoubles("cast").convert(values)
    clip, _ = NarrowDoubles("clip").convert(values)
    assert cast.to_pylist() == [INF, -INF, INF, -INF, 1.0, None]
    assert clip.to_pylist() == [FLOAT32_MAX, -FLOAT32_MAX, INF, -INF, 1.0, None]


def test_reads_a_slice() -> None:
    values = pa.array([1e300, None, 0.5, 1e300]).slice(1, 2)
    narrowed, refusal = NarrowDoubles("exact").convert(values)
    assert (narrowed.to_pylist(), refusal) == ([None, 0.5], None)


@given(st.lists(st.none() | st.decimals(-(10**15), 10**15, places=4), max_size=6))
def test_decimals_become_the_nearest_float32(values: list[Decimal | None]) -> None:
    array = pa.array(values, pa.decimal128(38, 4))
    narrowed, _ = plan_value(array.type, ColumnPolicy(float64="cast"), False).convert(array)
    for value, got in zip(values, narrowed.to_pylist(), strict=True):
        if value is None:
            assert got is None
            continue
        near = np.float32(got)
        distance = abs(Fraction(got) - Fraction(value))
        for other in (np.nextafter(near, np.float32(INF)), np.nextafter(near, np.float32(-INF))):
            # Half an ulp, up to the rounding of the double between.
            assert distance <= abs(Fraction(float(other)) - Fraction(value)) * (
                1 + Fraction(1, 2**20)
            )


@given(st.lists(st.decimals(-(10**9), 10**9, places=6), min_size=1, max_size=6))
def test_exact_decimals_are_compared_exactly(values: list[Decimal]) -> None:
    array = pa.array([*values, None], pa.decimal128(38, 20))
    _, refusal = NarrowDecimals().convert(array)
    changed = [Fraction(float(np.float32(float(v)))) != Fraction(v) for v in values]
    assert (None if refusal is None else refusal.index) == (
        changed.index(True) if any(changed) else None
    )


def test_a_decimal_that_only_its_double_hides_is_refused() -> None:
    close = pa.array([Decimal("1.00000000000000000001")], pa.decimal128(38, 20))
    assert NarrowDecimals().convert(close)[1] is not None
    half = pa.array([Decimal("0.5"), Decimal("12345678")], pa.decimal128(38, 20))
    assert NarrowDecimals().convert(half)[1] is None


def test_the_connectors_decimal() -> None:
    price = pa.array([Decimal("12.34")], pa.decimal128(10, 2))
    for mode in ("cast", "clip"):
        rule = plan_value(price.type, ColumnPolicy(float64=mode), False)  # type: ignore[arg-type]
        assert rule.convert(price)[0].to_pylist() == [float(np.float32(12.34))]


def test_a_decimal_beyond_float32_is_refused() -> None:
    huge = pa.array([Decimal("1e60")], pa.decimal256(70, 0))
    rule = plan_value(huge.type, ColumnPolicy(), in_place=True)
    assert rule.convert(huge)[1] is not None

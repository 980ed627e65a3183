from __future__ import annotations

from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.statistics.values import DENSE_VALUES, BytesValues, Float32Values, Int64Values

INTEGERS = st.lists(
    st.one_of(st.integers(0, 3), st.integers(-(2**63), 2**63 - 1), st.just(DENSE_VALUES)),
    max_size=60,
)


def check_frequencies(result: dict, values: list) -> None:
    ordered = sorted(Counter(values).items(), key=lambda item: (-item[1], item[0]))
    assert result["top"] == {"values": [list(item) for item in ordered[:20]], "exact": True}
    assert result["distinct"]["count"] == len(set(values))
    assert result["distinct"]["exact"]


def check_moments(result: dict, values: list) -> None:
    if not values:
        assert (result["min"], result["max"], result["mean"], result["std"]) == (None,) * 4
        return
    numbers = np.array(values, np.float64)
    assert (result["min"], result["max"]) == (min(values), max(values))
    scale = float(np.abs(numbers).max())
    assert result["mean"] == pytest.approx(numbers.mean(), rel=1e-9, abs=1e-9 * scale)
    assert result["std"] == pytest.approx(numbers.std(), rel=1e-6, abs=1e-6 * scale)


@settings(deadline=None)
@given(INTEGERS, INTEGERS)
def test_integers(first, second):
    values = Int64Values()
    values.update(pa.array(first, pa.int64()))
    values.update(pa.array([0, *second], pa.int64())[1:])
    whole = first + second
    result = values.to_dict()
    assert (result["zeros"], result["oov"]) == (whole.count(0), whole.count(1))
    check_frequencies(result, whole)
    check_moments(result, whole)


@settings(deadline=None)
@given(st.lists(st.one_of(st.floats(width=32), st.sampled_from([0.0, -0.0, 1.0])), max_size=60))
def test_floats(floats):
    values = Float32Values()
    values.update(pa.array(floats[:20], pa.float32()))
    values.update(pa.array(floats[20:], pa.float64()))  # written as float32
    finite = [value for value in floats if np.isfinite(value)]
    result = values.to_dict()
    assert result["nan"] == int(np.isnan(floats).sum())
    assert result["infinite"] == int(np.isinf(floats).sum())
    assert result["zeros"] == finite.count(0.0)
    assert sum(item["count"] for item in result["histogram"]) == len(finite)
    check_frequencies(result, finite)
    check_moments(result, finite)


@settings(deadline=None)
@given(st.lists(st.text("ab é漢\0", max_size=12), max_size=60))
def test_strings(texts):
    values = BytesValues()
    values.update(pa.array(texts, pa.string())[3:])
    values.update(pa.array(texts[:3], pa.large_binary()))
    check_frequencies(values.to_dict(), texts)


def test_long_and_undecodable_strings_stay_apart_and_short():
    values = BytesValues()
    values.update(pa.array([b"x" * 500 + b"1", b"x" * 500 + b"2", b"\xff", b"x" * 500 + b"2"]))
    shown = [text for text, _ in values.to_dict()["top"]["values"]]
    assert len(set(shown)) == 3
    assert all(len(text) <= 64 for text in shown)
    assert "\\xff" in shown


@pytest.mark.parametrize(
    ("values", "numbers"),
    [
        (Int64Values(), np.arange(-50_000, 100_000)),
        (Float32Values(), np.arange(100_000, dtype=np.float32)),
        (BytesValues(), np.arange(100_000).astype(str)),
    ],
)
def test_many_values_are_estimated_and_leaders_still_exact(values, numbers):
    leader = numbers[70_000]
    values.update(pa.array([leader] * 10))
    for batch in np.array_split(numbers, 10):
        values.update(pa.array(batch))
    result = values.to_dict()
    assert not result["distinct"]["exact"]
    assert result["distinct"]["count"] == pytest.approx(len(numbers), rel=0.13)
    assert result["top"]["values"][0] == [leader, 11]
    assert not result["top"]["exact"]  # 20 of 100,000 that occur once
    assert len(result["sketch"]) < 10_000

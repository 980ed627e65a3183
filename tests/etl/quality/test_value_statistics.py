"""Statistics of values: moments, histograms, values by type."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.quality.value_statistics import (
    DENSE_VALUES,
    FLOAT_BINS,
    BytesValues,
    Float32Values,
    Int64Values,
    RunningMoments,
    float_histogram,
    length_bins,
    length_histogram,
    merge_histograms,
)

NUMBERS = st.lists(st.floats(-1e6, 1e6), max_size=20)


def moments(values: list[float]) -> RunningMoments:
    if not values:
        return RunningMoments()
    array = np.array(values)
    squares = float(np.square(array - array.mean()).sum())
    return RunningMoments(len(values), float(array.mean()), squares, min(values), max(values))


@settings(deadline=None)
@given(st.lists(NUMBERS, max_size=5))
def test_merging_equals_one_pass(parts):
    merged = RunningMoments()
    for part in parts:
        merged = merged.merge(moments(part))
    whole = [value for part in parts for value in part]
    result = merged.to_json()
    if not whole:
        assert result == {"min": None, "max": None, "mean": None, "std": None}
        return
    assert (result["min"], result["max"]) == (min(whole), max(whole))
    assert result["mean"] == pytest.approx(np.mean(whole), rel=1e-9, abs=1e-6)
    assert result["std"] == pytest.approx(np.std(whole), rel=1e-6, abs=1e-6)


def test_a_large_offset_does_not_swallow_the_spread():
    offset = 1e15
    left, right = moments([offset, offset + 1]), moments([offset + 2, offset + 3])
    assert left.merge(right).to_json()["std"] == pytest.approx(np.std([0, 1, 2, 3]))


def test_json_keeps_the_moments():
    original = moments([1.0, 2.0, 4.0])
    again = RunningMoments.from_json(3, original.to_json())
    assert again.squares == pytest.approx(original.squares)
    assert (again.mean, again.minimum, again.maximum) == (original.mean, 1.0, 4.0)
    assert RunningMoments.from_json(0, RunningMoments().to_json()) == RunningMoments()


FINITE = st.floats(allow_nan=False, allow_infinity=False, width=32)


def bins_of(values: list[float]) -> np.ndarray:
    bits = (np.array(values, np.float32) + np.float32(0)).view(np.uint32)  # -0.0 + 0 is 0
    return np.bincount(bits >> 23, minlength=FLOAT_BINS)


@settings(deadline=None)
@given(st.lists(st.integers(0, 5000)))
def test_each_length_is_in_its_power_of_two(lengths):
    histogram = length_histogram(length_bins(np.array(lengths, np.int32)))
    for item in histogram:
        assert item["count"] == sum(item["low"] <= n <= item["high"] for n in lengths) > 0
        assert item["high"] <= max(1, 2 * item["low"])
    assert sum(item["count"] for item in histogram) == len(lengths)


def test_length_bins_are_those_promised():
    histogram = length_histogram(length_bins(np.array([0, 1, 2, 3, 4, 7, 8])))
    assert [(i["low"], i["high"], i["count"]) for i in histogram] == [
        (0, 0, 1), (1, 1, 1), (2, 3, 2), (4, 7, 2), (8, 15, 1),
    ]  # fmt: skip


@settings(deadline=None)
@given(st.lists(FINITE))
def test_each_float_is_in_its_bin(values):
    histogram = float_histogram(bins_of(values))
    for item in histogram:
        if item["low"] >= 0:
            inside = [v for v in values if item["low"] <= v < item["high"]]
        else:
            inside = [v for v in values if item["low"] < v <= item["high"] and v != 0]
        assert item["count"] == len(inside) > 0
        assert math.isfinite(item["low"])
        assert math.isfinite(item["high"])
    assert sum(item["count"] for item in histogram) == len(values)


@settings(deadline=None)
@given(st.lists(st.lists(FINITE), max_size=4))
def test_histogram_merging_equals_one_pass(parts):
    whole = [value for part in parts for value in part]
    merged = merge_histograms([float_histogram(bins_of(part)) for part in parts])
    assert merged == float_histogram(bins_of(whole))


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

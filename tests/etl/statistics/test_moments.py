from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.statistics.moments import Moments

NUMBERS = st.lists(st.floats(-1e6, 1e6), max_size=20)


def moments(values: list[float]) -> Moments:
    if not values:
        return Moments()
    array = np.array(values)
    squares = float(np.square(array - array.mean()).sum())
    return Moments(len(values), float(array.mean()), squares, min(values), max(values))


@settings(deadline=None)
@given(st.lists(NUMBERS, max_size=5))
def test_merging_equals_one_pass(parts):
    merged = Moments()
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
    again = Moments.from_json(3, original.to_json())
    assert again.squares == pytest.approx(original.squares)
    assert (again.mean, again.minimum, again.maximum) == (original.mean, 1.0, 4.0)
    assert Moments.from_json(0, Moments().to_json()) == Moments()

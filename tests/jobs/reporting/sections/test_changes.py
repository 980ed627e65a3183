from __future__ import annotations

import numpy as np
import pytest

from etl.quality.distribution import OTHER, Overlay
from jobs.reporting.sections.changes import shorten


def laid(names: list[str], before: list[float], after: list[float], ordered: bool = False):
    return Overlay(tuple(names), np.array(before), np.array(after), ordered)


def test_few_values_are_all_shown():
    bars = shorten(laid(["a", "b"], [3, 1], [2, 2]))
    assert (bars.names, bars.before, bars.after) == (["a", "b"], [0.75, 0.25], [0.5, 0.5])
    assert not bars.has_rest


def test_what_was_not_counted_by_value_has_no_bar_of_its_own():
    bars = shorten(laid(["a", OTHER, "b"], [1, 90, 9], [2, 98, 0]))
    assert (bars.names, bars.places) == (["a", "b"], [0, 2])
    assert bars.rest == pytest.approx((0.9, 0.98))
    assert bars.has_rest


def test_of_many_values_the_most_frequent_are_shown_and_the_rest_is_told():
    names = [f"value {'long ' * 3}{n}" for n in range(30)]
    before = [float(n) for n in range(30)]
    bars = shorten(laid(names, before, before))
    assert bars.places == list(range(29, 19, -1))
    assert all(len(name) <= 14 for name in bars.names)
    assert sum(bars.before) + bars.rest[0] == pytest.approx(1)
    # Bins that rise stay in their order.
    assert shorten(laid(names, before, before, ordered=True)).places == list(range(20, 30))

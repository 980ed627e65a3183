from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from jobs.reporting.plots import (
    FlowStep,
    plot_flow,
    plot_learning,
    plot_metric_bars,
    plot_popularity,
)


def _text(svg: object) -> str:
    source = str(svg).replace("<svg ", '<svg xmlns:xlink="x" ', 1)
    return " ".join(t for t in ElementTree.fromstring(source).itertext() if t.strip())


def _widths(svg: object, variable: str) -> list[float]:
    """Widths of the rectangles of a colour, bottom edge to right edge."""
    found = []
    for path, style in re.findall(r'<path d="([^"]+)"[^>]*style="([^"]*)"', str(svg)):
        if f"fill: var(--{variable})" in style:
            xs = [float(x) for x in re.findall(r"[ML] ([\d.]+) [\d.]+", path)]
            found.append(max(xs) - min(xs))
    return found


def test_metric_bars_name_the_systems_and_cut_offs():
    values = {"DSSM": [0.1, 0.3], "Popularity": [0.05, 0.1]}
    svg = plot_metric_bars({"Hit rate": values, "NDCG": values}, [5, 10], "what it shows")
    text = _text(svg)
    for word in ("Hit rate", "NDCG", "DSSM", "Popularity", "@5", "@10", "0.30"):
        assert word in text
    assert 'aria-label="what it shows"' in str(svg)


def test_the_flow_s_bars_are_as_long_as_their_rows():
    steps = [
        FlowStep("Read", {"rows": 1000}),
        FlowStep("Parsed", {"rows": 750}, 250, "bad rows"),
        FlowStep("Written", {"train": 500, "test": 250}),
    ]
    svg = plot_flow(steps, "flow")
    read, parsed, train = _widths(svg, "model")[:3]
    assert parsed / read == pytest.approx(0.75, abs=0.01)
    assert train / read == pytest.approx(0.5, abs=0.01)
    assert _widths(svg, "loss")[0] / read == pytest.approx(0.25, abs=0.01)
    assert "left out: 250, bad rows" in _text(svg)


def test_the_flow_of_no_rows_is_drawn():
    assert "Read" in _text(plot_flow([FlowStep("Read", {"rows": 0})], "flow"))


def test_learning_curves_leave_gaps_where_a_value_is_missing():
    curves = {"Loss": [3.0, math.nan, 2.0], "NDCG@10": [0.1, 0.2, math.nan]}
    assert "NDCG@10" in _text(plot_learning([1, 2, 3], curves, 3, "curves"))


def test_a_single_epoch_is_drawn():
    assert "Loss" in _text(plot_learning([1], {"Loss": [3.0]}, None, "curves"))


@pytest.mark.parametrize("counts", [[], [0, 0], [5], [7, 7, 7], [10_000_000, 3, 1, 0]])
def test_any_popularity_is_drawn(counts):
    assert "occurrences" in _text(plot_popularity(np.array(counts, np.int64), "curve"))


def test_the_popularity_curve_stays_small_for_a_large_catalogue():
    counts = np.arange(2_000_000, 0, -1)
    assert len(plot_popularity(counts, "curve")) < 60_000

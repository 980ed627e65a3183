from __future__ import annotations

import math
import re
import warnings
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import matplotlib
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from jobs.reporting.dataset_sections import FlowStep
from jobs.reporting.page import load_templates
from jobs.reporting.plots import COLOURS, draw, plot_bars, plot_curves
from jobs.reporting.run_data import ItemCatalogue, RunData
from jobs.support.formatting import (
    MISSING,
    format_bytes,
    format_count,
    format_metric,
    format_number,
    format_seconds,
    format_share,
    metric_order,
    metric_title,
)
from tests.jobs.reporting.pages import Page, show


def _draw(name: str = "demo", text: str = "title") -> str:
    def paint(canvas: Figure) -> None:
        axis = canvas.subplots()
        axis.plot([0, 1], [0, 1], color=COLOURS["model"], label=text)
        axis.set_title(text)
        axis.legend()

    return str(draw(name, f"label of {text}", 120, paint))


def test_the_same_figure_gives_the_same_bytes():
    assert _draw() == _draw()


def test_text_of_any_script_is_drawn_without_a_word_about_fonts():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "电影 फ़िल्म" in _draw(text="电影 फ़िल्म")


def test_two_figures_on_a_page_share_no_id():
    ids = [set(re.findall(r'id="([^"]+)"', _draw(name))) for name in ("a", "b")]
    assert ids[0]
    assert not ids[0] & ids[1]


def test_references_follow_the_renamed_ids():
    svg = _draw()
    referenced = set(re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', svg))
    assert referenced
    assert {a or b for a, b in referenced} <= set(re.findall(r'id="([^"]+)"', svg))


def test_colours_are_the_page_s_variables_and_fonts_are_inherited():
    svg = _draw()
    assert "var(--model)" in svg
    assert COLOURS["model"] not in svg
    assert "DejaVu" not in svg
    assert "<style" not in svg


def test_carries_no_date_and_needs_nothing_from_elsewhere():
    svg = _draw()
    assert "<metadata" not in svg
    assert not re.search(r"https?://(?!www\.w3\.org/(2000/svg|1999/xlink))", svg)


@pytest.mark.parametrize("text", ["<script>alert(1)</script>", "$x_1", "a & b", 'say "#123456"'])
def test_text_is_escaped_and_shown_as_it_is(text):
    svg = _draw(text=text)
    root = ElementTree.fromstring(svg.replace("<svg ", '<svg xmlns:xlink="x" ', 1))
    assert text in "".join(root.itertext())
    assert root.get("aria-label") == f"label of {text}"


def test_a_user_s_own_matplotlib_settings_change_nothing_and_are_kept():
    expected = _draw()
    with matplotlib.rc_context({"axes.grid": False, "font.size": 33, "svg.fonttype": "path"}):
        assert _draw() == expected
        assert matplotlib.rcParams["font.size"] == 33


def _histogram(bins, label: str) -> str:
    blocks = load_templates().get_template("blocks.html.j2").module
    return str(blocks.histogram(bins, label))


def test_a_histogram_s_bars_are_as_tall_as_their_counts():
    svg = _histogram([("0", 5), ("1", 20), ("2 to 3", 0)], "Lengths of <b>")
    Page(svg)
    heights = [float(h) for h in re.findall(r'<rect [^>]*height="([\d.]+)"', svg)]
    assert heights[0] == pytest.approx(heights[1] / 4, abs=0.1)
    assert heights[2] == 0
    assert "2 to 3: 0" in svg
    assert "<b>" not in svg


def test_a_histogram_of_empty_bins_is_drawn():
    ElementTree.fromstring(_histogram([("0", 0)], "nothing").strip())


def _text(svg: object) -> str:
    source = str(svg).replace("<svg ", '<svg xmlns:xlink="x" ', 1)
    return " ".join(t for t in ElementTree.fromstring(source).itertext() if t.strip())


def _funnel(steps: list[FlowStep]) -> object:
    return load_templates().get_template("blocks.html.j2").module.funnel("flow", steps)


def _widths(svg: object, variable: str) -> list[float]:
    """Widths of the rectangles of a colour."""
    found = re.findall(r'<rect [^>]*width="([^"]+)"[^>]*style="([^"]*)"', str(svg))
    return [float(width) for width, style in found if f"fill: var(--{variable})" in style]


def test_metric_bars_name_the_systems_and_cut_offs():
    values = {"DSSM": [0.1, 0.3], "Popularity": [0.05, 0.1]}
    svg = plot_bars("metrics", "what it shows", {"Hit rate": values, "NDCG": values}, ["@5", "@10"])
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
    svg = _funnel(steps)
    read, parsed, train = _widths(svg, "model")[:3]
    assert parsed / read == pytest.approx(0.75, abs=0.01)
    assert train / read == pytest.approx(0.5, abs=0.01)
    assert _widths(svg, "loss")[0] / read == pytest.approx(0.25, abs=0.01)
    assert "left out: 250, bad rows" in _text(svg)


def test_the_flow_of_no_rows_is_drawn():
    assert "Read" in _text(_funnel([FlowStep("Read", {"rows": 0})]))


def test_learning_curves_leave_gaps_where_a_value_is_missing():
    curves = {"Loss": [3.0, math.nan, 2.0], "NDCG@10": [0.1, 0.2, math.nan]}
    svg = plot_curves("learning", "curves", ("epoch", [1, 2, 3]), curves, best=3)
    assert "NDCG@10" in _text(svg)


def test_a_single_epoch_is_drawn():
    assert "Loss" in _text(plot_curves("learning", "curves", ("epoch", [1]), {"Loss": [3.0]}))


def _popularity(counts: np.ndarray) -> Element:
    catalogue = ItemCatalogue(counts, pa.array(["token"] * len(counts)))
    return show("popularity", RunData(Path("run"), {}, catalogue=catalogue)).plots[0]


@pytest.mark.parametrize("counts", [[0, 0], [5], [7, 7, 7], [10_000_000, 3, 1, 0]])
def test_any_popularity_is_drawn(counts):
    plot = _popularity(np.array(counts, np.int64))
    assert "occurrences" in " ".join(plot.itertext())
    assert f"from {counts[0]:,} down to {counts[-1]}." in plot.get("aria-label")


def test_the_popularity_curve_stays_small_for_a_large_catalogue():
    counts = np.arange(2_000_000, 0, -1)
    assert len(ElementTree.tostring(_popularity(counts))) < 60_000


def test_shares_of_two_versions_have_a_legend_and_no_numbers_above_the_bars():
    alone = {"share of the values": {"now": [0.25, 0.75]}}
    both = {"share of the values": {"before": [0.5, 0.5], "now": [0.25, 0.75]}}
    one, two = (
        _text(plot_bars("s", "shares", p, ["a", "b"], as_shares=True)) for p in (alone, both)
    )
    assert "75.0%" in one
    assert "75.0%" not in two
    assert ("before" in one, "before" in two) == (False, True)


ALL = (format_bytes, format_count, format_metric, format_number, format_seconds, format_share)


@pytest.mark.parametrize("form", ALL)
@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf, "7", True])
def test_what_is_no_number_is_missing(form, value):
    assert form(value) == MISSING


@pytest.mark.parametrize(
    ("form", "value", "expected"),
    [
        (format_count, 1_000_209, "1,000,209"),
        (format_bytes, 999, "999 B"),
        (format_bytes, 999.9, "1.0 kB"),
        (format_bytes, 12_345_678, "12.3 MB"),
        (format_bytes, 999_999_999, "1.0 GB"),
        (format_bytes, 4.2e15, "4,200.0 TB"),
        (format_seconds, 0.084, "84 ms"),
        (format_seconds, 12.34, "12.3 s"),
        (format_seconds, 59.97, "1 min 00 s"),
        (format_seconds, 125, "2 min 05 s"),
        (format_seconds, 3599.6, "1 h 00 min"),
        (format_seconds, 12_000, "3 h 20 min"),
        (format_share, 0.2213, "22.1%"),
        (format_share, 0.0031234, "0.312%"),
        (format_share, 0.00001, "0.00100%"),
        (format_share, 0.000_004, "<0.001%"),
        (format_share, 0.9997, ">99.9%"),
        (format_number, 3.0, "3"),
        (format_number, 11.2749, "11.27"),
        (format_number, 1_001_234_567.5, "1,001,234,568"),
        (format_metric, 0.12345, "0.1235"),
        (format_metric, -0.00001, "0.0000"),
    ],
)
def test_reads_as_people_write_it(form, value, expected):
    assert form(value) == expected


@given(st.floats(0, 1, exclude_min=True, exclude_max=True))
def test_a_share_inside_the_bounds_never_reads_as_one_of_them(share):
    assert format_share(share) not in ("0%", "0.0%", "100%", "100.0%")


@pytest.mark.parametrize("form", ALL)
@given(value=st.floats(0, 1e15))
def test_every_number_has_a_text(form, value):
    assert form(value) not in ("", MISSING)


def test_titles():
    names = ("hit_rate@10", "ndcg@5", "mrr", "custom@3")
    assert [metric_title(m) for m in names] == ["HR@10", "NDCG@5", "MRR", "custom@3"]


def test_cut_offs_are_ordered_as_numbers():
    shuffled = ["mrr", "ndcg@10", "hit_rate@10", "other", "hit_rate@5", "ndcg@5", "recall@1"]
    assert sorted(shuffled, key=metric_order) == [
        "hit_rate@5", "hit_rate@10", "ndcg@5", "ndcg@10", "recall@1", "mrr", "other",
    ]  # fmt: skip

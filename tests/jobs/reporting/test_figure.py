from __future__ import annotations

import re
from xml.etree import ElementTree

import matplotlib
import pytest

from jobs.reporting.figure import COLOURS, PlotStyle, render_histogram


def _draw(name: str = "demo", text: str = "title") -> str:
    with PlotStyle() as style:
        canvas = style.canvas(200, 120)
        axis = canvas.subplots()
        axis.plot([0, 1], [0, 1], color=COLOURS["model"], label=text)
        axis.set_title(text)
        axis.legend()
        return str(style.render(canvas, name, f"label of {text}"))


def test_the_same_figure_gives_the_same_bytes():
    assert _draw() == _draw()


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


def test_a_histogram_s_bars_are_as_tall_as_their_counts():
    svg = str(render_histogram([("0", 5), ("1", 20), ("2 to 3", 0)], "Lengths of <b>"))
    heights = [float(h) for h in re.findall(r'<rect [^>]*height="([\d.]+)"', svg)]
    assert heights[0] == pytest.approx(heights[1] / 4, abs=0.1)
    assert heights[2] == 0
    assert "2 to 3: 0" in svg
    assert "<b>" not in svg


def test_an_empty_histogram_is_drawn():
    ElementTree.fromstring(str(render_histogram([], "nothing")))

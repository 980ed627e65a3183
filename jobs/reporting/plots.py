"""Bars and curves of the report: plain numbers in, an inline SVG in the page's colours out.

The same numbers always give the same bytes: no date, no random ids, no font paths.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.resources import as_file, files
from itertools import cycle
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import LogLocator, MaxNLocator

from jobs.support.formatting import format_count, format_share

# Colour by role, light scheme. The SVG names the CSS variable `--<role>` instead of the value,
# so each value must be unique; the template's style sheet has the dark values.
COLOURS = {
    "ink": "#1b2633",
    "muted": "#5a6675",
    "line": "#dfe3e8",
    "surface": "#ffffff",
    "model": "#2b6cb0",
    "model-soft": "#8fb8de",
    "model-pale": "#c9ddf0",
    "rival": "#c8862a",
    "neutral": "#98a2ae",
    "loss": "#b5483d",
}

_STYLE = files("jobs.reporting") / "plots.mplstyle"
_SVG_ID = re.compile(r'\b(id="|href="#|url\(#)([^")]+)')
_SVG_FONT = re.compile(r"font-family:[^;\"]*;?|font:\s*([\d.]+px)[^;\"]*(;?)")
_SVG_COLOUR = re.compile(r"#[0-9a-fA-F]{6}\b")
# An inline <style> would apply to the whole page; the page's own sheet has its rule.
_SVG_UNWANTED = re.compile(r"<metadata>.*?</metadata>|<!--.*?-->|<style.*?</style>", re.DOTALL)
_SVG_TAG = re.compile(r"<[^>]*>")
WIDTH_PT = 440.0
_TONES = ("model", "rival", "neutral", "model-soft", "loss")
_MARKED_POINTS = 30
_TICK_CHARS = 44
_VARIABLES = {value: f"var(--{role})" for role, value in COLOURS.items()}

Values = Sequence[float] | np.ndarray
Series = Mapping[str, Values]


def draw(name: str, label: str, height_pt: float, paint: Callable[[Canvas], None]) -> Markup:
    """Returns a figure as an `<svg>` element.

    Args:
        name: Prefix of its ids; unique on the page.
        label: Description of the figure for readers who cannot see it.
        height_pt: Height in points.
        paint: Draws on the empty figure.
    """
    with matplotlib.rc_context(_read_style()), warnings.catch_warnings():
        # Its font lacks most scripts; the text is drawn by the browser, which has fonts for them.
        warnings.filterwarnings("ignore", r"Glyph \d+")
        size = (WIDTH_PT / 72, height_pt / 72)
        canvas = Canvas(figsize=size, dpi=72, layout="constrained")
        paint(canvas)
        buffer = io.StringIO()
        undated = {"Date": None, "Creator": None, "Type": None, "Format": None}
        FigureCanvasSVG(canvas).print_svg(buffer, metadata=undated)
    return _inline(buffer.getvalue(), name, label)


@cache
def _read_style() -> Any:
    """The report's settings over matplotlib's defaults: a user's own matplotlibrc has no effect."""
    with as_file(_STYLE) as path:  # Sluice may be running from an archive
        settings = dict(matplotlib.rc_params_from_file(path))
    return {name: value for name, value in settings.items() if "backend" not in name}


def _inline(svg: str, name: str, label: str) -> Markup:
    """The drawing's content in an element of the page's own."""
    content = _SVG_UNWANTED.sub("", svg[svg.index(">", svg.index("<svg")) + 1 :]).strip()
    view_box = re.findall(r'viewBox="([\d. -]+)"', svg)[0]
    head = Markup('<svg class="plot" viewBox="{}" role="img" aria-label="{}">')
    # The content is matplotlib's own output, which escapes the text that it draws.
    body = Markup(_SVG_TAG.sub(lambda tag: _restyle(tag.group(0), name), content))  # noqa: S704
    return head.format(view_box, label) + body


def _restyle(tag: str, name: str) -> str:
    """A tag with ids of its own, the page's font, and the page's colours."""
    tag = _SVG_ID.sub(lambda match: f"{match.group(1)}{name}-{match.group(2)}", tag)
    tag = _SVG_FONT.sub(lambda m: f"font-size: {m.group(1)}{m.group(2)}" if m.group(1) else "", tag)
    return _SVG_COLOUR.sub(lambda m: _VARIABLES.get(m.group(0).lower(), m.group(0)), tag)


def plot_bars(
    name: str,
    label: str,
    panels: Mapping[str, Series],
    ticks: Sequence[str],
    as_shares: bool = False,
) -> Markup:
    """Bars side by side, one panel below the other.

    Args:
        name: Prefix of the drawing's ids; unique on the page.
        label: Description of the plot for readers who cannot see it.
        panels: Title -> series -> values `[len(ticks)]`. The bars of the first series have their
            values written above them.
        ticks: Names of the bars' groups.
        as_shares: Whether the values are shares, shown as percentages.
    """

    def paint(canvas: Canvas) -> None:
        axes = canvas.subplots(len(panels), 1, squeeze=False)[:, 0]
        for axis, (title, series) in zip(axes, panels.items(), strict=True):
            _draw_bars(axis, series, ticks, format_share if as_shares else _short_metric)
            axis.set_title(title)
            if as_shares:
                axis.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}%")
            if sum(map(len, ticks)) > _TICK_CHARS:
                axis.tick_params(axis="x", labelrotation=35, labelsize=9)
        handles, names = axes[0].get_legend_handles_labels()
        if len(names) > 1 or not as_shares:
            canvas.legend(handles, names, loc="outside upper left", ncols=len(names))

    return draw(name, label, 165.0 * len(panels) + 25, paint)


def _short_metric(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def _draw_bars(
    axis: Axes, series: Series, ticks: Sequence[str], form: Callable[[float], str] | None
) -> None:
    width = 0.8 / max(len(series), 1)
    centres = np.arange(len(ticks))
    for index, (name, values) in enumerate(series.items()):
        offsets = centres + (index - (len(series) - 1) / 2) * width
        bars = axis.bar(
            offsets, values, width * 0.92, color=COLOURS[_TONES[index % len(_TONES)]], label=name
        )
        if index == 0 and form is not None:
            axis.bar_label(bars, fmt=form, padding=3, fontsize=9.5, color=COLOURS["ink"])
    axis.set_xticks(centres, ticks)
    axis.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
    axis.margins(x=0.02, y=0.14)


def plot_curves(
    name: str,
    label: str,
    x: tuple[str, Values],
    curves: Series,
    *,
    best: float | None = None,
    is_log: bool = False,
) -> Markup:
    """Curves over the same axis, one panel each; few points are marked.

    Args:
        name: Prefix of the drawing's ids; unique on the page.
        label: Description of the plot for readers who cannot see it.
        x: Title of the axis, and its values `[points]`, rising.
        curves: Title -> values `[points]`; NaN where there is none.
        best: The value of x that every panel marks, or None.
        is_log: Whether both axes are logarithmic; then x and the values are above 0.
    """
    title, points = x[0], list(x[1])

    def paint(canvas: Canvas) -> None:
        axes = canvas.subplots(len(curves), 1, squeeze=False, sharex=True)[:, 0]
        marker = "o" if len(points) <= _MARKED_POINTS and not is_log else None
        axes[-1].xaxis.set_major_locator(MaxNLocator(8, integer=True))
        for axis, (panel, values), tone in zip(axes, curves.items(), cycle(_TONES), strict=False):
            colour = COLOURS[tone]
            axis.plot(points, values, color=colour, marker=marker, markersize=4)
            axis.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
            axis.margins(x=0.03, y=0.12)
            axis.set_title(panel)
            if is_log and points:
                _draw_log(axis, points, values)
            if best is not None and best in points:
                _mark_best(axis, best, values[points.index(best)], colour)
        axes[-1].set_xlabel(title)

    return draw(name, label, (235.0 if is_log else 135.0) * len(curves) + 15, paint)


def _draw_log(axis: Axes, points: Values, values: Values) -> None:
    """Makes both axes logarithmic and fills the area under a falling curve."""
    bottom = values[-1] * 0.7
    axis.fill_between(points, values, bottom, color=COLOURS["model-pale"], alpha=0.55, linewidth=0)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_ylim(bottom=bottom)
    axis.margins(x=0.01)
    if values[0] < 300 * values[-1]:  # few decades: name the steps between them too
        axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    for which in (axis.xaxis, axis.yaxis):
        which.set_major_formatter(lambda value, _: format_count(value))
        which.set_minor_formatter("")


def _mark_best(axis: Axes, x: float, value: float, colour: str) -> None:
    axis.axvline(x, color=COLOURS["muted"], linewidth=1, linestyle=(0, (3, 3)))
    if np.isfinite(value):
        axis.plot([x], [value], marker="o", markersize=9, color=COLOURS["surface"],
                  markeredgecolor=colour, markeredgewidth=2)  # fmt: skip

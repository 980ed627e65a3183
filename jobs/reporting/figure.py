"""From a matplotlib figure to an inline SVG that follows the page's colours and fonts.

The same figure always gives the same bytes: no date, no random ids, no font paths.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure as Canvas

# Colour by role, light scheme. The SVG names the CSS variable `--<role>` instead of the value,
# so each must be unique; the dark values stand in the template's style sheet.
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

_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text: selectable, in the page's font
    "svg.hashsalt": "sluice",
    "text.parse_math": False,  # names may hold a dollar sign
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same layout everywhere
    "font.size": 11.0,
    "axes.titlesize": 11.0,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlecolor": COLOURS["ink"],
    "axes.labelsize": 10.5,
    "axes.labelcolor": COLOURS["muted"],
    "axes.edgecolor": COLOURS["line"],
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": COLOURS["line"],
    "grid.linewidth": 0.8,
    "text.color": COLOURS["ink"],
    "xtick.color": COLOURS["muted"],
    "ytick.color": COLOURS["muted"],
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 10.5,
    "figure.facecolor": "none",
    "lines.linewidth": 2.0,
}

_ID = re.compile(r'\b(id="|href="#|url\(#)([^")]+)')
_FONT = re.compile(r"font-family:[^;\"]*;?|font:\s*([\d.]+px)[^;\"]*(;?)")
_COLOUR = re.compile(r"#[0-9a-fA-F]{6}\b")
# An inline <style> would apply to the whole page; the page's own sheet has its rule.
_UNWANTED = re.compile(r"<metadata>.*?</metadata>|<!--.*?-->|<style.*?</style>", re.DOTALL)
_TEXT_SPLIT = re.compile(r"(<[^>]*>)")


class PlotStyle:
    """Context in which a figure is built and rendered: the report's matplotlib settings."""

    def __enter__(self) -> PlotStyle:
        # A user's own matplotlibrc must not change the report.
        defaults = {key: value for key, value in dict(matplotlib.rcParamsDefault).items()
                    if "backend" not in key}  # fmt: skip
        settings: Any = {**defaults, **_STYLE}
        self._context = matplotlib.rc_context(settings)
        self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)

    def canvas(self, width_pt: float, height_pt: float) -> Canvas:
        """Returns an empty figure of that size, laid out so that no text is cut."""
        return Canvas(figsize=(width_pt / 72, height_pt / 72), dpi=72, layout="constrained")

    def render(self, canvas: Canvas, name: str, label: str) -> Markup:
        """Returns the figure as an `<svg>` element.

        Args:
            canvas: The figure.
            name: Prefix of its ids; unique on the page.
            label: What the figure shows, for readers who cannot see it.
        """
        buffer = io.StringIO()
        FigureCanvasSVG(canvas).print_svg(
            buffer, metadata={"Date": None, "Creator": None, "Type": None, "Format": None}
        )
        return _inline(buffer.getvalue(), name, label)


def _inline(svg: str, name: str, label: str) -> Markup:
    body = svg[svg.index(">", svg.index("<svg")) + 1 :]
    body = _UNWANTED.sub("", body)
    box = re.search(r'viewBox="([\d. -]+)"', svg)
    view_box = "" if box is None else box.group(1)
    pieces = _TEXT_SPLIT.split(body)
    body = "".join(_restyle(piece, name) if piece.startswith("<") else piece for piece in pieces)
    # Only matplotlib's own output stands here: it escapes the text that it draws.
    head = Markup('<svg class="plot" viewBox="{}" role="img" aria-label="{}">').format(
        view_box, label
    )
    return head + Markup(body.strip())  # noqa: S704


def _restyle(tag: str, name: str) -> str:
    tag = _ID.sub(lambda match: f"{match.group(1)}{name}-{match.group(2)}", tag)
    tag = _FONT.sub(lambda m: f"font-size: {m.group(1)}{m.group(2)}" if m.group(1) else "", tag)
    return _COLOUR.sub(lambda match: _VARIABLES.get(match.group(0).lower(), match.group(0)), tag)


_VARIABLES = {value: f"var(--{role})" for role, value in COLOURS.items()}


def render_histogram(bins: Sequence[tuple[str, float]], label: str) -> Markup:
    """Returns a word-sized histogram.

    Args:
        bins: Name and count of each bin, in order.
        label: What the bins hold, for readers who cannot see them.
    """
    step, height = 7, 22
    top = max((count for _, count in bins), default=0) or 1
    rect = Markup('<rect x="{}" y="{:.1f}" width="{}" height="{:.1f}"><title>{}</title></rect>')
    tall = [max(count / top * height, 0.6 if count else 0.0) for _, count in bins]
    bars = Markup("").join(
        rect.format(index * step, height - tall[index], step - 1, tall[index],
                    f"{name}: {count:,.0f}")
        for index, (name, count) in enumerate(bins)
    )  # fmt: skip
    text = f"{label}: " + ", ".join(f"{name}: {count:,.0f}" for name, count in bins)
    width = max(len(bins), 1) * step
    return Markup(
        '<svg class="spark" width="{w}" height="{h}" viewBox="0 0 {w} {h}" role="img" '
        'aria-label="{label}">{bars}</svg>'
    ).format(w=width, h=height, label=text, bars=bars)

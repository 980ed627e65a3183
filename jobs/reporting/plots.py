"""Plots of the report: plain numbers in, an inline SVG in the page's colours and fonts out.

The same numbers always give the same bytes: no date, no random ids, no font paths.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from jobs.reporting.formatting import format_count, format_share

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

_SVG_ID = re.compile(r'\b(id="|href="#|url\(#)([^")]+)')
_SVG_FONT = re.compile(r"font-family:[^;\"]*;?|font:\s*([\d.]+px)[^;\"]*(;?)")
_SVG_COLOUR = re.compile(r"#[0-9a-fA-F]{6}\b")
# An inline <style> would apply to the whole page; the page's own sheet has its rule.
_SVG_UNWANTED = re.compile(r"<metadata>.*?</metadata>|<!--.*?-->|<style.*?</style>", re.DOTALL)
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
    body = _SVG_UNWANTED.sub("", body)
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
    tag = _SVG_ID.sub(lambda match: f"{match.group(1)}{name}-{match.group(2)}", tag)
    tag = _SVG_FONT.sub(lambda m: f"font-size: {m.group(1)}{m.group(2)}" if m.group(1) else "", tag)
    return _SVG_COLOUR.sub(
        lambda match: _VARIABLES.get(match.group(0).lower(), match.group(0)), tag
    )


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


WIDTH_PT = 440.0
_TONES = ("model", "rival", "neutral", "model-soft", "loss")
_CURVE_POINTS = 160
_TICK_CHARS = 44


@dataclass(frozen=True)
class FlowStep:
    """A stage of the data flow.

    Attributes:
        name: What happened up to here.
        kept: Rows that go on, by part (one part, or one per split).
        lost: Rows that stop here.
        why: Reasons, for the label.
    """

    name: str
    kept: Mapping[str, int]
    lost: int = 0
    why: str = ""


def plot_metric_bars(
    families: Mapping[str, Mapping[str, Sequence[float]]], ks: Sequence[int], label: str
) -> Markup:
    """Bars of each metric family over the cut-offs, one bar per system.

    Args:
        families: Family (`Hit rate`) -> system -> values `[len(ks)]`.
        ks: Cut-offs, rising.
        label: What the plot shows, for readers who cannot see it.
    """
    with PlotStyle() as style:
        canvas = style.canvas(WIDTH_PT, 165.0 * len(families) + 25)
        axes = canvas.subplots(len(families), 1, squeeze=False)[:, 0]
        for axis, (family, systems) in zip(axes, families.items(), strict=True):
            _draw_bars(axis, family, systems, [f"@{k}" for k in ks])
        handles, names = axes[0].get_legend_handles_labels()
        canvas.legend(handles, names, loc="outside upper left", ncols=len(names))
        return style.render(canvas, "metrics", label)


def _format_metric(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def _draw_bars(
    axis: Axes,
    title: str,
    systems: Mapping[str, Sequence[float]],
    ticks: Sequence[str],
    form: Callable[[float], str] | None = _format_metric,
) -> None:
    """Bars side by side; those of the first system have their values written by `form`, if any."""
    width = 0.8 / max(len(systems), 1)
    centres = np.arange(len(ticks))
    for index, (system, values) in enumerate(systems.items()):
        offsets = centres + (index - (len(systems) - 1) / 2) * width
        colour = COLOURS[_TONES[index % len(_TONES)]]
        axis.bar(offsets, values, width * 0.92, color=colour, label=system)
        if index == 0 and form is not None:
            for x, value in zip(offsets, values, strict=True):
                axis.annotate(form(value), (x, value), (0, 3), textcoords="offset points",
                              ha="center", fontsize=9.5, color=COLOURS["ink"])  # fmt: skip
    axis.set_title(title)
    axis.set_xticks(centres, ticks)
    axis.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
    axis.margins(x=0.02, y=0.14)


def plot_learning(
    epochs: Sequence[int],
    curves: Mapping[str, Sequence[float]],
    best_epoch: int | None,
    label: str,
) -> Markup:
    """Learning curves, one panel each, with the best epoch marked.

    Args:
        epochs: Epoch numbers, rising.
        curves: Title -> values `[len(epochs)]`; NaN where an epoch has none.
        best_epoch: The epoch whose weights were kept, or None.
        label: What the plot shows, for readers who cannot see it.
    """
    with PlotStyle() as style:
        canvas = style.canvas(WIDTH_PT, 150.0 * len(curves) + 15)
        axes = canvas.subplots(len(curves), 1, squeeze=False, sharex=True)[:, 0]
        for axis, (title, values), tone in zip(axes, curves.items(), _TONES, strict=False):
            axis.plot(epochs, values, color=COLOURS[tone], marker="o", markersize=4)
            axis.set_title(title)
            axis.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
            axis.margins(x=0.04, y=0.12)
            if best_epoch is not None and best_epoch in epochs:
                _mark_best(axis, best_epoch, values[list(epochs).index(best_epoch)], tone)
        axes[-1].set_xlabel("epoch")
        axes[-1].xaxis.set_major_locator(MaxNLocator(8, integer=True))
        return style.render(canvas, "learning", label)


def plot_curves(
    x: Sequence[float] | np.ndarray,
    curves: Mapping[str, Sequence[float] | np.ndarray],
    x_label: str,
    name: str,
    label: str,
) -> Markup:
    """Curves over the same axis, one panel each.

    Args:
        x: `[points]`, rising.
        curves: Title -> values `[points]`; NaN where there is none.
        x_label: What x is.
        name: Prefix of the drawing's ids; unique on the page.
        label: What the plot shows, for readers who cannot see it.
    """
    with PlotStyle() as style:
        canvas = style.canvas(WIDTH_PT, 120.0 * len(curves) + 15)
        axes = canvas.subplots(len(curves), 1, squeeze=False, sharex=True)[:, 0]
        for index, (axis, (title, values)) in enumerate(zip(axes, curves.items(), strict=True)):
            axis.plot(x, values, color=COLOURS[_TONES[index % len(_TONES)]], linewidth=1.4)
            axis.set_title(title)
            axis.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
            axis.margins(x=0.02, y=0.12)
        axes[-1].set_xlabel(x_label)
        axes[-1].xaxis.set_major_locator(MaxNLocator(8, integer=True))
        return style.render(canvas, name, label)


def _mark_best(axis: Axes, epoch: int, value: float, tone: str) -> None:
    axis.axvline(epoch, color=COLOURS["muted"], linewidth=1, linestyle=(0, (3, 3)))
    if np.isfinite(value):
        axis.plot([epoch], [value], marker="o", markersize=9, color=COLOURS["surface"],
                  markeredgecolor=COLOURS[tone], markeredgewidth=2)  # fmt: skip


def plot_flow(steps: Sequence[FlowStep], label: str) -> Markup:
    """The way of the event rows: one bar per stage, what is lost set apart by colour.

    Args:
        steps: Stages in order.
        label: What the plot shows, for readers who cannot see it.
    """
    with PlotStyle() as style:
        canvas = style.canvas(WIDTH_PT, 58.0 * len(steps) + 22)
        axis = canvas.subplots()
        widest = max((sum(step.kept.values()) + step.lost for step in steps), default=1) or 1
        parts = [name for name in steps[-1].kept if len(steps[-1].kept) > 1]
        for row, step in enumerate(steps):
            _draw_step(axis, row, step, widest)
        axis.set_ylim(len(steps) - 0.35, -0.75)
        axis.set_xlim(0, widest * 1.005)
        axis.set_axis_off()
        for name, tone in zip(parts, ("model", "model-soft", "model-pale"), strict=False):
            axis.bar(0, 0, color=COLOURS[tone], label=name)
        axis.bar(0, 0, color=COLOURS["loss"], label="left out")
        canvas.legend(loc="outside lower left", ncols=4, handlelength=1, handleheight=0.9)
        return style.render(canvas, "flow", label)


def _draw_step(axis: Axes, row: int, step: FlowStep, widest: int) -> None:
    left = 0.0
    for (_, rows), tone in zip(
        step.kept.items(), ("model", "model-soft", "model-pale", "neutral"), strict=False
    ):
        axis.barh(row, rows, 0.5, left=left, color=COLOURS[tone], edgecolor=COLOURS["surface"],
                  linewidth=0.8)  # fmt: skip
        left += rows
    if step.lost:  # a thin sliver stays visible, however few rows it stands for
        axis.barh(row, max(step.lost, widest * 0.006), 0.5, left=left, color=COLOURS["loss"])
    axis.text(0, row - 0.36, step.name, va="bottom", fontweight="bold")
    tail = format_count(sum(step.kept.values()))
    if step.lost:
        tail += f" (left out: {format_count(step.lost)}{step.why and ', '}{step.why})"
    axis.text(widest, row - 0.36, tail, va="bottom", ha="right", color=COLOURS["muted"])


def plot_shares(
    shares: Mapping[str, Sequence[float]], ticks: Sequence[str], name: str, label: str
) -> Markup:
    """Shares of the same bins in one version, or in two beside each other.

    Args:
        shares: Version -> share by bin, `[len(ticks)]`.
        ticks: Names of the bins.
        name: Prefix of the drawing's ids; unique on the page.
        label: What the plot shows, for readers who cannot see it.
    """
    with PlotStyle() as style:
        canvas = style.canvas(WIDTH_PT, 190)
        axis = canvas.subplots()
        # Two versions' bars lie side by side, where numbers would run into each other.
        _draw_bars(axis, "share of the values", shares, ticks,
                   format_share if len(shares) == 1 else None)  # fmt: skip
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}%"))
        if sum(map(len, ticks)) > _TICK_CHARS:
            axis.tick_params(axis="x", labelrotation=35, labelsize=9)
        handles, names = axis.get_legend_handles_labels()
        if len(names) > 1:
            canvas.legend(handles, names, loc="outside upper left", ncols=len(names))
        return style.render(canvas, name, label)


def plot_popularity(counts: np.ndarray, label: str) -> Markup:
    """Item popularity by rank, both axes logarithmic.

    Args:
        counts: Occurrences by rank, `[items]`, falling; zeros are left out.
        label: What the plot shows, for readers who cannot see it.
    """
    counts = np.asarray(counts)[np.asarray(counts) > 0]
    ranks = np.unique(np.geomspace(1, max(len(counts), 1), _CURVE_POINTS).round().astype(int))
    with PlotStyle() as style:
        canvas = style.canvas(WIDTH_PT, 250)
        axis = canvas.subplots()
        if len(counts):
            axis.fill_between(ranks, counts[ranks - 1], counts[-1] * 0.7,
                              color=COLOURS["model-pale"], alpha=0.55, linewidth=0)  # fmt: skip
            axis.plot(ranks, counts[ranks - 1], color=COLOURS["model"])
            axis.set_xscale("log")
            axis.set_yscale("log")
            axis.set_ylim(bottom=counts[-1] * 0.7)
            if counts[0] < 300 * counts[-1]:  # few decades: name the steps between them too
                axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.margins(x=0.01)
        for which in (axis.xaxis, axis.yaxis):
            which.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
            which.set_minor_formatter(FuncFormatter(lambda value, _: ""))
        axis.set_xlabel("item, by rank")
        axis.set_title("occurrences in train")
        return style.render(canvas, "popularity", label)

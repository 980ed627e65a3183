"""The run step by step: loss, speed, and how long steps waited for their input; the devices."""

from __future__ import annotations

import numpy as np

from jobs.reporting.blocks import Block, Facts, Figure, Section, missing
from jobs.reporting.numbers import format_count, format_share, to_float
from jobs.reporting.plots import plot_curves
from jobs.reporting.run_data import RunData

TITLE, LEAD = "Steps", "Loss and speed while the run went on, from metrics.jsonl."
CURVES = {
    "loss": "Loss",
    "examples_per_s": "Examples per second",
    "input_wait_share": "Share of the time that steps waited for input",
}
POINTS = 300


def build_steps(data: RunData) -> Section:
    """Curves over the steps, and the devices that they ran on."""
    blocks = _curves(data)
    devices = data.card.get("devices")
    if isinstance(devices, list) and devices:
        blocks.append(Facts((("Devices", ", ".join(map(str, devices))),)))
    return Section("steps", TITLE, LEAD, tuple(blocks))


def _curves(data: RunData) -> list[Block]:
    lines = [[to_float(line.get(name)) for name in ("step", *CURVES)] for line in data.steps]
    known = np.array([line for line in lines if None not in line], dtype=np.float64)
    if not len(known):
        return [missing(data.gaps.get("steps", "This run has not recorded its steps."))]
    groups = np.array_split(known, min(POINTS, len(known)))
    shown = np.array([[*group[-1:, 0], *_means(group)] for group in groups])
    curves = {title: shown[:, i] for i, title in enumerate(CURVES.values(), start=1)}
    last = known[-1]
    label = (
        f"Line charts over {format_count(last[0])} steps: {', '.join(curves).lower()}. At the end: "
        f"loss {last[1]:.4f}, {format_count(last[2])} examples per second, "
        f"input wait {format_share(last[3])}."
    )
    each = len(known) / len(groups)
    caption = "A point per compiled loop of steps."
    if each > 1:
        caption = f"A point per {each:.0f} compiled loops of steps, their mean."
    return [Figure(plot_curves(shown[:, 0], curves, "step", "steps", label), caption)]


def _means(group: np.ndarray) -> np.ndarray:
    means: np.ndarray = group[:, 1:].mean(axis=0)
    return means

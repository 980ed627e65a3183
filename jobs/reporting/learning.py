"""How training went: loss and validation per epoch and per step, speed, input waits, devices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jobs.reporting.formatting import (
    Cell,
    as_mapping,
    format_count,
    format_share,
    metric_title,
    to_float,
)
from jobs.reporting.plots import plot_curves
from jobs.reporting.run_data import MissingPartError, RunData
from jobs.reporting.verdict import PREFERRED_METRICS

LOSS_METRIC = "loss"
_LEFT_OUT = {
    "bad_records": "damaged record(s)",
    "shards": "damaged or missing shard(s)",
    "filtered_rows": "row(s), by input.filter or input.validation",
}
_EPOCH_COLUMNS = (
    ("seconds", ["Time", "seconds"]),
    ("examples_per_s", ["Examples/s", "count"]),
    ("input_wait_share",
     ["Input wait", "share", "share of the time that training waited for data"]),
)  # fmt: skip


def view_learning(data: RunData) -> dict[str, Any]:
    """Returns curves and a table of the epochs, and what the input left out of the last one."""
    if not data.epochs:
        raise MissingPartError(data.gaps.get("history", "No epoch of this run has finished yet."))
    metric, best, chosen = _validation_metric(data), best_epoch(data), _is_chosen(data)
    numbers = [int(entry.get("epoch", index + 1)) for index, entry in enumerate(data.epochs)]
    curves = {"Loss": _values(data.epochs, LOSS_METRIC)}
    if metric:
        curves[f"{metric_title(metric)} on validation"] = _values(data.epochs, metric)
    label = f"Line chart of {' and '.join(curves)} over {len(numbers)} epochs"
    label += f"; epoch {best} is marked as the best." if best is not None else "."
    shown = "Loss on train, quality on validation" if metric else "Loss on train"
    kept = "best" if chosen else "last"
    return {
        "lead": f"{shown}; the {kept} epoch's weights were kept.",
        "plot": plot_curves("learning", label, ("epoch", numbers), curves, best=best),
        "best": best,
        "columns": _epoch_columns(metric),
        "rows": _epoch_rows(data.epochs, numbers, metric, best),
        "validation": _view_validation(data.epochs, numbers),
        "kept_by_default": metric is None and not chosen,
        "left_out": _describe_left_out(data.epochs[-1]),
    }


def best_epoch(data: RunData) -> int | None:
    """Returns the epoch that a metric chose, by the card or else by the history.

    None where the last epoch's weights were kept without a choice.
    """
    if not _is_chosen(data):
        return None
    named = as_mapping(data.card.get("training")).get("best_epoch")
    if isinstance(named, int):
        return named
    metric = _validation_metric(data) or LOSS_METRIC
    sign = -1 if metric == LOSS_METRIC else 1
    scored = [
        (sign * _float_or_nan(_metric_of(entry, metric)), -index)
        for index, entry in enumerate(data.epochs)
    ]
    scored = [pair for pair in scored if not math.isnan(pair[0])]
    if not scored:
        return None
    index = -max(scored)[1]
    return int(data.epochs[index].get("epoch", index + 1))


def _is_chosen(data: RunData) -> bool:
    """Whether a metric chose the epoch: early stopping was on, and its metric was measured."""
    fit = as_mapping(data.config.get("fit"))
    if "early_stopping" in fit and fit["early_stopping"] is None:
        return False
    by_loss = as_mapping(fit.get("early_stopping")).get("metric") == LOSS_METRIC
    return by_loss or _validation_metric(data) is not None


def _metric_of(entry: Mapping[str, Any], metric: str) -> Any:
    is_loss = metric == LOSS_METRIC
    return entry.get("loss") if is_loss else as_mapping(entry.get("validation")).get(metric)


def _values(epochs: Sequence[Mapping[str, Any]], metric: str) -> list[float]:
    return [_float_or_nan(_metric_of(entry, metric)) for entry in epochs]


def _float_or_nan(value: Any) -> float:
    number = to_float(value)
    return math.nan if number is None else number


def _validation_metric(data: RunData) -> str | None:
    known = [m for entry in data.epochs for m in as_mapping(entry.get("validation"))]
    stopping = as_mapping(as_mapping(data.config.get("fit")).get("early_stopping"))
    for name in (stopping.get("metric"), *reversed(PREFERRED_METRICS[:2]), *known):
        if name in known:
            return str(name)
    return None


def _describe_left_out(epoch: Mapping[str, Any]) -> str:
    """Returns what the input left out of an epoch as a sentence; empty where it read all."""
    found = as_mapping(epoch.get("left_out"))
    parts = [
        f"{format_count(count)} {title}"
        for name, title in _LEFT_OUT.items()
        if isinstance(count := found.get(name), int) and count
    ]
    return f"Left out of the last epoch: {', '.join(parts)}." if parts else ""


def _epoch_columns(metric: str | None) -> list[list[str]]:
    columns = [["Epoch", "right"], ["Loss", "metric"]]
    columns += [[metric_title(metric), "metric", "on validation"]] if metric else []
    return [*columns, *(column for _, column in _EPOCH_COLUMNS)]


def _epoch_rows(
    epochs: Sequence[Mapping[str, Any]], numbers: Sequence[int], metric: str | None,
    best: int | None,
) -> list[list[Cell]]:  # fmt: skip
    rows = []
    for number, entry in zip(numbers, epochs, strict=True):
        values = [number, *(_metric_of(entry, m) for m in (LOSS_METRIC, metric) if m)]
        values += [entry.get(key) for key, _ in _EPOCH_COLUMNS]
        rows.append([Cell(value, best=number == best) for value in values])
    return rows


def _view_validation(
    epochs: Sequence[Mapping[str, Any]], numbers: Sequence[int]
) -> dict[str, Any] | None:
    """Every validation metric by epoch: curves of the usual ones, and a table of all."""
    found = [as_mapping(entry.get("validation")) for entry in epochs]
    names = list(dict.fromkeys(str(name) for values in found for name in values))
    if not names:
        return None
    usual = [name for name in PREFERRED_METRICS if name in names] or names[:4]
    curves = {metric_title(name): _values(epochs, name) for name in usual}
    label = f"Line charts of {', '.join(curves)} on validation over {len(numbers)} epochs."
    return {
        "plot": plot_curves("validation", label, ("epoch", numbers), curves),
        "columns": [["Metric"], *([str(number), "metric"] for number in numbers)],
        "rows": [
            [metric_title(name), *(values.get(name) for values in found)] for name in sorted(names)
        ],
    }


STEP_CURVES = {
    "loss": "Loss",
    "examples_per_s": "Examples per second",
    "input_wait_share": "Share of the time that steps waited for input",
}
STEP_POINTS = 300


def view_steps(data: RunData) -> dict[str, Any]:
    """Returns curves over the steps, and the devices that they ran on."""
    devices = data.card.get("devices")
    facts = [("Devices", ", ".join(map(str, devices)))] if isinstance(devices, list) else []
    lines = [[to_float(line.get(name)) for name in ("step", *STEP_CURVES)] for line in data.steps]
    known = np.array([line for line in lines if None not in line], dtype=np.float64)
    if not len(known):
        gap = data.gaps.get("steps", "This run has not recorded its steps.")
        return {"plot": None, "caption": "", "gap": gap, "facts": facts if devices else []}
    return {**_plot_steps(known), "gap": None, "facts": facts if devices else []}


def _plot_steps(known: np.ndarray) -> dict[str, Any]:
    """Draws at most `STEP_POINTS` points; `known` holds the step and the curves, float64
    `[lines, 1 + curves]`."""
    groups = np.array_split(known, min(STEP_POINTS, len(known)))
    steps = [group[-1, 0] for group in groups]
    means = np.array([group[:, 1:].mean(axis=0) for group in groups])
    curves = {title: means[:, i] for i, title in enumerate(STEP_CURVES.values())}
    step, loss, speed, wait = known[-1]
    label = (
        f"Line charts over {format_count(step)} steps: {', '.join(curves).lower()}. At the end: "
        f"loss {loss:.4f}, {format_count(speed)} examples per second, "
        f"input wait {format_share(wait)}."
    )
    each = len(known) / len(groups)
    caption = "A point per compiled loop of steps."
    if each > 1:
        caption = f"A point per {each:.0f} compiled loops of steps, their mean."
    return {"plot": plot_curves("steps", label, ("step", steps), curves), "caption": caption}

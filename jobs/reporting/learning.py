"""How training went: loss and validation per epoch and per step, speed, input waits, devices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jobs.reporting.blocks import (
    Beside,
    Block,
    Details,
    Facts,
    Figure,
    Note,
    Section,
    TableCell,
    TableColumn,
    build_table,
    missing,
)
from jobs.reporting.formatting import (
    format_count,
    format_metric,
    format_seconds,
    format_share,
    metric_title,
    to_float,
)
from jobs.reporting.plots import plot_curves, plot_learning
from jobs.reporting.run_data import RunData, as_mapping
from jobs.reporting.verdict import PREFERRED_METRICS

LOSS_METRIC = "loss"
_LEFT_OUT = {
    "bad_records": "damaged record(s)",
    "shards": "damaged or missing shard(s)",
    "filtered_rows": "row(s), by input.filter or input.validation",
}


def build_learning(data: RunData) -> Section:
    """Curves beside the table of epochs."""
    metric = _validation_metric(data)
    chosen = _is_chosen(data)
    kept = "the best epoch's weights were kept" if chosen else "the last epoch's weights were kept"
    lead = f"Loss on train, quality on validation; {kept}." if metric else f"Loss on train; {kept}."
    if not data.epochs:
        text = data.gaps.get("history", "No epoch of this run has finished yet.")
        return Section("learning", "Learning", "Loss and quality by epoch.", (missing(text),))
    best = best_epoch(data)
    numbers = [int(entry.get("epoch", index + 1)) for index, entry in enumerate(data.epochs)]
    curves = {"Loss": [_number(entry.get("loss")) for entry in data.epochs]}
    if metric:
        curves[f"{metric_title(metric)} on validation"] = [
            _number(as_mapping(entry.get("validation")).get(metric)) for entry in data.epochs
        ]
    label = f"Line chart of {' and '.join(curves)} over {len(numbers)} epochs"
    label += f"; epoch {best} is marked as the best." if best is not None else "."
    blocks: list[Block] = [
        Beside(
            (
                Figure(plot_learning(numbers, curves, best, label), _learning_caption(best)),
                _epoch_table(data.epochs, numbers, metric, best),
            )
        )
    ]
    blocks += _all_metrics(data.epochs, numbers)
    if metric is None and not chosen:
        blocks.append(
            Note("No validation split: the last epoch was kept, nothing could be chosen.")
        )
    left_out = _describe_left_out(data.epochs[-1])
    blocks += [Note(left_out)] if left_out else []
    return Section("learning", "Learning", lead, tuple(blocks))


def best_epoch(data: RunData) -> int | None:
    """Returns the epoch that a metric chose, as the card or else the history tells.

    None where nothing chose: the last epoch's weights were kept as they were.
    """
    if not _is_chosen(data):
        return None
    named = as_mapping(data.card.get("training")).get("best_epoch")
    if isinstance(named, int):
        return named
    metric = _validation_metric(data) or LOSS_METRIC
    sign = -1 if metric == LOSS_METRIC else 1
    scored = [
        (sign * _number(_value(entry, metric)), -index) for index, entry in enumerate(data.epochs)
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


def _value(entry: Mapping[str, Any], metric: str) -> Any:
    return (
        entry.get("loss")
        if metric == LOSS_METRIC
        else as_mapping(entry.get("validation")).get(metric)
    )


def _validation_metric(data: RunData) -> str | None:
    known = [m for entry in data.epochs for m in as_mapping(entry.get("validation"))]
    stopping = as_mapping(as_mapping(data.config.get("fit")).get("early_stopping"))
    for name in (stopping.get("metric"), *reversed(PREFERRED_METRICS[:2]), *known):
        if name in known:
            return str(name)
    return None


def _describe_left_out(epoch: Mapping[str, Any]) -> str:
    """Says what the input left out of an epoch; empty where that was nothing."""
    found = as_mapping(epoch.get("left_out"))
    parts = [
        f"{format_count(count)} {title}"
        for name, title in _LEFT_OUT.items()
        if isinstance(count := found.get(name), int) and count
    ]
    return f"Left out of the last epoch: {', '.join(parts)}." if parts else ""


def _learning_caption(best: int | None) -> str:
    return "Per epoch." if best is None else f"Per epoch; the ring marks epoch {best}, the best."


def _epoch_table(
    epochs: Sequence[Mapping[str, Any]], numbers: Sequence[int], metric: str | None,
    best: int | None,
) -> Block:  # fmt: skip
    columns = [TableColumn("Epoch"), TableColumn("Loss")]
    columns += [TableColumn(metric_title(metric), hint="on validation")] if metric else []
    columns += [
        TableColumn("Time"),
        TableColumn("Examples/s"),
        TableColumn("Input wait", hint="share of the time that training waited for data"),
    ]
    rows = []
    for number, entry in zip(numbers, epochs, strict=True):
        cells = [str(number), format_metric(entry.get("loss"))]
        if metric:
            cells.append(format_metric(as_mapping(entry.get("validation")).get(metric)))
        cells += [
            format_seconds(entry.get("seconds")),
            format_count(entry.get("examples_per_s")),
            format_share(entry.get("input_wait_share")),
        ]
        rows.append([TableCell(text, best=number == best) for text in cells])
    caption = "Epochs." if best is None else "Epochs; the best in bold."
    return build_table(caption, columns, rows)


def _all_metrics(epochs: Sequence[Mapping[str, Any]], numbers: Sequence[int]) -> list[Block]:
    """Every validation metric by epoch: curves of the usual ones, and the table."""
    found = [as_mapping(entry.get("validation")) for entry in epochs]
    names = list(dict.fromkeys(str(name) for values in found for name in values))
    if not names:
        return []
    usual = [name for name in PREFERRED_METRICS if name in names] or names[:4]
    curves = {metric_title(name): [_number(values.get(name)) for values in found] for name in usual}
    label = f"Line charts of {', '.join(curves)} on validation over {len(numbers)} epochs."
    table = build_table(
        "Validation by epoch.",
        [TableColumn("Metric", numeric=False), *(TableColumn(str(number)) for number in numbers)],
        [
            [metric_title(name), *(format_metric(values.get(name)) for values in found)]
            for name in sorted(names)
        ],
    )
    figure = Figure(plot_curves(numbers, curves, "epoch", "validation", label), "Per epoch.")
    return [Details("All validation metrics", (figure, table))]


def _number(value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else math.nan


STEPS_TITLE, STEPS_LEAD = "Steps", "Loss and speed while the run went on, from metrics.jsonl."
STEP_CURVES = {
    "loss": "Loss",
    "examples_per_s": "Examples per second",
    "input_wait_share": "Share of the time that steps waited for input",
}
STEP_POINTS = 300


def build_steps(data: RunData) -> Section:
    """Curves over the steps, and the devices that they ran on."""
    blocks = _step_curves(data)
    devices = data.card.get("devices")
    if isinstance(devices, list) and devices:
        blocks.append(Facts((("Devices", ", ".join(map(str, devices))),)))
    return Section("steps", STEPS_TITLE, STEPS_LEAD, tuple(blocks))


def _step_curves(data: RunData) -> list[Block]:
    lines = [[to_float(line.get(name)) for name in ("step", *STEP_CURVES)] for line in data.steps]
    known = np.array([line for line in lines if None not in line], dtype=np.float64)
    if not len(known):
        return [missing(data.gaps.get("steps", "This run has not recorded its steps."))]
    groups = np.array_split(known, min(STEP_POINTS, len(known)))
    shown = np.array([[*group[-1:, 0], *_means(group)] for group in groups])
    curves = {title: shown[:, i] for i, title in enumerate(STEP_CURVES.values(), start=1)}
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

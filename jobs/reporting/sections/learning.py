"""How training went: loss and validation per epoch, speed, the epoch that was kept."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jobs.reporting.blocks import (
    Beside,
    Block,
    Cell,
    Column,
    Details,
    Figure,
    Note,
    Section,
    build_table,
    missing,
)
from jobs.reporting.metric_names import metric_title
from jobs.reporting.numbers import (
    format_count,
    format_metric,
    format_seconds,
    format_share,
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
                Figure(plot_learning(numbers, curves, best, label), _caption(best)),
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


def _caption(best: int | None) -> str:
    return "Per epoch." if best is None else f"Per epoch; the ring marks epoch {best}, the best."


def _epoch_table(
    epochs: Sequence[Mapping[str, Any]], numbers: Sequence[int], metric: str | None,
    best: int | None,
) -> Block:  # fmt: skip
    columns = [Column("Epoch"), Column("Loss")]
    columns += [Column(metric_title(metric), hint="on validation")] if metric else []
    columns += [
        Column("Time"),
        Column("Examples/s"),
        Column("Input wait", hint="share of the time that training waited for data"),
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
        rows.append([Cell(text, best=number == best) for text in cells])
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
        [Column("Metric", numeric=False), *(Column(str(number)) for number in numbers)],
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

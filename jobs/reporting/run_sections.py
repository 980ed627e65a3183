"""Sections about a run: sample lists, and how training went."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from conf.artefacts.run import RECOMMENDATIONS_FILE
from conf.metrics import LOSS_METRIC, is_minimised
from conf.training.input import describe_conditions
from jobs.reporting.quality import PREFERRED_METRICS
from jobs.reporting.run_data import MissingPartError, RunData
from jobs.support.formatting import (
    as_mapping,
    to_float,
)

SHOWN_ITEMS = 5
STEP_POINTS = 300
STEP_CURVES = {
    "loss": "Loss",
    "examples_per_s": "Examples per second",
    "input_wait_share": "Share of the time that steps waited for input",
}
_TABLE_COUNTS = (
    "keys", "waiting", "admitted", "evicted", "rejected", "refused", "device_hits", "swapped",
    "device_bytes", "bytes",
)  # fmt: skip
_SHOWN_FIRST = ("ndcg@10", "hit_rate@10", "auc", "rmse")
_SPEED = ("seconds", "examples_per_s", "input_wait_share")


def view_lists(data: RunData) -> dict[str, Any]:
    """Returns the first users' best items."""
    if not data.lists:
        raise MissingPartError(data.gaps.get("lists", "The file of ranked lists is empty."))
    lead = f"The first users of {RECOMMENDATIONS_FILE}, their best {SHOWN_ITEMS} items."
    name = data.catalogue.name if data.catalogue else str
    return {"lead": lead, "lists": data.lists, "name": name, "places": range(SHOWN_ITEMS)}


def view_learning(data: RunData) -> dict[str, Any]:
    """Returns curves and a table of the epochs, and what the input left out of the last one."""
    if not data.epochs:
        raise MissingPartError(data.gaps.get("history", "No epoch of this run has finished yet."))
    metric, chosen, refit = _validation_metric(data), _is_chosen(data), _tell_refit(data)
    numbers = [int(entry.get("epoch", index + 1)) for index, entry in enumerate(data.epochs)]
    title = None if metric is None else data.title(metric)
    curves = {"Loss": _read_losses(data)}
    if metric is not None:
        curves[f"{title} on validation"] = _values(data, metric)
    shown = "Loss on train, quality on validation" if metric else "Loss on train"
    conditions = as_mapping(data.config.get("evaluation")).get("filter")
    if metric and conditions:
        shown += f" (of rows with {describe_conditions(conditions)})"
    return {
        "lead": f"{shown}; the {'best' if chosen else 'last'} epoch's weights were kept." + refit,
        "best": best_epoch(data),
        "numbers": numbers,
        "curves": curves,
        "metric": title,
        "rows": [
            [number, *values, *(entry.get(key) for key in _SPEED)]
            for number, entry, *values in zip(numbers, data.epochs, *curves.values(), strict=True)
        ],
        "validation": _view_validation(data, numbers),
        "kept_by_default": metric is None and not chosen and not refit,
        "left_out": as_mapping(data.epochs[-1].get("left_out")),
        "tables": [
            [table, number, *(as_mapping(found).get(name) for name in _TABLE_COUNTS)]
            for number, entry in zip(numbers, data.epochs, strict=True)
            for table, found in as_mapping(entry.get("tables")).items()
        ],
    }


def _tell_refit(data: RunData) -> str:
    """How `fit.refit` has chosen the settings and the epochs of a run; nothing of other runs."""
    refit = as_mapping(data.card.get("refit"))
    found, trials = as_mapping(refit.get("chosen")), refit.get("trials")
    if not found or not isinstance(trials, list):
        return ""
    values = as_mapping(found.get("values"))
    count = "1 trial" if len(trials) == 1 else f"{len(trials)} trials"
    shown = ", ".join(f"{key} {value}" for key, value in values.items()) or "as configured"
    return (
        f" Settings ({shown}) and epochs were chosen on held-out rows: "
        f"{data.title(str(refit.get('metric')))} {to_float(found.get('value')):.4f} after epoch "
        f"{found.get('epoch')}, the best of {count}. This run trained on them too."
    )


def best_epoch(data: RunData) -> int | None:
    """Returns the epoch that a metric chose, by the card or else by the history.

    None where the last epoch's weights were kept without a choice.
    """
    if not _is_chosen(data):
        return None
    named = as_mapping(data.card.get("training")).get("best_epoch")
    if isinstance(named, int):
        return named
    metric = _chosen_by(data) or _validation_metric(data) or LOSS_METRIC
    values = np.array(_values(data, metric))
    if metric == LOSS_METRIC and np.isnan(values).all():
        values = np.array(_read_losses(data))  # Held-out rows that are ranked have no loss.
    if np.isnan(values).all():
        return None
    index = int(np.nanargmin(values) if is_minimised(metric) else np.nanargmax(values))
    return int(data.epochs[index].get("epoch", index + 1))


def _is_chosen(data: RunData) -> bool:
    """Whether a metric chose the epoch: early stopping was on, and its metric was measured."""
    fit = as_mapping(data.config.get("fit"))
    if "early_stopping" in fit and fit["early_stopping"] is None:
        return False
    return _chosen_by(data) == LOSS_METRIC or _validation_metric(data) is not None


def _chosen_by(data: RunData) -> str | None:
    """The metric that chose the epoch, by the card or else by the config; None: none is named."""
    stopping = as_mapping(as_mapping(data.config.get("fit")).get("early_stopping"))
    return as_mapping(data.card.get("training")).get("selected_by") or stopping.get("metric")


def _read_losses(data: RunData) -> list[float]:
    """The training loss of each epoch."""
    return _to_floats(entry.get(LOSS_METRIC) for entry in data.epochs)


def _values(data: RunData, metric: str) -> list[float]:
    """A validation metric of each epoch; NaN where it was not measured."""
    return _to_floats(as_mapping(entry.get("validation")).get(metric) for entry in data.epochs)


def _to_floats(found: Iterable[Any]) -> list[float]:
    numbers = [to_float(value) for value in found]
    return [math.nan if number is None else number for number in numbers]


def _validation_metric(data: RunData) -> str | None:
    """What is shown of the held-out rows: what chose the epoch, or would by default."""
    known = [m for entry in data.epochs for m in as_mapping(entry.get("validation"))]
    for name in (_chosen_by(data), *_SHOWN_FIRST, *known):
        if name in known:
            return str(name)
    return None


def _view_validation(data: RunData, numbers: Sequence[int]) -> dict[str, Any]:
    """Every validation metric by epoch: curves of the usual ones, and rows of all."""
    found = [as_mapping(entry.get("validation")) for entry in data.epochs]
    names = list(dict.fromkeys(str(name) for values in found for name in values))
    usual = [name for name in PREFERRED_METRICS if name in names] or names[:4]
    return {
        "curves": {data.title(name): _values(data, name) for name in usual},
        "columns": [["Metric"], *([str(number), "metric"] for number in numbers)],
        "rows": [
            [data.title(name), *(values.get(name) for values in found)] for name in sorted(names)
        ],
    }


def view_steps(data: RunData) -> dict[str, Any]:
    """Returns curves over the steps, validations between epochs, and the devices."""
    return {
        **_view_curves(data),
        "validations": _view_step_validations(data),
    }


def _view_step_validations(data: RunData) -> dict[str, Any] | None:
    """Metrics of validations between the ends of epochs; the one that was kept is the best."""
    lines = [line for line in data.validations if to_float(line.get("step")) is not None]
    if not lines:
        return None
    found = [as_mapping(line.get("validation")) for line in lines]
    names = list(dict.fromkeys(str(name) for values in found for name in values))
    usual = [name for name in PREFERRED_METRICS if name in names] or names[:4]
    return {
        "steps": [line["step"] for line in lines],
        "best": as_mapping(data.card.get("training")).get("best_step"),
        "curves": {
            data.title(name): [
                math.nan if (value := to_float(values.get(name))) is None else value
                for values in found
            ]
            for name in usual
        },
        "columns": [["Step", "count"], *([data.title(name), "metric"] for name in names)],
        "rows": [
            [line["step"], *(values.get(name) for name in names)]
            for line, values in zip(lines, found, strict=True)
        ],
    }


def _view_curves(data: RunData) -> dict[str, Any]:
    """Loss and speed over the steps, and the devices that they ran on."""
    devices = data.card.get("devices")
    shown = ", ".join(map(str, devices)) if isinstance(devices, list) and devices else None
    names = ("step", *STEP_CURVES)
    lines = [[to_float(line.get(name)) for name in names] for line in data.steps]
    known = np.array([line for line in lines if None not in line], dtype=np.float64)
    if not len(known):
        gap = data.gaps.get("steps", "This run has not recorded its steps.")
        return {"gap": gap, "devices": shown}
    groups = np.array_split(known, min(STEP_POINTS, len(known)))
    means = np.array([group[:, 1:].mean(axis=0) for group in groups])
    return {
        "gap": None,
        "devices": shown,
        "steps": [group[-1, 0] for group in groups],
        "curves": {title: means[:, i] for i, title in enumerate(STEP_CURVES.values())},
        "last": dict(zip(names, known[-1].tolist(), strict=True)),
        "lines_per_point": len(known) / len(groups),
    }

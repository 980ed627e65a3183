"""Sections about a run: verdict and quality, sample lists, and how training went."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from conf.run import RECOMMENDATIONS_FILE
from jobs.reporting.formatting import (
    MISSING,
    as_mapping,
    format_count,
    format_metric,
    format_share,
    metric_order,
    metric_title,
    read_task_metrics,
    to_float,
)
from jobs.reporting.run_data import MissingPartError, RunData
from training.loop.epoch_records import LOSS_METRIC, is_minimised

PREFERRED_METRICS = ("hit_rate@10", "ndcg@10", "recall@10", "mrr")
SHOWN_ITEMS = 5
_Z_95 = 1.959963984540054
_TIMES = "\N{MULTIPLICATION SIGN}"
_SYSTEMS = ("model", "popularity", "random")
_FAMILIES = {"hit_rate": "Hit rate", "ndcg": "NDCG"}
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
SHOWN_NORMS = 6
_SPEED = ("seconds", "examples_per_s", "input_wait_share")

Outcome = Literal["ahead", "level", "behind", "unknown"]


@dataclass(frozen=True)
class Verdict:
    """The model beside popularity on the headline metric.

    Attributes:
        outcome: `level` where the 95 % intervals of two rates overlap, or two values are equal.
        sentence: The verdict.
        detail: Protocol, number of rows, intervals.
    """

    outcome: Outcome
    sentence: str
    detail: str = ""


def headline_protocol(metrics: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the protocol that the evaluation puts first, or None where there is none."""
    protocols = [p for p in metrics.get("protocols") or () if isinstance(p, Mapping)]
    named = [p for p in protocols if p.get("name") == metrics.get("headline")]
    return next(iter(named or protocols), None)


def headline_metric(systems: Mapping[str, Mapping[str, float]]) -> str | None:
    """Returns the metric that the verdict speaks of: the hit rate at 10 where there is one."""
    known = as_mapping(systems.get("model"))
    numeric = (m for m in (*PREFERRED_METRICS, *known) if to_float(known.get(m)) is not None)
    return next(numeric, None)


def wilson_interval(rate: float, rows: int) -> tuple[float, float]:
    """95 % confidence interval of a rate.

    Wilson, "Probable inference, the law of succession, and statistical inference", 1927.

    Args:
        rate: Observed share, in [0, 1].
        rows: Number of trials, at least 1.
    """
    z2 = _Z_95**2
    centre = (rate + z2 / (2 * rows)) / (1 + z2 / rows)
    half = _Z_95 * math.sqrt(rate * (1 - rate) / rows + z2 / (4 * rows**2)) / (1 + z2 / rows)
    return max(0.0, centre - half), min(1.0, centre + half)


def build_verdict(data: RunData) -> Verdict:
    """Compares the model with popularity on the headline metric, or its first task's errors."""
    name, metrics = data.model_name, data.metrics or {}
    if metrics.get("tasks"):
        return _build_task_verdict(name, metrics)
    protocol = headline_protocol(metrics) or {}
    systems = as_mapping(protocol.get("systems"))
    metric = headline_metric(systems)
    if metric is None:
        return Verdict("unknown", f"{name} is not evaluated yet.", data.gaps.get("metrics", ""))
    model = float(systems["model"][metric])
    popularity = to_float(as_mapping(systems.get("popularity")).get(metric))
    detail = f"{describe_protocol(protocol, metrics)}."
    if popularity is None:
        sentence = f"{name} reaches {metric_title(metric)} {format_metric(model)}."
        return Verdict("unknown", sentence, f"{detail} Popularity was not evaluated.")
    rows, intervals = ranked_rows(metrics), [(model, model), (popularity, popularity)]
    if metric.startswith("hit_rate@") and rows:
        intervals = [wilson_interval(value, rows) for value in (model, popularity)]
        texts = [f"{format_share(low)} to {format_share(high)}" for low, high in intervals]
        detail += f" 95% intervals: {' and '.join(texts)}."
    is_level = max(low for low, _ in intervals) <= min(high for _, high in intervals)
    outcome: Outcome = "level" if is_level else "ahead" if model > popularity else "behind"
    return Verdict(outcome, f"{name} {_compare(metric, model, popularity, outcome)}.", detail)


def _build_task_verdict(name: str, metrics: Mapping[str, Any]) -> Verdict:
    """Compares the first task with a constant: by the log loss, or the root mean squared error."""
    task, values = next(iter(metrics["tasks"].items()))
    found = read_task_metrics(as_mapping(values))
    metric = next((m for m in ("log_loss", "rmse") if None not in found.get(m, (None,))), None)
    rows = f"{format_count(metrics.get('rows'))} rows of the {metrics.get('split', 'test')} split"
    if metric is None:
        return Verdict("unknown", f"{name} has no error that can be compared.", f"{rows}.")
    model, constant = (to_float(value) or 0.0 for value in found[metric])
    quality = f"{metric_title(metric)} {format_metric(model)}"
    if found.get("auc", (None,))[0] is not None:
        quality = f"AUC {format_metric(found['auc'][0])} and {quality[:1].lower()}{quality[1:]}"
    outcome: Outcome = "ahead" if model < constant else "behind" if model > constant else "level"
    words = {"ahead": "better than", "behind": "worse than", "level": "no better than"}
    sentence = f"{name} reaches {quality}: {words[outcome]} a constant ({format_metric(constant)})."
    return Verdict(outcome, sentence, f"Task {task}, {rows}.")


def ranked_rows(metrics: Mapping[str, Any]) -> int | None:
    """Returns how many rows were ranked."""
    rows = metrics.get("rows", metrics.get("users"))
    return rows if isinstance(rows, int) else None


def describe_protocol(protocol: Mapping[str, Any], metrics: Mapping[str, Any]) -> str:
    """Returns a protocol in words: split, rows, what the target is ranked against."""
    count = format_count(protocol.get("candidates"))
    if str(protocol.get("name", "")).startswith("sampled"):
        against = f"up to {count} candidates"
    elif protocol.get("mask_seen"):
        against = f"the {count} items of the catalogue, those the user had already met left out"
    else:
        against = f"all {count} items of the catalogue"
    count = format_count(protocol.get("rows", ranked_rows(metrics)))
    per_user = protocol.get("per") == "user"
    rows, what = ("users", "all held-out items") if per_user else ("rows", "the target")
    return (
        f"{count} {rows} of the {metrics.get('split', 'test')} split, "
        f"{what} of each ranked among {against}"
    )


def _compare(metric: str, model: float, popularity: float, outcome: Outcome) -> str:
    """The verdict's sentence, without its subject."""
    family, _, k = metric.partition("@")
    form = format_share if family in ("hit_rate", "recall") and k else format_metric
    what = f"reaches {metric_title(metric)} {form(model)}"
    if form is format_share:
        what = f"finds the next item in its top {k} for {form(model)} of the rows"
    rival = form(popularity)
    if outcome == "level":
        return f"{what}: not clearly different from popularity ({rival})"
    if outcome == "behind":
        return f"{what}: worse than popularity ({rival})"
    ratio = f"{model / popularity:.1f} times" if popularity else "against"
    return f"{what}, {ratio} popularity's {rival}"


def view_quality(data: RunData) -> dict[str, Any]:
    """Returns tables of every protocol, a plot of the headline one, labels and coverage."""
    if data.metrics is None:
        raise MissingPartError(data.gaps["metrics"])
    if data.metrics.get("tasks"):
        return _view_tasks(data.metrics)
    headline = headline_protocol(data.metrics)
    if headline is None:
        raise MissingPartError("The evaluation has no protocols.")
    others = [protocol for protocol in data.metrics["protocols"] if protocol is not headline]
    systems = _read_systems(headline, data)
    labels = data.metrics.get("labels")
    return {
        "model": data.model_name,
        "bars": _metric_bars(systems, data.model_name),
        "recall_is_hit_rate": _recall_is_hit_rate(systems),
        "protocols": [_view_protocol(protocol, data) for protocol in (headline, *others)],
        "labels": labels if isinstance(labels, Mapping) else None,
        "label_scores": _label_scores(as_mapping(labels)),
        "beyond": as_mapping(data.metrics.get("beyond_accuracy")),
        "unknown_targets": data.metrics.get("oov_targets"),
        "slices": view_slices(as_mapping(data.metrics.get("slices"))),
    }


def view_slices(slices: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns a table per way to cut the rows: the first metrics of each system by group."""
    tables = []
    for name, groups in slices.items():
        systems = [as_mapping(as_mapping(group).get("systems")) for group in groups]
        shown = shown_slice_metrics(as_mapping(systems[0].get("model"))) if systems else []
        columns = [(system, metric) for metric in shown for system in systems[0]]
        rows = [
            [group.get("value"), group.get("rows"),
             *(as_mapping(own.get(system)).get(metric) for system, metric in columns)]
            for group, own in zip(groups, systems, strict=True)
        ]  # fmt: skip
        titles = [f"{metric_title(metric)}, {system}" for system, metric in columns]
        tables.append({"name": name.replace("_", " "), "titles": titles, "rows": rows})
    return tables


def shown_slice_metrics(values: Mapping[str, Any]) -> list[str]:
    """Returns the metrics that a table of slices has room for."""
    names = ("recall@10", "ndcg@10", "auc", "log_loss", "rmse", "mae")
    return [name for name in names if name in values] or sorted(values, key=metric_order)[:2]


def _view_tasks(metrics: Mapping[str, Any]) -> dict[str, Any]:
    tasks = []
    for task, values in as_mapping(metrics["tasks"]).items():
        rows = [
            [metric_title(name), *(found if None in found else _mark_best(name, found))]
            for name, found in read_task_metrics(as_mapping(values)).items()
        ]
        kind = str(as_mapping(values).get("kind", "")).replace("_", " ")
        slices = view_slices(as_mapping(as_mapping(values).get("slices")))
        tasks.append({"name": task, "kind": kind, "rows": rows, "slices": slices})
    count = f"{format_count(metrics.get('rows'))} rows of the {metrics.get('split', 'test')} split"
    return {"lead": f"Each task on {count}, beside a constant prediction.", "tasks": tasks}


def _read_systems(protocol: Mapping[str, Any], data: RunData) -> dict[str, Mapping[str, Any]]:
    """Metrics by title of the system, the model first, then the baselines."""
    systems = as_mapping(protocol.get("systems"))
    order = sorted(systems, key=lambda name: (*_SYSTEMS, name).index(name))
    titles = {name: data.model_name if name == "model" else name.capitalize() for name in order}
    return {title: as_mapping(systems[name]) for name, title in titles.items()}


def _view_protocol(protocol: Mapping[str, Any], data: RunData) -> dict[str, Any]:
    """Name, description, columns of the systems, and a row per metric."""
    systems = _read_systems(protocol, data)
    metrics = sorted({m for values in systems.values() for m in values}, key=metric_order)
    rows = []
    for metric in metrics:
        model, rival = (systems.get(s, {}).get(metric) for s in (data.model_name, "Popularity"))
        ratio = f"{model / rival:.2f}{_TIMES}" if model is not None and rival else MISSING
        values = _mark_best(metric, [found.get(metric) for found in systems.values()])
        if not (metric.startswith("recall@") and _recall_is_hit_rate(systems)):
            rows.append([metric_title(metric), *values, ratio])
    description = describe_protocol(protocol, data.metrics or {})
    return {"name": str(protocol.get("name", "protocol")), "description": description,
            "columns": [[title, "metric"] for title in systems], "rows": rows}  # fmt: skip


def _mark_best(metric: str, values: Sequence[Any]) -> list[Any]:
    known = [value for value in values if to_float(value) is not None]
    best = (min if is_minimised(metric) else max)(known, default=None)
    return [{"value": value, "best": value is not None and value == best} for value in values]


def _recall_is_hit_rate(systems: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether recall repeats the hit rate, as it does with one relevant item per row."""
    pairs = [
        (value, values.get(metric.replace("recall", "hit_rate")))
        for values in systems.values()
        for metric, value in values.items()
        if metric.startswith("recall@")
    ]
    return bool(pairs) and all(recall == hit for recall, hit in pairs)


def _metric_bars(systems: Mapping[str, Mapping[str, Any]], model: str) -> dict[str, Any]:
    """Values by family, system and cut-off, of the families and cut-offs that the model has."""
    metrics = [metric.partition("@") for metric in systems.get(model, {})]
    ks = sorted({int(k) for _, _, k in metrics if k.isdigit()})
    families = {family for family, _, k in metrics if k.isdigit()}
    panels = {
        shown: {
            title: [float(values.get(f"{family}@{k}") or 0.0) for k in ks]
            for title, values in systems.items()
        }
        for family, shown in _FAMILIES.items()
        if family in families
    }
    return {"panels": panels, "systems": list(systems), "ks": ks}


def _label_scores(labels: Mapping[str, Any]) -> list[list[Any]]:
    """The model's scores against labels beside those of the constant label rate."""
    constant, rows = as_mapping(labels.get("constant")), []
    for key, title in (("auc", "AUC"), ("log_loss", "Log loss")):
        values = [labels.get(key), constant.get(key)]
        rows.append([title, *(values if None in values else _mark_best(key, values))])
    return rows


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
    metric, chosen = _validation_metric(data), _is_chosen(data)
    numbers = [int(entry.get("epoch", index + 1)) for index, entry in enumerate(data.epochs)]
    title = None if metric is None else metric_title(metric)
    curves = {"Loss": _values(data, LOSS_METRIC)}
    if metric is not None:
        curves[f"{title} on validation"] = _values(data, metric)
    shown = "Loss on train, quality on validation" if metric else "Loss on train"
    return {
        "lead": f"{shown}; the {'best' if chosen else 'last'} epoch's weights were kept.",
        "best": best_epoch(data),
        "numbers": numbers,
        "curves": curves,
        "metric": title,
        "rows": [
            [number, *values, *(entry.get(key) for key in _SPEED)]
            for number, entry, *values in zip(numbers, data.epochs, *curves.values(), strict=True)
        ],
        "validation": _view_validation(data, numbers),
        "kept_by_default": metric is None and not chosen,
        "left_out": as_mapping(data.epochs[-1].get("left_out")),
        "tables": [
            [table, number, *(as_mapping(found).get(name) for name in _TABLE_COUNTS)]
            for number, entry in zip(numbers, data.epochs, strict=True)
            for table, found in as_mapping(entry.get("tables")).items()
        ],
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
    values = np.array(_values(data, metric))
    if np.isnan(values).all():
        return None
    index = int(np.nanargmin(values) if is_minimised(metric) else np.nanargmax(values))
    return int(data.epochs[index].get("epoch", index + 1))


def _is_chosen(data: RunData) -> bool:
    """Whether a metric chose the epoch: early stopping was on, and its metric was measured."""
    fit = as_mapping(data.config.get("fit"))
    if "early_stopping" in fit and fit["early_stopping"] is None:
        return False
    by_loss = as_mapping(fit.get("early_stopping")).get("metric") == LOSS_METRIC
    return by_loss or _validation_metric(data) is not None


def _values(data: RunData, metric: str) -> list[float]:
    """A metric of each epoch; NaN where it was not measured."""
    held = [e if metric == LOSS_METRIC else as_mapping(e.get("validation")) for e in data.epochs]
    numbers = [to_float(values.get(metric)) for values in held]
    return [math.nan if number is None else number for number in numbers]


def _validation_metric(data: RunData) -> str | None:
    known = [m for entry in data.epochs for m in as_mapping(entry.get("validation"))]
    stopping = as_mapping(as_mapping(data.config.get("fit")).get("early_stopping"))
    for name in (stopping.get("metric"), *reversed(PREFERRED_METRICS[:2]), *known):
        if name in known:
            return str(name)
    return None


def _view_validation(data: RunData, numbers: Sequence[int]) -> dict[str, Any]:
    """Every validation metric by epoch: curves of the usual ones, and rows of all."""
    found = [as_mapping(entry.get("validation")) for entry in data.epochs]
    names = list(dict.fromkeys(str(name) for values in found for name in values))
    usual = [name for name in PREFERRED_METRICS if name in names] or names[:4]
    return {
        "curves": {metric_title(name): _values(data, name) for name in usual},
        "columns": [["Metric"], *([str(number), "metric"] for number in numbers)],
        "rows": [
            [metric_title(name), *(values.get(name) for values in found)] for name in sorted(names)
        ],
    }


def view_steps(data: RunData) -> dict[str, Any]:
    """Returns curves over the steps, validations between epochs, and the devices."""
    return {
        **_view_curves(data),
        "norms": _view_norms(data),
        "validations": _view_step_validations(data),
    }


def _view_norms(data: RunData) -> dict[str, Any] | None:
    """Norms of the gradients by step: of all, and of the tables and networks with the largest."""
    lines = [line for line in data.steps if as_mapping(line.get("gradient_norms"))]
    groups = [
        lines[i] for i in np.linspace(0, len(lines) - 1, min(STEP_POINTS, len(lines)), dtype=int)
    ]
    found = [{n: to_float(v) for n, v in line["gradient_norms"].items()} for line in groups]
    names = dict.fromkeys(name for norms in found for name in norms)
    curves = {
        name: [math.nan if (value := norms.get(name)) is None else value for norms in found]
        for name in names
    }
    largest = sorted(curves, key=lambda name: -np.nan_to_num(curves[name]).sum())[:SHOWN_NORMS]
    if not largest:
        return None
    return {
        "steps": [line["step"] for line in groups],
        "curves": {name.replace("/", " "): curves[name] for name in largest},
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
            metric_title(name): [
                math.nan if (value := to_float(values.get(name))) is None else value
                for values in found
            ]
            for name in usual
        },
        "columns": [["Step", "count"], *([metric_title(name), "metric"] for name in names)],
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

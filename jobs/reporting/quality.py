"""Verdict and quality of a run: the model beside popularity, chance or a constant."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from conf.metrics import METRICS, find_direction, is_minimised
from jobs.reporting.run_data import MissingPartError, RunData
from jobs.support.formatting import (
    MISSING,
    as_mapping,
    describe_calibration,
    describe_gauc,
    describe_split,
    describe_weights,
    first_of_several,
    format_count,
    format_metric,
    format_number,
    format_share,
    metric_order,
    metric_title,
    read_task_metrics,
    to_float,
)

PREFERRED_METRICS = ("hit_rate@10", "ndcg@10", "recall@10", "mrr")
_TIMES = "\N{MULTIPLICATION SIGN}"
_SYSTEMS = ("model", "ease", "popularity", "random")
_TITLES = {"ease": "EASE"}
_CONSTANT = "constant"

Outcome = Literal["ahead", "level", "behind", "unknown"]


@dataclass(frozen=True)
class Verdict:
    """The model beside popularity on the headline metric.

    Attributes:
        outcome: `level` where the 95 % interval of the paired difference holds 0, `unknown`
            where no interval was measured.
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
    found = find_difference(protocol, "popularity", metric)
    outcome = judge(metric, found)
    told = _tell_value(metric, model, per_user=protocol.get("per") == "user")
    sentence = f"{name} {told}{_compare(metric, model, popularity, outcome)}."
    return Verdict(outcome, sentence, f"{detail} {_describe_difference(protocol, found)}")


def find_difference(measured: Mapping[str, Any], rival: str, metric: str) -> Mapping[str, Any]:
    """Returns the paired difference of the model and a rival, as the evaluation measured it.

    Args:
        measured: A protocol, a task or the labels of the evaluation.
        rival: `popularity`, `random` or `constant`.
        metric: The metric.

    Returns:
        `difference`, `low`, `high` and `method`; empty where none was measured.
    """
    against = as_mapping(as_mapping(measured.get("differences")).get("against"))
    return as_mapping(as_mapping(against.get(rival)).get(metric))


def show_difference(found: Mapping[str, Any]) -> str:
    """Returns a paired difference with its interval as text; a dash where none was measured."""
    difference, low, high = (to_float(found.get(part)) for part in ("difference", "low", "high"))
    if difference is None:
        return MISSING
    interval = "" if low is None or high is None else f" ({low:+.4f} to {high:+.4f})"
    return f"{difference:+.4f}{interval}"


def judge(metric: str, found: Mapping[str, Any]) -> Outcome:
    """Returns what a paired difference says: nothing without its interval."""
    low, high = to_float(found.get("low")), to_float(found.get("high"))
    if low is None or high is None:
        return "unknown"
    if low <= 0.0 <= high:
        return "level"
    return "ahead" if (low > 0.0) != is_minimised(metric) else "behind"


def _describe_difference(measured: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """The interval behind a verdict, or why there is none."""
    difference = to_float(found.get("difference"))
    low, high = to_float(found.get("low")), to_float(found.get("high"))
    if difference is None:
        return "No paired interval was measured: sluice evaluate does that."
    groups = format_count(as_mapping(measured.get("differences")).get("groups"))
    if low is None or high is None:
        return f"Difference {difference:+.4f}; {groups} users are too few for an interval."
    return (
        f"Paired difference {difference:+.4f}, 95% interval {low:+.4f} to {high:+.4f} "
        f"({found.get('method', '')})."
    )


def _build_task_verdict(name: str, metrics: Mapping[str, Any]) -> Verdict:
    """Compares the first task with a constant: by the log loss, or the root mean squared error."""
    task, values = next(iter(metrics["tasks"].items()))
    found = read_task_metrics(as_mapping(values))
    metric = next((m for m in ("log_loss", "rmse") if None not in found.get(m, (None,))), None)
    rows = f"{format_count(metrics.get('rows'))} rows of the {describe_split(metrics)}"
    if metric is None:
        return Verdict("unknown", f"{name} has no error that can be compared.", f"{rows}.")
    model, constant = (to_float(value) or 0.0 for value in found[metric])
    quality = f"{metric_title(metric)} {format_metric(model)}"
    if found.get("auc", (None,))[0] is not None:
        quality = f"AUC {format_metric(found['auc'][0])} and {quality[:1].lower()}{quality[1:]}"
    paired = find_difference(as_mapping(values), _CONSTANT, metric)
    outcome, rival = judge(metric, paired), format_metric(constant)
    words = {"ahead": "better than", "behind": "worse than", "level": "not clearly different from"}
    if first_of_several(metrics["tasks"]):
        quality = f"{quality} of task {task}"
    sentence = f"{name} reaches {quality}; a constant reaches {rival}."
    if outcome in words:
        sentence = f"{name} reaches {quality}: {words[outcome]} a constant ({rival})."
    detail = _describe_difference(as_mapping(values), paired)
    return Verdict(outcome, sentence, f"Task {task}, {rows}. {detail}")


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
    return f"{count} {rows} of the {describe_split(metrics)}, {what} of each ranked among {against}"


def _format(metric: str) -> Callable[[float], str]:
    family, _, k = metric.partition("@")
    return format_share if family in ("hit_rate", "recall") and k else format_metric


def _tell_value(metric: str, model: float, per_user: bool) -> str:
    """What the model reaches, in words where the metric is a share."""
    family, _, k = metric.partition("@")
    value = _format(metric)(model)
    if _format(metric) is not format_share:
        return f"reaches {metric_title(metric)} {value}"
    if not per_user:
        return f"finds the next item in its top {k} for {value} of the rows"
    if family == "recall":
        return f"finds {value} of a user's held-out items in its top {k}"
    return f"finds a held-out item in its top {k} for {value} of the users"


def _compare(metric: str, model: float, popularity: float, outcome: Outcome) -> str:
    """The second half of the verdict's sentence: popularity beside the model."""
    rival = _format(metric)(popularity)
    if outcome == "unknown":
        return f"; popularity has {rival}"
    if outcome == "level":
        return f": not clearly different from popularity ({rival})"
    if outcome == "behind":
        return f": worse than popularity ({rival})"
    ratio = f"{model / popularity:.1f} times" if popularity else "against"
    return f", {ratio} popularity's {rival}"


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
        "label_notes": _note_labels(as_mapping(labels)),
        "beyond": as_mapping(data.metrics.get("beyond_accuracy")),
        "unknown_targets": data.metrics.get("oov_targets"),
        "baselines": describe_baselines(data.metrics),
        "slices": view_slices(as_mapping(data.metrics.get("slices"))),
    }


def describe_baselines(metrics: Mapping[str, Any]) -> list[str]:
    """Returns a line per baseline that was asked for: what it learned of, or why it is left out."""
    lines = []
    for name, found in as_mapping(metrics.get("baselines")).items():
        title, values = _TITLES.get(name, name.capitalize()), as_mapping(found)
        if "left_out" in values:
            lines.append(f"{title} is left out: {values['left_out']}")
            continue
        pairs, users = format_count(values.get("pairs")), format_count(values.get("users"))
        line = f"{title}: {pairs} distinct pairs of {users} users of train, "
        line += f"penalty {format_number(values.get('l2'))}"
        if outside := values.get("pairs_outside"):
            line += f"; it knows the {format_count(values.get('items'))} most frequent items, "
            line += f"and not those of {format_count(outside)} further pairs"
        lines.append(line)
    return lines


def view_slices(slices: Mapping[str, Any], task: str | None = None) -> list[dict[str, Any]]:
    """Returns a table per way to cut the rows: the first metrics of each system by group.

    Args:
        slices: The slices as the evaluation gives them.
        task: Task that they are of, where there are several.
    """
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
        titles = [f"{metric_title(metric, task)}, {system}" for system, metric in columns]
        title = name.replace("_", " ") + (f", task {task}" if task else "")
        tables.append({"name": title, "titles": titles, "rows": rows})
    return tables


def shown_slice_metrics(values: Mapping[str, Any]) -> list[str]:
    """Returns the metrics that a table of slices has room for, named as above the slices.

    With one relevant item per row (which has an MRR) recall is the hit rate.
    """
    first = "hit_rate@10" if {"hit_rate@10", "mrr"} <= values.keys() else "recall@10"
    names = (first, "ndcg@10", "auc", "log_loss", "rmse", "mae")
    return [name for name in names if name in values] or sorted(values, key=metric_order)[:2]


def _view_tasks(metrics: Mapping[str, Any]) -> dict[str, Any]:
    tasks, has_several = [], first_of_several(metrics["tasks"]) is not None
    for task, values in as_mapping(metrics["tasks"]).items():
        own = task if has_several else None
        rows = [
            [metric_title(name, own), *(found if None in found else _mark_best(name, found)),
             show_difference(find_difference(as_mapping(values), _CONSTANT, name))]
            for name, found in read_task_metrics(as_mapping(values)).items()
        ]  # fmt: skip
        kind = str(as_mapping(values).get("kind", "")).replace("_", " ")
        slices = view_slices(as_mapping(as_mapping(values).get("slices")), own)
        tasks.append({"name": task, "kind": kind, "rows": rows, "slices": slices})
    count = f"{format_count(metrics.get('rows'))} rows of the {describe_split(metrics)}"
    notes = [f"Each task on {count}, beside a constant prediction"]
    first = as_mapping(next(iter(metrics["tasks"].values()), None))
    notes += [note for note in (describe_weights(first), describe_gauc(first)) if note]
    for task, values in as_mapping(metrics["tasks"]).items():
        if (line := describe_calibration(as_mapping(values))) is not None:
            notes.append(f"task {task}, {line}" if has_several else line)
    return {"lead": "; ".join(notes) + ".", "tasks": tasks}


def _read_systems(protocol: Mapping[str, Any], data: RunData) -> dict[str, Mapping[str, Any]]:
    """Metrics by title of the system, the model first, then the baselines."""
    systems = as_mapping(protocol.get("systems"))
    order = sorted(systems, key=lambda name: (*_SYSTEMS, name).index(name))
    own = {**_TITLES, "model": data.model_name}
    titles = {name: own.get(name, name.capitalize()) for name in order}
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
            found = find_difference(protocol, "popularity", metric)
            rows.append([metric_title(metric), *values, ratio, show_difference(found)])
    description = describe_protocol(protocol, data.metrics or {})
    return {"name": str(protocol.get("name", "protocol")), "description": description,
            "columns": [[title, "metric"] for title in systems], "rows": rows}  # fmt: skip


def _mark_best(metric: str, values: Sequence[Any]) -> list[Any]:
    known = [value for value in values if to_float(value) is not None]
    direction = find_direction(metric)
    if direction not in ("higher", "lower"):
        return [{"value": value, "best": False} for value in values]
    best = (min if direction == "lower" else max)(known, default=None)
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
        for family, shown in ((m.family, m.long_title) for m in METRICS.values())
        if shown is not None and family in families
    }
    return {"panels": panels, "systems": list(systems), "ks": ks}


def _note_labels(labels: Mapping[str, Any]) -> str:
    notes = [note for note in (describe_weights(labels), describe_gauc(labels)) if note]
    return "".join(f"; {note}" for note in notes)


def _label_scores(labels: Mapping[str, Any]) -> list[list[Any]]:
    """The model's scores against labels beside those of the constant label rate."""
    constant, rows = as_mapping(labels.get("constant")), []
    for key, title in (("auc", "AUC"), ("log_loss", "Log loss")):
        values = [labels.get(key), constant.get(key)]
        marked = values if None in values else _mark_best(key, values)
        rows.append([title, *marked, show_difference(find_difference(labels, _CONSTANT, key))])
    return rows

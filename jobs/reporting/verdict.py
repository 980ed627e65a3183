"""How good the model is: the verdict, every protocol beside the baselines, and sample lists."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from markupsafe import Markup

from conf.run import RECOMMENDATIONS_FILE
from jobs.reporting.formatting import (
    MISSING,
    TIMES,
    Cell,
    as_mapping,
    format_count,
    format_metric,
    format_share,
    metric_order,
    metric_title,
    plain_words,
    to_float,
)
from jobs.reporting.plots import plot_bars
from jobs.reporting.run_data import MissingPartError, RankedList, RunData

PREFERRED_METRICS = ("hit_rate@10", "ndcg@10", "recall@10", "mrr")
_Z_95 = 1.959963984540054

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
    detail: str


def headline_protocol(metrics: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the protocol that the evaluation puts first, or None where there is none."""
    protocols = [p for p in metrics.get("protocols") or () if isinstance(p, Mapping)]
    named = [p for p in protocols if p.get("name") == metrics.get("headline")]
    return next(iter(named or protocols), None)


def headline_metric(systems: Mapping[str, Mapping[str, float]]) -> str | None:
    """Returns the metric that the verdict speaks of: the hit rate at 10 where there is one."""
    known = as_mapping(systems.get("model"))
    for name in (*PREFERRED_METRICS, *known):
        if to_float(known.get(name)) is not None:
            return name
    return None


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
    """Compares the model with popularity on the headline protocol and metric."""
    protocol = headline_protocol(data.metrics) if data.metrics else None
    systems = as_mapping(as_mapping(protocol).get("systems"))
    metric = headline_metric(systems)
    if data.metrics is None or protocol is None or metric is None:
        return Verdict("unknown", f"{data.model_name} is not evaluated yet.",
                       data.gaps.get("metrics", ""))  # fmt: skip
    model = float(systems["model"][metric])
    popularity = to_float(as_mapping(systems.get("popularity")).get(metric))
    rows = ranked_rows(data.metrics)
    protocol_text = describe_protocol(protocol, data.metrics)
    if popularity is None:
        sentence = f"{data.model_name} reaches {_quote(metric, model)}."
        return Verdict("unknown", sentence, f"{protocol_text}. Popularity was not evaluated.")
    intervals = None
    if metric.startswith("hit_rate@") and isinstance(rows, int) and rows > 0:
        intervals = wilson_interval(model, rows), wilson_interval(popularity, rows)
    outcome = _compare(model, popularity, intervals)
    detail = f"{protocol_text}."
    if intervals:
        (a, b), (c, d) = intervals
        detail += (
            f" 95% intervals: {format_share(a)} to {format_share(b)} and "
            f"{format_share(c)} to {format_share(d)}."
        )
    sentence = _sentence(data.model_name, metric, model, popularity, outcome)
    return Verdict(outcome, sentence, detail)


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
    return (
        f"{format_count(ranked_rows(metrics))} rows of the {metrics.get('split', 'test')} split, "
        f"the target of each ranked among {against}"
    )


def _compare(
    model: float,
    popularity: float,
    intervals: tuple[tuple[float, float], tuple[float, float]] | None,
) -> Outcome:
    if intervals:
        (low, high), (rival_low, rival_high) = intervals
        if low <= rival_high and rival_low <= high:
            return "level"
    if model == popularity:
        return "level"
    return "ahead" if model > popularity else "behind"


def _sentence(name: str, metric: str, model: float, popularity: float, outcome: Outcome) -> str:
    subject, _, k = metric.partition("@")
    is_hit = subject in ("hit_rate", "recall") and k
    what = f"finds the next item in its top {k}" if is_hit else f"reaches {_quote(metric, model)}"
    how = f" for {format_share(model)} of the rows" if is_hit else ""
    rival = format_share(popularity) if is_hit else format_metric(popularity)
    if outcome == "level":
        return f"{name} {what}{how}: not clearly different from popularity ({rival})."
    if outcome == "behind":
        return f"{name} {what}{how}: worse than popularity ({rival})."
    ratio = f"{model / popularity:.1f} times popularity's {rival}" if popularity else (
        f"against popularity's {rival}"
    )  # fmt: skip
    return f"{name} {what}{how}, {ratio}."


def _quote(metric: str, value: float) -> str:
    return f"{metric_title(metric)} {format_metric(value)}"


_BASELINES = ("popularity", "random")
_LOWER_IS_BETTER = ("loss", "log_loss")
_FAMILIES = {"hit_rate": "Hit rate", "ndcg": "NDCG"}
_PROTOCOLS = {
    "full_unseen": "Full ranking, unseen items",
    "full_all": "Full ranking, all items",
}
SHOWN_ITEMS = 5

Table = tuple[str, list[list[str]], list[list[Any]]]
"""Caption, columns and rows, as the template's macro `table` takes them."""


def view_quality(data: RunData) -> dict[str, Any]:
    """Returns tables of every protocol, a plot of the headline one, labels and coverage."""
    if data.metrics is None:
        raise MissingPartError(data.gaps["metrics"])
    headline = headline_protocol(data.metrics)
    if headline is None:
        raise MissingPartError("The evaluation has no protocols.")
    others = [protocol for protocol in data.metrics["protocols"] if protocol is not headline]
    labels = data.metrics.get("labels")
    return {
        "plot": _plot_metrics(headline, data),
        "headline": _protocol_table(headline, data),
        "recall_is_hit_rate": _recall_is_hit_rate(as_mapping(headline.get("systems"))),
        "others": [_protocol_table(protocol, data) for protocol in others],
        "labels": _view_labels(labels) if isinstance(labels, Mapping) else None,
        "beyond": list(_beyond_accuracy(as_mapping(data.metrics.get("beyond_accuracy")))),
        "unknown_targets": data.metrics.get("oov_targets"),
    }


def _system_names(systems: Mapping[str, Any], data: RunData) -> dict[str, str]:
    """Titles by system, the model first, then the baselines."""
    order = sorted(systems, key=lambda name: (*("model", *_BASELINES), name).index(name))
    return {name: data.model_name if name == "model" else name.capitalize() for name in order}


def _protocol_table(protocol: Mapping[str, Any], data: RunData) -> Table:
    systems = as_mapping(protocol.get("systems"))
    names = _system_names(systems, data)
    metrics = sorted({m for name in names for m in as_mapping(systems[name])}, key=metric_order)
    if _recall_is_hit_rate(systems):
        metrics = [metric for metric in metrics if not metric.startswith("recall@")]
    columns = [["Metric"], *([title, "metric"] for title in names.values())]
    columns.append(["Ratio", "right", f"{data.model_name} divided by popularity"])
    caption = f"{_protocol_title(protocol)}: {describe_protocol(protocol, data.metrics or {})}."
    return caption, columns, [_metric_row(metric, systems, list(names)) for metric in metrics]


def _metric_row(metric: str, systems: Mapping[str, Any], names: Sequence[str]) -> list[Any]:
    values = {name: as_mapping(systems[name]).get(metric) for name in names}
    model, rival = values.get("model"), values.get("popularity")
    ratio = f"{model / rival:.2f}{TIMES}" if model is not None and rival else MISSING
    return [metric_title(metric), *_mark_best(metric, list(values.values())), ratio]


def _mark_best(metric: str, values: Sequence[Any]) -> list[Cell]:
    known = [value for value in values if to_float(value) is not None]
    pick = min if metric in _LOWER_IS_BETTER else max
    best = pick(known) if known else None
    return [Cell(value, best=value is not None and value == best) for value in values]


def _recall_is_hit_rate(systems: Mapping[str, Any]) -> bool:
    """Whether recall repeats the hit rate, as it does with one relevant item per row."""
    pairs = [
        (value, as_mapping(values).get(metric.replace("recall", "hit_rate")))
        for values in systems.values()
        for metric, value in as_mapping(values).items()
        if metric.startswith("recall@")
    ]
    return bool(pairs) and all(recall == hit for recall, hit in pairs)


def _protocol_title(protocol: Mapping[str, Any]) -> str:
    name = str(protocol.get("name", "protocol"))
    count = name.removeprefix("sampled_")
    if count != name:
        return f"{count} sampled negatives" if count.isdigit() else "Candidates of the data set"
    return _PROTOCOLS.get(name, plain_words(name).capitalize())


def _plot_metrics(protocol: Mapping[str, Any], data: RunData) -> Markup | None:
    systems = as_mapping(protocol.get("systems"))
    names = _system_names(systems, data)
    metrics = [m.partition("@") for m in as_mapping(systems.get("model"))]
    ks = sorted({int(k) for _, _, k in metrics if k.isdigit()})
    families = [name for name in _FAMILIES if any((name, "@", str(k)) in metrics for k in ks)]
    if not families:
        return None
    panels = {
        _FAMILIES[family]: {
            title: [float(as_mapping(systems[name]).get(f"{family}@{k}") or 0.0) for k in ks]
            for name, title in names.items()
        }
        for family in families
    }
    label = (
        f"Bar chart: {' and '.join(panels)} of {', '.join(names.values())} "
        f"at {', '.join(map(str, ks))}. The table beside it holds the values."
    )
    return plot_bars("metrics", label, panels, [f"@{k}" for k in ks])


def _view_labels(labels: Mapping[str, Any]) -> dict[str, Any]:
    constant = as_mapping(labels.get("constant"))
    gauc, calibration = as_mapping(labels.get("gauc")), as_mapping(labels.get("calibration"))
    facts = (
        (f"GAUC, {format_count(gauc.get('users'))} users with both labels", gauc.get("value")),
        ("Mean prediction over label rate", calibration.get("ratio")),
        ("Expected calibration error", calibration.get("expected_error")),
        ("AUC, at most off by", labels.get("auc_error") or None),
    )
    rows = []
    for key, title in (("auc", "AUC"), ("log_loss", "Log loss")):
        values = [labels.get(key), constant.get(key)]
        rows.append([title, *(values if None in values else _mark_best(key, values))])
    return {
        "count": labels.get("rows"),
        "rows": rows,
        "facts": [(name, format_metric(value)) for name, value in facts if value is not None],
        "has_log_loss": labels.get("log_loss") is not None,
    }


def _beyond_accuracy(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        name, _, k = key.partition("@")
        top = f" (top {k})" if k else ""
        if name == "coverage":
            yield f"Catalogue recommended to anyone{top}", format_share(value)
        elif name == "popularity_percentile":
            yield f"Mean popularity percentile{top}", format_metric(value)
        else:
            yield f"{plain_words(name)}{top}", format_metric(value)


def view_lists(data: RunData) -> dict[str, Any]:
    """Returns the first users' best items."""
    if not data.lists:
        raise MissingPartError(data.gaps.get("lists", "The file of ranked lists is empty."))
    lead = f"The first users of {RECOMMENDATIONS_FILE}, their best {SHOWN_ITEMS} items."
    return {"lead": lead, "rows": [[ranked.user, *_items(ranked, data)] for ranked in data.lists]}


def _items(ranked: RankedList, data: RunData) -> list[str]:
    names = data.catalogue.name if data.catalogue else str
    texts = [names(item) for item in ranked.items[:SHOWN_ITEMS]]
    scores = [f" ({score:.3g})" for score in ranked.scores] + [""] * SHOWN_ITEMS
    shown = [text + score for text, score in zip(texts, scores, strict=False)]
    return shown + [""] * (SHOWN_ITEMS - len(shown))

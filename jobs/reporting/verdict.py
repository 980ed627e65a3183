"""One sentence: is the model better than recommending what is popular, and by how much."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jobs.reporting.metric_names import metric_title
from jobs.reporting.numbers import format_count, format_metric, format_share
from jobs.reporting.run_data import RunData, as_mapping

PREFERRED_METRICS = ("hit_rate@10", "ndcg@10", "recall@10", "mrr")
_Z_95 = 1.959963984540054

Standing = Literal["ahead", "level", "behind", "unknown"]


@dataclass(frozen=True)
class Verdict:
    """The model beside popularity on the headline metric.

    Attributes:
        standing: `level` where the 95 % intervals of two rates overlap, or two values are equal.
        sentence: The verdict.
        detail: Protocol, number of rows, intervals.
    """

    standing: Standing
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
        if isinstance(known.get(name), int | float):
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
    popularity = as_mapping(systems.get("popularity")).get(metric)
    rows = ranked_rows(data.metrics)
    protocol_text = describe_protocol(protocol, data.metrics)
    if not isinstance(popularity, int | float):
        sentence = f"{data.model_name} reaches {_quote(metric, model)}."
        return Verdict("unknown", sentence, f"{protocol_text}. Popularity was not evaluated.")
    intervals = None
    if metric.startswith("hit_rate@") and isinstance(rows, int) and rows > 0:
        intervals = wilson_interval(model, rows), wilson_interval(popularity, rows)
    standing = _compare(model, popularity, intervals)
    detail = f"{protocol_text}."
    if intervals:
        (a, b), (c, d) = intervals
        detail += (
            f" 95% intervals: {format_share(a)} to {format_share(b)} and "
            f"{format_share(c)} to {format_share(d)}."
        )
    sentence = _sentence(data.model_name, metric, model, popularity, standing)
    return Verdict(standing, sentence, detail)


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
) -> Standing:
    if intervals:
        (low, high), (rival_low, rival_high) = intervals
        if low <= rival_high and rival_low <= high:
            return "level"
    if model == popularity:
        return "level"
    return "ahead" if model > popularity else "behind"


def _sentence(name: str, metric: str, model: float, popularity: float, standing: Standing) -> str:
    subject, _, k = metric.partition("@")
    is_hit = subject in ("hit_rate", "recall") and k
    what = f"finds the next item in its top {k}" if is_hit else f"reaches {_quote(metric, model)}"
    how = f" for {format_share(model)} of the rows" if is_hit else ""
    rival = format_share(popularity) if is_hit else format_metric(popularity)
    if standing == "level":
        return f"{name} {what}{how}: not clearly different from popularity ({rival})."
    if standing == "behind":
        return f"{name} {what}{how}: worse than popularity ({rival})."
    ratio = f"{model / popularity:.1f} times popularity's {rival}" if popularity else (
        f"against popularity's {rival}"
    )  # fmt: skip
    return f"{name} {what}{how}, {ratio}."


def _quote(metric: str, value: float) -> str:
    return f"{metric_title(metric)} {format_metric(value)}"

"""How good the model is: one sentence, every protocol beside the baselines, and sample lists."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from conf.run import RECOMMENDATIONS_FILE
from jobs.reporting.blocks import (
    Beside,
    Block,
    Facts,
    Figure,
    Note,
    Section,
    Table,
    TableCell,
    TableColumn,
    build_table,
    missing,
)
from jobs.reporting.formatting import (
    MISSING,
    TIMES,
    format_count,
    format_metric,
    format_share,
    metric_order,
    metric_title,
)
from jobs.reporting.plots import plot_metric_bars
from jobs.reporting.run_data import RankedList, RunData, as_mapping

PREFERRED_METRICS = ("hit_rate@10", "ndcg@10", "recall@10", "mrr")
_Z_95 = 1.959963984540054

VerdictKind = Literal["ahead", "level", "behind", "unknown"]


@dataclass(frozen=True)
class Verdict:
    """The model beside popularity on the headline metric.

    Attributes:
        standing: `level` where the 95 % intervals of two rates overlap, or two values are equal.
        sentence: The verdict.
        detail: Protocol, number of rows, intervals.
    """

    standing: VerdictKind
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
) -> VerdictKind:
    if intervals:
        (low, high), (rival_low, rival_high) = intervals
        if low <= rival_high and rival_low <= high:
            return "level"
    if model == popularity:
        return "level"
    return "ahead" if model > popularity else "behind"


def _sentence(
    name: str, metric: str, model: float, popularity: float, standing: VerdictKind
) -> str:
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


_BASELINES = ("popularity", "random")
_LOWER_IS_BETTER = ("loss", "log_loss")


def build_quality(data: RunData) -> Section:
    """Tables of every protocol, the headline one with its bars, labels and coverage."""
    lead = "The model beside recommending what is popular, and beside chance."
    if data.metrics is None:
        return Section("quality", "Quality", lead, (missing(data.gaps["metrics"]),))
    headline = headline_protocol(data.metrics)
    if headline is None:
        return Section("quality", "Quality", lead, (missing("The evaluation has no protocols."),))
    table, note = _protocol_table(headline, data)
    bars = _bars(headline, data)
    blocks: list[Block] = [Beside((bars, table)) if bars else table, *note]
    others = [p for p in data.metrics["protocols"] if p is not headline]
    tables = [_protocol_table(protocol, data)[0] for protocol in others]
    if tables:
        blocks.append(Beside(tuple(tables)))
    blocks += _extras(data.metrics)
    oov = data.metrics.get("oov_targets")
    if oov:
        blocks.append(
            Note(f"{format_count(oov)} targets were never met in training: all count as misses.")
        )
    return Section("quality", "Quality", lead, tuple(blocks))


def _system_names(systems: Mapping[str, Any], data: RunData) -> dict[str, str]:
    """Titles by system, the model first, then the baselines."""
    order = [name for name in ("model", *_BASELINES) if name in systems]
    order += [name for name in systems if name not in order]
    return {name: data.model_name if name == "model" else name.capitalize() for name in order}


def _protocol_table(protocol: Mapping[str, Any], data: RunData) -> tuple[Table, list[Block]]:
    systems = as_mapping(protocol.get("systems"))
    names = _system_names(systems, data)
    metrics = sorted({m for name in names for m in as_mapping(systems[name])}, key=metric_order)
    notes: list[Block] = []
    if _recall_repeats_hit_rate(systems, metrics):
        metrics = [metric for metric in metrics if not metric.startswith("recall@")]
        notes.append(Note("Recall@k equals HR@k here: one relevant item per row."))
    columns = [
        TableColumn("Metric", numeric=False),
        *(TableColumn(title) for title in names.values()),
    ]
    columns.append(TableColumn("Ratio", hint=f"{data.model_name} divided by popularity"))
    rows = [_metric_row(metric, systems, list(names)) for metric in metrics]
    caption = f"{_protocol_title(protocol)}: {describe_protocol(protocol, data.metrics or {})}."
    return build_table(caption, columns, rows), notes


def _metric_row(metric: str, systems: Mapping[str, Any], names: Sequence[str]) -> list[TableCell]:
    values = [as_mapping(systems[name]).get(metric) for name in names]
    known = [value for value in values if isinstance(value, int | float)]
    pick = min if metric in _LOWER_IS_BETTER else max
    best = pick(known) if known else None
    cells = [TableCell(metric_title(metric))]
    cells += [TableCell(format_metric(value), best=value is not None and value == best)
              for value in values]  # fmt: skip
    model = as_mapping(systems.get("model")).get(metric)
    rival = as_mapping(systems.get("popularity")).get(metric)
    return [
        *cells,
        TableCell(f"{model / rival:.2f}{TIMES}" if model is not None and rival else MISSING),
    ]


def _recall_repeats_hit_rate(systems: Mapping[str, Any], metrics: Sequence[str]) -> bool:
    pairs = [(m, m.replace("recall", "hit_rate")) for m in metrics if m.startswith("recall@")]
    return bool(pairs) and all(
        as_mapping(values).get(recall) == as_mapping(values).get(hit)
        for values in systems.values()
        for recall, hit in pairs
    )


def _protocol_title(protocol: Mapping[str, Any]) -> str:
    name = str(protocol.get("name", "protocol"))
    count = name.removeprefix("sampled_")
    if count != name:
        return f"{count} sampled negatives" if count.isdigit() else "Candidates of the data set"
    titles = {"full_unseen": "Full ranking, unseen items", "full_all": "Full ranking, all items"}
    return titles.get(name, name.replace("_", " ").capitalize())


def _bars(protocol: Mapping[str, Any], data: RunData) -> Figure | None:
    systems = as_mapping(protocol.get("systems"))
    names = _system_names(systems, data)
    metrics = [m for m in as_mapping(systems.get("model")) if m.partition("@")[2].isdigit()]
    families = [f for f in ("hit_rate", "ndcg") if any(m.startswith(f"{f}@") for m in metrics)]
    ks = sorted({int(m.partition("@")[2]) for m in metrics})
    if not families or not ks:
        return None
    titles = {"hit_rate": "Hit rate", "ndcg": "NDCG"}
    values = {
        titles[family]: {
            title: [float(as_mapping(systems[name]).get(f"{family}@{k}") or 0.0) for k in ks]
            for name, title in names.items()
        }
        for family in families
    }
    label = (
        f"Bar chart: {' and '.join(values)} of {', '.join(names.values())} "
        f"at {', '.join(map(str, ks))}. The table beside it holds the values."
    )
    return Figure(plot_metric_bars(values, ks, label), "The headline protocol over cut-offs.")


def _extras(metrics: Mapping[str, Any]) -> list[Block]:
    labels, beyond = _label_blocks(metrics), _beyond_accuracy(metrics)
    if not labels:
        return beyond
    table, *notes = labels
    return [Beside((table, *beyond)), *notes]


def _label_blocks(metrics: Mapping[str, Any]) -> list[Block]:
    labels = metrics.get("labels")
    if not isinstance(labels, Mapping):
        return []
    constant = as_mapping(labels.get("constant"))
    rows = []
    for key, title, pick in (("auc", "AUC", max), ("log_loss", "Log loss", min)):
        values = [labels.get(key), constant.get(key)]
        known = [value for value in values if isinstance(value, int | float)]
        best = pick(known) if known else None
        cells = [TableCell(format_metric(value), best=len(known) > 1 and value == best)
                 for value in values]  # fmt: skip
        rows.append([TableCell(title), *cells])
    columns = (
        TableColumn("Metric", numeric=False),
        TableColumn("Model"),
        TableColumn("Constant label rate"),
    )
    blocks: list[Block] = [
        build_table(f"Labels of {format_count(labels.get('rows'))} rows.", columns, rows)
    ]
    facts = _label_facts(labels)
    blocks += [Facts(facts)] if facts else []
    if labels.get("log_loss") is None:
        blocks.append(Note("No log loss: this objective does not train calibrated probabilities."))
    return blocks


def _label_facts(labels: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    gauc, calibration = as_mapping(labels.get("gauc")), as_mapping(labels.get("calibration"))
    facts = (
        (
            f"GAUC, {format_count(gauc.get('users'))} users with both labels",
            gauc.get("value"),
        ),
        ("Mean prediction over label rate", calibration.get("ratio")),
        ("Expected calibration error", calibration.get("expected_error")),
        ("AUC, at most off by", labels.get("auc_error") or None),
    )
    return tuple((name, format_metric(value)) for name, value in facts if value is not None)


def _beyond_accuracy(metrics: Mapping[str, Any]) -> list[Block]:
    values = as_mapping(metrics.get("beyond_accuracy"))
    facts = []
    for key, value in values.items():
        name, _, k = key.partition("@")
        top = f" (top {k})" if k else ""
        if name == "coverage":
            facts.append((f"Catalogue recommended to anyone{top}", format_share(value)))
        elif name == "popularity_percentile":
            facts.append((f"Mean popularity percentile{top}", format_metric(value)))
        else:
            facts.append((f"{name.replace('_', ' ')}{top}", format_metric(value)))
    return [Facts(tuple(facts))] if facts else []


_SHOWN_ITEMS = 5


def build_lists(data: RunData) -> Section:
    """The first users' first items."""
    lead = f"The first users of {RECOMMENDATIONS_FILE}, their best {_SHOWN_ITEMS} items."
    if not data.lists:
        text = data.gaps.get("lists", "The file of ranked lists is empty.")
        return Section("lists", "Ranked lists", "What users would see.", (missing(text),))
    columns = [TableColumn("User", numeric=False)]
    columns += [TableColumn(str(rank + 1), numeric=False) for rank in range(_SHOWN_ITEMS)]
    rows = [[TableCell(ranked.user), *_list_cells(ranked, data)] for ranked in data.lists]
    table = build_table("Items from best to fifth, with their scores.", columns, rows)
    return Section("lists", "Ranked lists", lead, (table,))


def _list_cells(ranked: RankedList, data: RunData) -> list[TableCell]:
    names = data.catalogue.name if data.catalogue else str
    cells = []
    for rank in range(_SHOWN_ITEMS):
        if rank >= len(ranked.items):
            cells.append(TableCell(""))
            continue
        score = f" ({ranked.scores[rank]:.3g})" if rank < len(ranked.scores) else ""
        cells.append(TableCell(f"{names(ranked.items[rank])}{score}"))
    return cells

"""How good the model is, beside the baselines, under every protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jobs.reporting.blocks import (
    Beside,
    Block,
    Cell,
    Column,
    Facts,
    Figure,
    Note,
    Section,
    Table,
    build_table,
    missing,
)
from jobs.reporting.metric_names import metric_order, metric_title
from jobs.reporting.numbers import MISSING, TIMES, format_count, format_metric, format_share
from jobs.reporting.plots import plot_metric_bars
from jobs.reporting.run_data import RunData, as_mapping
from jobs.reporting.verdict import describe_protocol, headline_protocol

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
    columns = [Column("Metric", numeric=False), *(Column(title) for title in names.values())]
    columns.append(Column("Ratio", hint=f"{data.model_name} divided by popularity"))
    rows = [_metric_row(metric, systems, list(names)) for metric in metrics]
    caption = f"{_protocol_title(protocol)}: {describe_protocol(protocol, data.metrics or {})}."
    return build_table(caption, columns, rows), notes


def _metric_row(metric: str, systems: Mapping[str, Any], names: Sequence[str]) -> list[Cell]:
    values = [as_mapping(systems[name]).get(metric) for name in names]
    known = [value for value in values if isinstance(value, int | float)]
    pick = min if metric in _LOWER_IS_BETTER else max
    best = pick(known) if known else None
    cells = [Cell(metric_title(metric))]
    cells += [Cell(format_metric(value), best=value is not None and value == best)
              for value in values]  # fmt: skip
    model = as_mapping(systems.get("model")).get(metric)
    rival = as_mapping(systems.get("popularity")).get(metric)
    return [*cells, Cell(f"{model / rival:.2f}{TIMES}" if model is not None and rival else MISSING)]


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
        cells = [Cell(format_metric(value), best=len(known) > 1 and value == best)
                 for value in values]  # fmt: skip
        rows.append([Cell(title), *cells])
    columns = (Column("Metric", numeric=False), Column("Model"), Column("Constant label rate"))
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

"""Merges the statistics of shards into those of a split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from conf.errors import InputDataError
from etl.statistics.histogram import merge_histograms
from etl.statistics.labels import merge_comparisons, summarize_comparison
from etl.statistics.moments import Moments
from etl.statistics.quantiles import QuantileSummary, merge_summaries, summarize_counted
from etl.statistics.sketch import FrequencySketch, merge_sketches

_ADDED = ("rows", "missing", "values", "zeros", "oov", "nan", "infinite")
_SKETCH, _SUMMARY, _BY_LABEL = "sketch", "summary", "by_label"
_OPAQUE = (_SKETCH, _SUMMARY, _BY_LABEL)


def merge_statistics(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merges statistics; counts and histograms come out as from one pass over all rows.

    Mean and standard deviation agree with one pass to rounding. Merge in the order of the
    shards, and the result is the same in each run.

    Args:
        parts: What `StatisticsAccumulator.to_dict` or this function returned.

    Returns:
        Statistics by feature, in the same form; empty where there are no parts.

    Raises:
        InputDataError: The parts have different features, or were summarised before.
    """
    if not parts:
        return {}
    names = list(parts[0])
    for part in parts[1:]:
        if list(part) != names:
            raise InputDataError(
                "statistics of different features cannot be merged",
                received=", ".join(part),
                allowed=", ".join(names),
            )
    return {name: _merge_feature(name, [part[name] for part in parts]) for name in names}


def summarize_statistics(merged: Mapping[str, Any]) -> dict[str, Any]:
    """Drops what only merging needs.

    Args:
        merged: Statistics by feature.

    Returns:
        The same without `sketch` and `summary`, and with `label` for `by_label`: small enough for
        a manifest.
    """
    return {name: _summarize_feature(feature) for name, feature in merged.items()}


def _summarize_feature(feature: Mapping[str, Any]) -> dict[str, Any]:
    summary = {key: value for key, value in feature.items() if key not in _OPAQUE}
    if _BY_LABEL in feature:
        summary["label"] = summarize_comparison(feature[_BY_LABEL])
    return summary


def _merge_feature(name: str, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    kinds = {(part["dtype"], "length" in part) for part in parts}
    if len(kinds) > 1 or not all(_SKETCH in part for part in parts):
        raise InputDataError(
            f"statistics of feature {name!r} cannot be merged",
            received=", ".join(sorted(str(dtype) for dtype, _ in kinds)),
            allowed="one type, with the `sketch` that summarising drops",
        )
    merged: dict[str, Any] = {"dtype": parts[0]["dtype"]}
    merged |= {key: sum(part[key] for part in parts) for key in _ADDED if key in parts[0]}
    if "mean" in parts[0]:
        merged |= _merge_moments(parts)
    if "histogram" in parts[0]:
        merged["histogram"] = merge_histograms([part["histogram"] for part in parts])
    sketch = merge_sketches([FrequencySketch.loads(part[_SKETCH]) for part in parts])
    merged |= sketch.to_json()
    if _SUMMARY in parts[0]:
        summaries = [QuantileSummary.loads(part[_SUMMARY]) for part in parts]
        merged |= (summarize_counted(sketch) or merge_summaries(summaries)).to_json()
    if "length" in parts[0]:
        merged["length"] = _merge_lengths(parts, merged["rows"] - merged["missing"])
    if all(_BY_LABEL in part for part in parts):
        merged[_BY_LABEL] = merge_comparisons([part[_BY_LABEL] for part in parts])
    return merged


def _merge_moments(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    merged = Moments()
    for part in parts:
        count = part["values"] - part.get("nan", 0) - part.get("infinite", 0)
        merged = merged.merge(Moments.from_json(count, part))
    return merged.to_json()


def _merge_lengths(parts: Sequence[Mapping[str, Any]], present: int) -> dict[str, Any]:
    lengths = [part["length"] for part in parts]
    known = [length for length in lengths if length["min"] is not None]
    total = sum(length["total"] for length in lengths)
    return {
        "min": min((length["min"] for length in known), default=None),
        "max": max((length["max"] for length in known), default=None),
        "mean": total / present if present else None,
        "total": total,
        "histogram": merge_histograms([length["histogram"] for length in lengths]),
    }

"""Features that give the label away: perfect or near-perfect association on the train split."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conf.etl.contract import LeakageConfig
from conf.schema import FeatureSchema, Role
from etl.quality.result import RuleResult
from etl.statistics.labels import summarize_comparison

_READ_BY_MODELS: tuple[Role, ...] = ("user", "item", "context")


def find_leaks(
    config: LeakageConfig, schema: FeatureSchema, statistics: Mapping[str, Mapping[str, Any]]
) -> list[RuleResult]:
    """Returns one result per feature that tells too much; none where all is well.

    Args:
        config: What is too much.
        schema: The features; those that no model reads are left out.
        statistics: Unabridged statistics of the train split.
    """
    leaks = []
    for spec in schema.by_role(*_READ_BY_MODELS):
        comparison = statistics.get(spec.name, {}).get("by_label")
        if comparison is None:
            continue
        found = summarize_comparison(comparison)
        if found["rows"] < config.min_rows:
            continue
        measures = {
            "correlation": abs(found["correlation"] or 0.0),
            "correlation ratio": found["correlation_ratio"] or 0.0,
        }
        worst = max(measures, key=lambda name: measures[name])
        if measures[worst] > config.maximum:
            leaks.append(
                RuleResult(
                    f"leakage feature {spec.name}",
                    config.severity,
                    False,
                    f"{worst} with the label {measures[worst]:.4f} over {found['rows']:,} rows",
                    f"at most {config.maximum:g}; leave the feature out, or give it the role id",
                )
            )
    return leaks

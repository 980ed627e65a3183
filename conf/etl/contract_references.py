"""Checks of what the data contract names: sources, columns, features and splits.

Each raises ValueError, which pydantic turns into a config error.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from conf.errors import did_you_mean
from conf.etl.contract import RuleConfig
from conf.etl.references import EVALUATION_FEATURES, check_key, source_columns
from conf.etl.sources import NUMBER_TYPES
from conf.splits import ALL_SPLITS

if TYPE_CHECKING:
    from conf.etl.build import BuildConfig


def check_contract_references(config: BuildConfig) -> None:
    """Checks every source, column, feature and split that the contract names.

    Raises:
        ValueError: One is not declared, or cannot play the part it is given.
    """
    _check_allowed(config)
    features = {feature.name for feature in config.features} | set(EVALUATION_FEATURES)
    features |= {label.name for label in config.all_labels}
    for name in config.contract.slices:
        _require("contract.slices", "feature", name, features)
    if config.contract.slices and config.first_label is None:
        raise ValueError("contract.slices: there is no label whose rate could be kept by slice")
    for index, rule in enumerate(config.contract.rules):
        _check_rule(config, f"contract.rules[{index}] ({rule.kind})", rule, features)


def _check_allowed(config: BuildConfig) -> None:
    labels, features = config.all_labels, config.features
    known = {join.source for join in config.joins}
    known |= {label.conversion.source for label in labels if label.conversion is not None}
    known |= {label.name for label in labels} | {feature.name for feature in features}
    known |= {feature.vocabulary for feature in features if feature.vocabulary is not None}
    for name in config.contract.allow:
        _require("contract.allow", "joined source, vocabulary, feature or label", name, known)


def _require(where: str, what: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        raise ValueError(f"{where}: no such {what}: {name!r}; {did_you_mean(name, known)}")


def _check_rule(config: BuildConfig, where: str, rule: RuleConfig, features: set[str]) -> None:
    if rule.split is not None:
        _require(where, "split", rule.split, ALL_SPLITS)
    if rule.feature is not None:
        _require(where, "feature", rule.feature, features)
        _check_rule_feature(config, where, rule)
    if rule.source is None:
        return
    _require(where, "source", rule.source, config.sources)
    columns = source_columns(config, rule.source)
    if rule.dictionary is not None:
        _require(where, "dictionary", rule.dictionary, config.sources)
        check_key(config, where, columns, rule.columns[0], rule.dictionary)
    for column in rule.columns:
        _check_rule_column(where, rule, column, columns.require(where, column))


def _check_rule_column(where: str, rule: RuleConfig, column: str, kind: str) -> None:
    element = kind.removeprefix("list<").removesuffix(">")
    if rule.kind == "type" and rule.type != kind:
        raise ValueError(f"{where}: column {column!r} is declared as {kind}, not {rule.type}")
    if rule.kind in ("range", "freshness") and element not in NUMBER_TYPES:
        raise ValueError(f"{where}: column {column!r} is {kind}, not a number")
    # Beside a number Spark would take text for one: "01" would be 1.
    others = [v for v in rule.one_of or () if isinstance(v, str) != (element == "string")]
    if others:
        raise ValueError(f"{where}: column {column!r} is {kind}; one_of holds {others[0]!r}")
    if rule.kind in ("unique", "references", "freshness") and kind != element:
        raise ValueError(f"{where}: column {column!r} is a list")


def _check_rule_feature(config: BuildConfig, where: str, rule: RuleConfig) -> None:
    ids = {f.name for f in config.features if f.encoding.kind == "vocabulary"}
    by_order = rule.kind == "range" or (rule.kind == "drift" and rule.metric == "ks")
    if rule.feature in ids and by_order:
        raise ValueError(
            f"{where}: feature {rule.feature!r} holds ids of a vocabulary, which have no order; "
            "use domain, null_rate, or drift by psi or js"
        )

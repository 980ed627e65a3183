"""Checks of what the data contract names: sources, columns, features and splits.

Each raises ValueError, which pydantic turns into a config error.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from conf.errors import did_you_mean
from conf.etl.contract import (
    ContractValueRule,
    DomainRule,
    DriftRule,
    FreshnessRule,
    RangeRule,
    ReferencesRule,
    RuleConfig,
    TypeRule,
    UniqueRule,
    VolumeRule,
)
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
    if config.contract.slices and config.label is None:
        raise ValueError("contract.slices: there is no label whose rate could be kept by slice")
    for index, rule in enumerate(config.contract.rules):
        _check_rule(config, f"contract.rules[{index}] ({rule.kind})", rule, features)


def _check_allowed(config: BuildConfig) -> None:
    labels, allow = config.all_labels, config.contract.allow
    joined = {join.source for join in config.joins}
    joined |= {label.conversion.source for label in labels if label.conversion is not None}
    known = {
        "unmatched": ("joined source", allow.unmatched, joined),
        "empty_vocabulary": (
            "vocabulary",
            allow.empty_vocabulary,
            {feature.vocabulary for feature in config.features if feature.vocabulary is not None},
        ),
        "constant": ("feature", allow.constant, {feature.name for feature in config.features}),
        "one_class": ("label", allow.one_class, {label.name for label in labels}),
    }
    for key, (what, names, declared) in known.items():
        for name in names:
            _require(f"contract.allow.{key}", what, name, declared)


def _require(where: str, what: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        raise ValueError(f"{where}: no such {what}: {name!r}; {did_you_mean(name, known)}")


def _check_rule(config: BuildConfig, where: str, rule: RuleConfig, features: set[str]) -> None:
    if isinstance(rule, ContractValueRule | DriftRule | VolumeRule) and rule.split is not None:
        _require(where, "split", rule.split, ALL_SPLITS)
    if isinstance(rule, ContractValueRule | DriftRule) and rule.feature is not None:
        _require(where, "feature", rule.feature, features)
        _check_rule_feature(config, where, rule)
        return
    source = getattr(rule, "source", None)
    if source is None:
        return
    _require(where, "source", source, config.sources)
    columns = source_columns(config, source)
    if isinstance(rule, ReferencesRule):
        _require(where, "dictionary", rule.dictionary, config.sources)
        check_key(config, where, columns, rule.column, rule.dictionary)
    named = rule.columns if isinstance(rule, UniqueRule) else [getattr(rule, "column", None)]
    for column in named:
        if column is not None:
            _check_rule_column(where, rule, column, columns.require(where, column))


def _check_rule_column(where: str, rule: RuleConfig, column: str, kind: str) -> None:
    element = kind.removeprefix("list<").removesuffix(">")
    if isinstance(rule, TypeRule) and rule.type != kind:
        raise ValueError(f"{where}: column {column!r} is declared as {kind}, not {rule.type}")
    if isinstance(rule, RangeRule | FreshnessRule) and element not in NUMBER_TYPES:
        raise ValueError(f"{where}: column {column!r} is {kind}, not a number")
    if isinstance(rule, DomainRule):
        # Beside a number Spark would take text for one: "01" would be 1.
        others = [v for v in rule.one_of if isinstance(v, str) != (element == "string")]
        if others:
            raise ValueError(f"{where}: column {column!r} is {kind}; one_of holds {others[0]!r}")
    if isinstance(rule, UniqueRule | ReferencesRule | FreshnessRule) and kind != element:
        raise ValueError(f"{where}: column {column!r} is a list")


def _check_rule_feature(
    config: BuildConfig, where: str, rule: ContractValueRule | DriftRule
) -> None:
    ids = {f.name for f in config.features if f.encoding.kind == "vocabulary"}
    by_order = isinstance(rule, RangeRule) or (isinstance(rule, DriftRule) and rule.metric == "ks")
    if rule.feature in ids and by_order:
        raise ValueError(
            f"{where}: feature {rule.feature!r} holds ids of a vocabulary, which have no order; "
            "use domain, null_rate, or drift by psi or js"
        )

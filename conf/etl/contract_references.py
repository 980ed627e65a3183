"""Checks of the names that a data contract uses, before anything is read."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from conf.errors import did_you_mean
from conf.etl.contract import (
    NUMERIC_TYPES,
    DomainRule,
    DriftRule,
    FreshnessRule,
    RangeRule,
    ReferencesRule,
    RuleConfig,
    TypeRule,
    UniqueRule,
    ValueRule,
    VolumeRule,
)

if TYPE_CHECKING:
    from conf.etl import BuildConfig

SPLITS = ("train", "validation", "test", "catalog", "users")
_MADE = ("seen", "candidates")


def check_contract_references(config: BuildConfig) -> None:
    """Checks every source, column, feature and split that the contract names.

    Raises:
        ValueError: One is not declared, or cannot play the part it is given.
    """
    features = {feature.name for feature in config.features} | set(_MADE)
    features |= {config.label.name} if config.label else set()
    for name in config.contract.slices:
        _require("contract.slices", "feature", name, features)
    if config.contract.slices and config.label is None:
        raise ValueError("contract.slices: there is no label whose rate could be kept by slice")
    for index, rule in enumerate(config.contract.rules):
        _check_rule(config, f"contract.rules[{index}] ({rule.kind})", rule, features)


def _check_rule(config: BuildConfig, where: str, rule: RuleConfig, features: set[str]) -> None:
    if isinstance(rule, ValueRule | DriftRule | VolumeRule) and rule.split is not None:
        _require(where, "split", rule.split, SPLITS)
    if isinstance(rule, ValueRule | DriftRule) and rule.feature is not None:
        _require(where, "feature", rule.feature, features)
        _check_feature(config, where, rule)
        return
    source = getattr(rule, "source", None)
    if source is None:
        return
    _require(where, "source", source, config.sources)
    declared = config.sources[source].column_types
    columns = rule.columns if isinstance(rule, UniqueRule) else [getattr(rule, "column", None)]
    for column in columns:
        if column is not None:
            _require(where, f"column of source {source!r}", column, declared)
            _check_column(config, where, rule, column, declared[column])


def _check_column(
    config: BuildConfig, where: str, rule: RuleConfig, column: str, kind: str
) -> None:
    element = kind.removeprefix("list<").removesuffix(">")
    if isinstance(rule, TypeRule) and rule.type != kind:
        raise ValueError(f"{where}: column {column!r} is declared as {kind}, not {rule.type}")
    if isinstance(rule, RangeRule | FreshnessRule) and element not in NUMERIC_TYPES:
        raise ValueError(f"{where}: column {column!r} is {kind}, not a number")
    if isinstance(rule, DomainRule) and element != "string":
        others = [value for value in rule.one_of if isinstance(value, str)]
        if others:
            raise ValueError(f"{where}: column {column!r} is {kind}; one_of holds {others[0]!r}")
    if isinstance(rule, UniqueRule | ReferencesRule | FreshnessRule) and kind != element:
        raise ValueError(f"{where}: column {column!r} is a list")
    if isinstance(rule, ReferencesRule):
        _require(where, "dictionary", rule.dictionary, config.sources)
        dictionary = config.sources[rule.dictionary]
        key = None if dictionary.key is None else dictionary.column_types[dictionary.key]
        if key != kind:
            raise ValueError(
                f"{where}: column {column!r} is {kind}, the key of {rule.dictionary!r} is "
                f"{key or 'not declared'}"
            )


def _check_feature(config: BuildConfig, where: str, rule: ValueRule | DriftRule) -> None:
    declared = next((f for f in config.features if f.name == rule.feature), None)
    is_id = declared is not None and declared.encoding.kind == "vocabulary"
    wants_numbers = isinstance(rule, RangeRule) or (
        isinstance(rule, DriftRule) and rule.metric == "ks"
    )
    if is_id and wants_numbers:
        raise ValueError(
            f"{where}: feature {rule.feature!r} holds ids of a vocabulary, which have no order; "
            "use domain, null_rate, or drift by psi or js"
        )


def _require(where: str, what: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        raise ValueError(f"{where}: no such {what}: {name!r}; {did_you_mean(name, known)}")

"""What the `users` and `catalog` splits hold of a feature's columns, and what they cannot."""

from __future__ import annotations

from conf.errors import ConfigError
from conf.etl import BuildConfig
from etl.behaviour.columns import history_names
from etl.behaviour.rolling import rolling_names
from etl.features import FeaturePlan
from etl.split import CATALOG, USERS, record_splits


def user_columns(config: BuildConfig, plan: FeaturePlan) -> set[str]:
    """Returns the columns of user features that dictionaries of users give."""
    return _columns(plan, "user", config.events.user) - _made(config, "user")


def item_columns(config: BuildConfig, plan: FeaturePlan) -> set[str]:
    """Returns the columns of item features that dictionaries of items give."""
    return _columns(plan, "item", config.events.item) - _made(config, "item")


def check_served_columns(config: BuildConfig, plan: FeaturePlan) -> None:
    """Checks that what serving asks of a user or an item is known without an event.

    Raises:
        ConfigError: A feature of role user or item is a column of the event, or a rolling feature
            by other keys.
    """
    splits = record_splits(config)
    if USERS in splits:
        _check(config, user_columns(config, plan), "user", _made(config, "user"))
    if CATALOG in splits:
        _check(config, item_columns(config, plan), "item", _made(config, "item"))


def _columns(plan: FeaturePlan, role: str, key: str | None) -> set[str]:
    return {c for f in plan.features if f.role == role for c in f.columns if c != key}


def _made(config: BuildConfig, role: str) -> set[str]:
    """Columns that are made of the log and known at its end for a user or an item alone."""
    if role == "item":
        return rolling_names(config, config.events.item or "")
    return {*history_names(config), *rolling_names(config, config.events.user or "")}


def _check(config: BuildConfig, columns: set[str], role: str, made: set[str]) -> None:
    key = (config.events.user if role == "user" else config.events.item) or ""
    known = {
        column
        for join in config.joins
        if join.column == key
        for column in config.sources[join.source].column_types
    }
    unknown = sorted(columns - known)
    if unknown:
        raise ConfigError(
            f"features of role {role} must be the {role}'s id, columns of a dictionary joined on "
            f"{key!r}, or counted by {key!r} alone: serving has no event to take others from",
            received=", ".join(unknown),
            allowed=", ".join(sorted({*known, *made, key})),
            fix="give the feature the role context, or join a dictionary",
        )

"""Which vocabularies a config's features need: their columns, types and limits."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conf.errors import ConfigError, did_you_mean
from conf.etl import FeatureConfig, TopPerGroupConfig, VocabularyConfig
from etl.feature_checks import value_type

_LIMITS = (
    "min_count",
    "max_size",
    "top_per_group",
    "oov_buckets",
    "incremental",
    "expire_after_days",
)


@dataclass(frozen=True)
class VocabularyPlan:
    """One vocabulary to fit.

    Attributes:
        name: Its name.
        columns: Raw columns of the train split whose tokens it holds.
        token_dtype: `int64` or `string`.
        min_count: Rarer tokens are OOV.
        max_size: Most frequent tokens kept, or None for all.
        top_per_group: Tokens kept of each group, or None for no such rule.
        oov_buckets: Buckets of unknown tokens, or None.
        incremental: Whether it grows out of the previous version's.
        expire_after_days: Age at which a token is retired, or None for never.
    """

    name: str
    columns: tuple[str, ...]
    token_dtype: str
    min_count: int
    max_size: int | None
    top_per_group: TopPerGroupConfig | None = None
    oov_buckets: int | None = None
    incremental: bool = False
    expire_after_days: int | None = None


def plan_vocabularies(
    features: Sequence[FeatureConfig],
    types: Mapping[str, str],
    derived: Collection[str],
    origins: Mapping[str, str] | None = None,
) -> tuple[VocabularyPlan, ...]:
    """Plans the vocabularies that features name.

    Args:
        features: The features.
        types: Type by column.
        derived: Columns that hold tokens of other columns, and are not fitted on themselves.
        origins: By column of a history, the event column whose values it carries along.

    Raises:
        ConfigError: A vocabulary would hold tokens of two types, or none; or features that share
            one ask for different limits.
    """
    plans: dict[str, VocabularyPlan] = {}
    origins = origins or {}
    # What a history carries along comes last: it shares the vocabulary of its column, if any.
    for feature in sorted(features, key=lambda feature: feature.column in origins):
        name = feature.vocabulary
        if name is None or feature.column in derived:
            continue
        dtype = value_type(types[feature.column])
        if dtype not in ("int64", "string"):
            raise ConfigError(
                f"feature {feature.name!r} cannot have a vocabulary",
                received=f"column {feature.column!r} of type {dtype}",
                allowed="int64 or string tokens",
                fix="use `encoding: {kind: identity}`",
            )
        known = plans.get(name)
        if known and known.token_dtype != dtype:
            raise ConfigError(
                f"vocabulary {name!r} would hold tokens of two types",
                received=f"{known.token_dtype} and {dtype}",
                fix="give the features vocabularies of their own",
            )
        if known and feature.column in origins:
            continue
        column = origins.get(feature.column, feature.column)
        columns = (*(known.columns if known else ()), column)
        plans[name] = VocabularyPlan(name, columns, dtype, *_limits(name, features))
    for feature in features:
        name = feature.vocabulary
        if name is not None and name not in plans:
            raise ConfigError(
                f"feature {feature.name!r} uses a vocabulary that no other feature fits",
                received=name,
                allowed=", ".join(plans),
                fix=did_you_mean(name, plans),
            )
    return tuple(plans.values())


def _limits(name: str, features: Sequence[FeatureConfig]) -> tuple[Any, ...]:
    """The limits that the features of a vocabulary ask for, in the order of `_LIMITS`."""
    asked = [feature.encoding for feature in features if feature.vocabulary == name]
    default = VocabularyConfig()
    found = []
    for limit in _LIMITS:
        usual = getattr(default, limit)
        # Kinds without a limit, and features that do not state it, leave it to the others.
        values = [getattr(encoding, limit, usual) for encoding in asked]
        stated = list(dict.fromkeys(value for value in values if value != usual))
        if len(stated) > 1:
            raise ConfigError(
                f"features that share vocabulary {name!r} ask for different limits",
                received="; ".join(f"{limit}: {value}" for value in stated),
                allowed=f"one {limit} per vocabulary",
            )
        found.append(stated[0] if stated else usual)
    return tuple(found)

"""From the config to the schema: which raw column becomes which feature, by which vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from conf.errors import ConfigError, did_you_mean
from conf.etl import BuildConfig, FeatureConfig, TargetConfig, VocabularyConfig
from conf.manifest import DatasetKeys
from etl.feature_checks import check_encodings, value_type
from etl.vocabulary_plans import VocabularyPlan, plan_vocabularies

SEEN = "seen"
CANDIDATES = "candidates"


@dataclass(frozen=True)
class FeaturePlan:
    """Everything about features that is known before the data is scanned."""

    features: tuple[FeatureConfig, ...]
    column_types: Mapping[str, str]
    vocabularies: tuple[VocabularyPlan, ...]
    keys: DatasetKeys

    def value_type(self, column: str) -> str:
        """Type of a column's values, those of its lists where it holds lists."""
        return value_type(self.column_types[column])

    def feature(self, name: str) -> FeatureConfig:
        """Returns a feature by name; the plan has been checked to have it."""
        return next(feature for feature in self.features if feature.name == name)

    @property
    def columns(self) -> tuple[str, ...]:
        """The raw columns that features read, each once."""
        return tuple(dict.fromkeys(name for f in self.features for name in f.columns))

    @property
    def folds(self) -> tuple[int, ...]:
        """Numbers of folds that out-of-fold encodings ask for."""
        asked = {f.encoding.folds for f in self.features if isinstance(f.encoding, TargetConfig)}
        return tuple(sorted(asked))


def plan_features(config: BuildConfig) -> FeaturePlan:
    """Resolves the features of a config against its declared columns.

    Raises:
        ConfigError: A feature's column is not declared, an encoding does not take
            the column's type, or one vocabulary is asked to hold tokens of two types.
    """
    types = declared_columns(config)
    features = (*config.features, *_automatic_features(config, types))
    names = [feature.name for feature in features]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ConfigError("features are declared twice", received=", ".join(repeated))
    for feature in features:
        for column in feature.columns:
            if column not in types:
                raise ConfigError(
                    f"feature {feature.name!r} reads a column that is not declared",
                    received=column,
                    allowed=", ".join(sorted(types)),
                    fix=did_you_mean(column, types),
                )
    check_encodings(features, types)
    derived = {SEEN, CANDIDATES, config.history.name if config.history else ""}
    return FeaturePlan(
        features=features,
        column_types=types,
        vocabularies=plan_vocabularies(features, types, derived),
        keys=_keys(config, features),
    )


def declared_columns(config: BuildConfig) -> dict[str, str]:
    """Returns the type of each column that a feature may read."""
    types = dict(config.sources[config.events.source].column_types)
    for join in config.joins:
        dictionary = config.sources[join.source]
        added = dictionary.column_types.items()
        types.update({name: kind for name, kind in added if name != dictionary.key})
    item_type = types.get(config.events.item, "int64")
    if config.history:
        types[config.history.name] = f"list<{item_type}>"
    if config.seen:
        types[SEEN] = f"list<{item_type}>"
    if config.split.test_source and config.split.candidates:
        types[CANDIDATES] = f"list<{item_type}>"
    if config.label:
        types[config.label.name] = "float32"
    return types


def _automatic_features(config: BuildConfig, types: Mapping[str, str]) -> tuple[FeatureConfig, ...]:
    """Seen items, candidates and label need no declaration: the config says that they exist."""
    declared = {feature.column for feature in config.features}
    item = next(f for f in config.features if f.column == config.events.item and f.role == "item")
    shared = VocabularyConfig(name=_name_of(item))
    automatic = [
        FeatureConfig(name=column, column=column, role="id", encoding=shared)
        for column in (SEEN, CANDIDATES)
        if column in types and column not in declared
    ]
    if config.label and config.label.name not in declared:
        automatic.append(
            FeatureConfig.model_validate(
                {
                    "name": config.label.name,
                    "column": config.label.name,
                    "role": "label",
                    "encoding": {"kind": "identity"},
                }
            )
        )
    return tuple(automatic)


def _name_of(feature: FeatureConfig) -> str:
    if not isinstance(feature.encoding, VocabularyConfig):
        raise ConfigError(
            f"feature {feature.name!r} must be encoded by a vocabulary: it is the item's id",
            received=feature.encoding.kind,
            allowed="vocabulary",
        )
    return feature.encoding.name or feature.name


def _keys(config: BuildConfig, features: Sequence[FeatureConfig]) -> DatasetKeys:
    def find(column: str | None, role: str | None = None) -> str | None:
        return next(
            (f.name for f in features if f.column == column and role in (None, f.role)), None
        )

    user, item = find(config.events.user, "user"), find(config.events.item, "item")
    if user is None or item is None:
        raise ConfigError(
            "the user's id must be a feature of role user, and the item's of role item",
            received=f"user: {user}, item: {item}",
            fix=f"encode columns {config.events.user!r} and {config.events.item!r}",
        )
    return DatasetKeys(
        user=user,
        item=item,
        history=find(config.history.name) if config.history else None,
        seen=find(SEEN) if config.seen else None,
        candidates=find(CANDIDATES),
        label=find(config.label.name) if config.label else None,
    )

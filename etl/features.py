"""From the config to the schema: which raw column becomes which feature, by which vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from conf.errors import ConfigError, did_you_mean
from conf.etl import BuildConfig, FeatureConfig, TargetConfig, VocabularyConfig
from conf.etl.columns import is_list_type
from conf.manifest import DatasetKeys
from etl import sample_columns
from etl.behaviour.columns import column_origins, made_columns
from etl.feature_checks import check_encodings, value_type
from etl.fit_checks import check_fits
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

    def is_list(self, column: str) -> bool:
        """Whether a column holds lists."""
        return is_list_type(self.column_types[column])

    def feature(self, name: str) -> FeatureConfig:
        """Returns a feature by name; the plan has been checked to have it."""
        return next(feature for feature in self.features if feature.name == name)

    @property
    def columns(self) -> tuple[str, ...]:
        """The raw columns that features read, each once."""
        return tuple(dict.fromkeys(name for f in self.features for name in f.columns))

    @property
    def has_growing_vocabulary(self) -> bool:
        """Whether a vocabulary grows out of the version before."""
        return any(vocabulary.incremental for vocabulary in self.vocabularies)

    @property
    def folds(self) -> tuple[int, ...]:
        """Numbers of folds that out-of-fold encodings ask for."""
        asked = {f.encoding.folds for f in self.features if isinstance(f.encoding, TargetConfig)}
        return tuple(sorted(asked))


def plan_features(config: BuildConfig) -> FeaturePlan:
    """Resolves the features of a config against its declared columns.

    Raises:
        ConfigError: A feature's column is not declared, an encoding does not take
            the column's type or names a column that is not there, or one vocabulary is asked to
            hold tokens of two types.
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
    for name in config.output.feature_lists or ():
        if name not in names:
            raise ConfigError(
                "output.feature_lists names a feature that is not there",
                received=name,
                allowed=", ".join(names),
                fix=did_you_mean(name, names),
            )
    check_encodings(features, types)
    check_fits(config, features, types)
    origins = column_origins(config)
    of_items = {name for name, column in origins.items() if column == config.events.item}
    return FeaturePlan(
        features=features,
        column_types=types,
        vocabularies=plan_vocabularies(features, types, {SEEN, CANDIDATES, *of_items}, origins),
        keys=_keys(config, features),
    )


def declared_columns(config: BuildConfig) -> dict[str, str]:
    """Returns the type of each column that a feature may read."""
    types = config.event_column_types | made_columns(config)
    item_type = types.get(config.events.item or "", "int64")
    if config.seen:
        types[SEEN] = f"list<{item_type}>"
    if config.split.test_source and config.split.candidates:
        types[CANDIDATES] = f"list<{item_type}>"
    return {**types, **sample_columns.made_columns(config)}


def _automatic_features(config: BuildConfig, types: Mapping[str, str]) -> tuple[FeatureConfig, ...]:
    """What the config says that exists needs no declaration: seen items, label, weight, …."""
    automatic = sample_columns.automatic_features(config)
    declared = {feature.column for feature in config.features}
    items = [f for f in config.features if f.column == config.events.item and f.role == "item"]
    lists = [column for column in (SEEN, CANDIDATES) if column in types and column not in declared]
    if items:
        shared = VocabularyConfig(name=_name_of(items[0]))
        automatic = [
            FeatureConfig(name=column, column=column, role="id", encoding=shared)
            for column in lists
        ] + automatic
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
        if column is None:
            return None
        return next(
            (f.name for f in features if f.column == column and role in (None, f.role)), None
        )

    return DatasetKeys(
        user=find(config.events.user, "user"),
        item=find(config.events.item, "item"),
        history=find(config.history.name if config.history else config.events.history),
        seen=find(SEEN) if config.seen else None,
        candidates=find(CANDIDATES),
        label=find(config.label_name),
        weight=find(config.weight_name),
        sampling_probability=find(config.negatives.probability) if config.negatives else None,
    )

"""From the config to the schema: which raw column becomes which feature, by which vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from conf.encoders import IDENTITY, ColumnEncoding, EncoderPlan, VocabularySpec
from conf.errors import ConfigError, did_you_mean
from conf.etl import BuildConfig, FeatureConfig, VocabularyConfig
from conf.manifest import DatasetKeys
from conf.schema import DType, FeatureSchema, FeatureSpec
from etl import sample_columns
from etl.behaviour.columns import column_origins, made_columns

SEEN = "seen"
CANDIDATES = "candidates"

_WIRE_DTYPES: dict[str, DType] = {"int64": "int64", "float32": "float32", "string": "bytes"}


@dataclass(frozen=True)
class VocabularyPlan:
    """One vocabulary to fit.

    Attributes:
        name: Its name.
        columns: Raw columns of the train split whose tokens it holds.
        token_dtype: `int64` or `string`.
        min_count: Rarer tokens are OOV.
        max_size: Most frequent tokens kept, or None for all.
    """

    name: str
    columns: tuple[str, ...]
    token_dtype: str
    min_count: int
    max_size: int | None


@dataclass(frozen=True)
class FeaturePlan:
    """Everything about features that is known before the data is scanned."""

    features: tuple[FeatureConfig, ...]
    column_types: Mapping[str, str]
    vocabularies: tuple[VocabularyPlan, ...]
    keys: DatasetKeys

    def vocabulary_name(self, feature: FeatureConfig) -> str | None:
        """Name of the vocabulary that encodes a feature, or None for plain values."""
        if isinstance(feature.encoding, VocabularyConfig):
            return feature.encoding.name or feature.name
        return None


def plan_features(config: BuildConfig) -> FeaturePlan:
    """Resolves the features of a config against its declared columns.

    Raises:
        ConfigError: A feature's column is not declared, a label or weight is encoded by a
            vocabulary, or one vocabulary is asked to hold tokens of two types.
    """
    types = declared_columns(config)
    features = (*config.features, *_automatic_features(config, types))
    names = [feature.name for feature in features]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ConfigError("features are declared twice", received=", ".join(repeated))
    for feature in features:
        if feature.column not in types:
            raise ConfigError(
                f"feature {feature.name!r} reads a column that is not declared",
                received=feature.column,
                allowed=", ".join(sorted(types)),
                fix=did_you_mean(feature.column, types),
            )
    return FeaturePlan(
        features=features,
        column_types=types,
        vocabularies=_plan_vocabularies(config, features, types),
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


def _plan_vocabularies(
    config: BuildConfig, features: Sequence[FeatureConfig], types: Mapping[str, str]
) -> tuple[VocabularyPlan, ...]:
    origins = column_origins(config)
    of_items = {name for name, column in origins.items() if column == config.events.item}
    derived = {SEEN, CANDIDATES, *of_items}
    plans: dict[str, VocabularyPlan] = {}
    # What a history carries along comes last: it shares the vocabulary of its column, if any.
    for feature in sorted(features, key=lambda feature: feature.column in origins):
        if not isinstance(feature.encoding, VocabularyConfig) or feature.column in derived:
            continue
        name = feature.encoding.name or feature.name
        dtype = types[feature.column].removeprefix("list<").removesuffix(">")
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
        if isinstance(feature.encoding, VocabularyConfig):
            name = feature.encoding.name or feature.name
            if name not in plans:
                raise ConfigError(
                    f"feature {feature.name!r} uses a vocabulary that no other feature fits",
                    received=name,
                    allowed=", ".join(plans),
                    fix=did_you_mean(name, plans),
                )
    return tuple(plans.values())


def _limits(name: str, features: Sequence[FeatureConfig]) -> tuple[int, int | None]:
    """The one `min_count` and `max_size` that the features of a vocabulary ask for."""
    default = VocabularyConfig()
    asked = {
        (feature.encoding.min_count, feature.encoding.max_size)
        for feature in features
        if isinstance(feature.encoding, VocabularyConfig)
        and (feature.encoding.name or feature.name) == name
    }
    stated = asked - {(default.min_count, default.max_size)}
    if len(stated) > 1:
        raise ConfigError(
            f"features that share vocabulary {name!r} ask for different limits",
            received="; ".join(f"min_count {c}, max_size {m}" for c, m in sorted(stated, key=str)),
            allowed="one min_count and max_size per vocabulary",
        )
    return stated.pop() if stated else (default.min_count, default.max_size)


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


def build_plan(plan: FeaturePlan, vocabularies: Sequence[VocabularySpec]) -> EncoderPlan:
    """Builds the encoder plan once the vocabularies are fitted."""
    sizes = {vocabulary.name: vocabulary.size for vocabulary in vocabularies}
    specs, columns = [], []
    for feature in plan.features:
        raw = plan.column_types[feature.column]
        scalar = raw.removeprefix("list<").removesuffix(">")
        vocabulary = plan.vocabulary_name(feature)
        specs.append(
            FeatureSpec(
                name=feature.name,
                dtype="int64" if vocabulary else _WIRE_DTYPES[scalar],
                role=feature.role,
                shape=(None,) if raw.startswith("list<") else (),
                max_len=feature.max_len,
                encoding=vocabulary or IDENTITY,
                vocabulary_size=sizes[vocabulary] if vocabulary else None,
                shared_embedding=vocabulary,
                pad_value=0 if vocabulary else None,
            )
        )
        columns.append(
            ColumnEncoding(feature.name, feature.column, scalar, vocabulary or IDENTITY)  # type: ignore[arg-type]
        )
    return EncoderPlan(FeatureSchema(tuple(specs)), tuple(columns), tuple(vocabularies))

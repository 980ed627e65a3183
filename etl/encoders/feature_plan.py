"""The feature plan: which raw column becomes which feature, by which vocabulary.

Made from the config alone, before anything is read; needs no Spark.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import Any, cast

from conf.encoders import RAW_PREFIX, TokenDType
from conf.encoders.declaration import NUMBERS
from conf.errors import ConfigError, did_you_mean
from conf.etl.build import BuildConfig
from conf.etl.encodings import (
    BagWeightsConfig,
    CrossConfig,
    Encoding,
    FeatureConfig,
    IdentityConfig,
    MultiHotConfig,
    TargetConfig,
    VocabularyConfig,
)
from conf.etl.events import SESSION_ID, SESSION_POSITION
from conf.etl.labels import KEEP_RATE
from conf.etl.sources import is_list_type
from conf.manifest import DatasetKeys
from conf.schema import FIRST_TOKEN_ID, Role
from etl.events.columns import CANDIDATES


def value_type(column_type: str) -> str:
    """Returns the type of a column's values: of its elements where it holds lists.

    A timestamp is what it is read to, an int64.
    """
    name = column_type.removeprefix("list<").removesuffix(">")
    return "int64" if name == "timestamp" else name


def sampling_columns(config: BuildConfig) -> dict[str, Role]:
    """Returns the role of each float column that labels, sampling and weights add."""
    columns: dict[str | None, Role] = {config.label_name: "label"}
    columns |= {label.name: "label" for label in config.further_labels}
    columns[config.weight_name] = "weight"
    if config.down_sampling is not None:
        columns[KEEP_RATE] = "id"
    if config.negatives is not None:
        columns[config.negatives.probability] = "id"
    return {name: role for name, role in columns.items() if name is not None}


def history_names(config: BuildConfig) -> tuple[str, ...]:
    """Returns the columns of all histories: lists that are known for a user without an event."""
    return tuple(name for history in config.histories for name in history.made)


def brought_items(config: BuildConfig) -> str | None:
    """Returns the log's own list of what came before an event; None where it holds no items."""
    brought = config.events.history
    of_item = {f.vocabulary for f in config.features if f.column == config.events.item}
    of_list = {f.vocabulary for f in config.features if f.column == brought}
    return brought if of_item & of_list - {None} else None


def made_history_columns(config: BuildConfig) -> dict[str, str]:
    """Returns the types of the columns that histories, sessions and windowed features make."""
    origins, types = column_origins(config), config.event_column_types
    lists = (*history_names(config), *(counted.name for counted in config.most_frequent))
    # Gaps have no origin.
    made = {name: f"list<{types.get(origins.get(name, ''), 'float32')}>" for name in lists}
    if config.session_gap_minutes is not None:
        made |= {SESSION_ID: "string", SESSION_POSITION: "int64"}
    return made | {r.name: "float32" if r.rate else "int64" for r in config.rolling}


def column_origins(config: BuildConfig) -> dict[str, str]:
    """Returns the event column whose values each made list holds; gaps have none."""
    origins: dict[str, str] = {}
    for history in config.histories:
        origins[history.name] = config.events.item or ""
        origins |= {history.carried(column): column for column in history.columns}
    return origins | {counted.name: counted.column for counted in config.most_frequent}


@dataclass(frozen=True)
class VocabularyPlan:
    """One vocabulary to fit: columns of the train split, and limits as the config states them."""

    name: str
    columns: tuple[str, ...]
    token_dtype: TokenDType
    min_count: int = 1
    max_size: int | None = None
    top_per_group: Mapping[str, int] | None = None
    oov_buckets: int | None = None
    incremental: bool = False
    expire_after_days: int | None = None
    path: str | None = None

    @property
    def first_id(self) -> int:
        """Id of the first token: 2, or more where unknown tokens have buckets."""
        return FIRST_TOKEN_ID + (self.oov_buckets or 0)


_LIMITS = {own.name: own.default for own in fields(VocabularyPlan)[3:]}


def _plan_vocabularies(
    features: Sequence[FeatureConfig],
    types: Mapping[str, str],
    derived: Collection[str],
    origins: Mapping[str, str],
) -> tuple[VocabularyPlan, ...]:
    """Plans the vocabularies that features name; `derived` columns hold tokens of others."""
    sources: dict[str, list[str]] = {}
    dtypes: dict[str, str] = {}
    # What a history carries along comes last: it shares the vocabulary of its column, if any.
    for feature in sorted(features, key=lambda feature: feature.column in origins):
        name, dtype = feature.vocabulary, value_type(types[feature.column])
        if name is None or feature.column in derived:
            continue
        if dtype not in ("int64", "string"):
            raise _refuse(feature, "tokens of type int64 or string", dtype)
        if dtypes.setdefault(name, dtype) != dtype:
            raise ConfigError(
                f"vocabulary {name!r} would hold tokens of two types",
                received=f"{dtypes[name]} and {dtype}",
                fix="give the features vocabularies of their own",
            )
        sources.setdefault(name, []).append(origins.get(feature.column, feature.column))
    for feature in features:
        if feature.vocabulary not in (None, *sources):
            message = f"feature {feature.name!r} uses a vocabulary that no other feature fits"
            raise _unknown(message, feature.vocabulary, sources)
    return tuple(
        VocabularyPlan(
            name,
            tuple(dict.fromkeys(columns)),
            cast(TokenDType, dtypes[name]),
            **_find_limits(name, features),
        )
        for name, columns in sources.items()
    )


def _find_limits(name: str, features: Sequence[FeatureConfig]) -> dict[str, Any]:
    """The limits that the features of a vocabulary state; those that do not leave it to others."""
    found: dict[str, Any] = {}
    asked = [feature.encoding for feature in features if feature.vocabulary == name]
    for encoding, (limit, usual) in product(asked, _LIMITS.items()):
        value = getattr(encoding, limit, usual)
        if value != usual and found.setdefault(limit, value) != value:
            raise ConfigError(
                f"features that share vocabulary {name!r} ask for different limits",
                received=f"{limit}: {found[limit]}; {limit}: {value}",
            )
    return found


_RAW_COLUMN = "__raw_"


def raw_value_columns(config: BuildConfig) -> dict[str, str]:
    """Returns by raw column that fitted encoders read the column that holds its values as lists."""
    read = dict.fromkeys(c for feature in config.features for c in feature.fitted_columns)
    return {column: f"{_RAW_COLUMN}{column}" for column in read}


SEEN = "seen"
EVENT_NUMBER = "event_number"
"""Column with the number of an event among its user's, where `seen` does not hold all of them."""


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
    def has_incremental_vocabulary(self) -> bool:
        """Whether a vocabulary appends to that of the version before."""
        return any(vocabulary.incremental for vocabulary in self.vocabularies)

    @property
    def fits_numbers(self) -> bool:
        """Whether numbers are fitted for a feature, which a later version may keep."""
        return any(feature.encoding.fits_numbers for feature in self.features)

    @property
    def has_targets(self) -> bool:
        """Whether an encoding is fitted out of fold."""
        return any(isinstance(feature.encoding, TargetConfig) for feature in self.features)


def plan_features(config: BuildConfig) -> FeaturePlan:
    """Resolves the features of a config against its declared columns; refuses what cannot be."""
    types = declared_columns(config)
    made = _automatic_features(config, types)
    features = (*config.features, *made)
    _check_names(config, features, made)
    for feature in features:
        _check_columns(feature, types)
        _check_reference(feature, features, types)
    _check_fits(config, features, types)
    origins = column_origins(config)
    of_items = {name for name, column in origins.items() if column == config.events.item}
    return FeaturePlan(
        features=features,
        column_types=types,
        vocabularies=_plan_vocabularies(features, types, {SEEN, CANDIDATES, *of_items}, origins),
        keys=_keys(config, features),
    )


def _check_names(
    config: BuildConfig, features: Sequence[FeatureConfig], made: Sequence[FeatureConfig]
) -> None:
    names = [feature.name for feature in features]
    # Spark and Parquet readers compare names without their case.
    lowered = [name.lower() for name in names]
    if repeated := sorted({name for name in names if lowered.count(name.lower()) > 1}):
        raise ConfigError(
            "features are declared twice, or differ in upper and lower case alone",
            received=", ".join(repeated),
            allowed=f"other names; the build itself makes {', '.join(f.name for f in made)}",
            fix="rename one of each; `name` of `label`, `weights`, … renames what the build makes",
        )
    for name in config.output.feature_lists or ():
        if name not in names:
            raise _unknown("output.feature_lists names a feature that is not there", name, names)


def declared_columns(config: BuildConfig) -> dict[str, str]:
    """Returns the type of each column that a feature may read."""
    types = config.event_column_types | made_history_columns(config)
    item_type = types.get(config.events.item or "", "int64")
    if config.seen:
        types[SEEN] = f"list<{item_type}>"
    if config.numbers_events:
        types[EVENT_NUMBER] = "int64"
    if config.split.test_source and config.split.candidates:
        types[CANDIDATES] = f"list<{item_type}>"
    types |= dict.fromkeys(sampling_columns(config), "float32")
    raw = raw_value_columns(config).items()
    # Records hold no float64, whose text loses nothing.
    values = {c: "string" if kind == "float64" else value_type(kind) for c, kind in types.items()}
    return types | {name: f"list<{values[column]}>" for column, name in raw if column in types}


def _automatic_features(config: BuildConfig, types: Mapping[str, str]) -> list[FeatureConfig]:
    """What the config says that exists needs no declaration: seen items, label, weight, …."""
    declared = {feature.column for feature in config.features}
    plain = IdentityConfig()
    made: list[tuple[str, Role, Encoding]] = []
    items = [f for f in config.features if f.column == config.events.item and f.role == "item"]
    items.sort(key=lambda f: f.encoding.kind != "vocabulary")
    if items:
        if items[0].encoding.kind != "vocabulary":
            raise _refuse(items[0], "a vocabulary: it is the item's id", items[0].encoding.kind)
        shared = VocabularyConfig(name=items[0].vocabulary)
        made += [(SEEN, "id", shared), (CANDIDATES, "id", shared)]
    made += [(name, role, plain) for name, role in sampling_columns(config).items()]
    made.append((EVENT_NUMBER, "id", plain))
    automatic = [
        FeatureConfig(name=name, column=name, role=role, encoding=encoding)
        for name, role, encoding in made
        if name in types and name not in declared
    ]
    return automatic + [
        FeatureConfig(name=f"{RAW_PREFIX}{column}", column=name, role="id", encoding=plain)
        for column, name in raw_value_columns(config).items()
        if name in types
    ]


def _rank_as_key(feature: FeatureConfig) -> tuple[int, int]:
    """Orders features of a column, first the one that tells its values apart, and most of them.

    A hash, a count or a length of the column does not.
    """
    kinds = ("vocabulary", "identity", "hash_key", feature.encoding.kind)
    return kinds.index(feature.encoding.kind), -(feature.max_len or 0)


def _keys(config: BuildConfig, features: Sequence[FeatureConfig]) -> DatasetKeys:
    def find(column: str | None, role: str | None = None) -> str | None:
        if column is None:
            return None
        found = [f for f in features if f.column == column and role in (None, f.role)]
        best = min(found, key=_rank_as_key, default=None)
        return None if best is None else best.name

    whole = [history.name for history in config.histories if history.is_whole]
    histories = [find(column) for column in (config.events.history, *whole)]
    return DatasetKeys(
        user=find(config.events.user, "user"),
        item=find(config.events.item, "item"),
        history=next((name for name in histories if name is not None), None),
        seen=find(SEEN) if config.seen else None,
        candidates=find(CANDIDATES),
        label=find(config.label_name),
        weight=find(config.weight_name),
        sampling_probability=find(config.negatives.probability) if config.negatives else None,
        event_number=find(EVENT_NUMBER) if config.numbers_events else None,
    )


def _check_columns(feature: FeatureConfig, types: Mapping[str, str]) -> None:
    """Checks that columns are declared and of the type and shape that the encoding takes."""
    encoding = feature.encoding
    accepts, takes = encoding.accepts, encoding.takes
    for column in feature.columns:
        if column not in types:
            known = sorted(name for name in types if not name.startswith(_RAW_COLUMN))
            message = f"feature {feature.name!r} reads a column that is not declared"
            raise _unknown(message, column, known)
        kind = types[column]
        if accepts and value_type(kind) not in accepts:
            raise _refuse(feature, f"values of type {', '.join(accepts)}", f"{column}: {kind}")
        if accepts and takes == ("values" if is_list_type(kind) else "lists"):
            allowed = "one value per row" if takes == "values" else takes
            raise _refuse(feature, allowed, f"{column}: {kind}")
    shaped = feature.columns if isinstance(encoding, CrossConfig) else (feature.column,)
    is_list = any(is_list_type(types[column]) for column in shaped)
    if feature.length is not None and (not is_list or encoding.kind == "length"):
        raise _refuse(feature, "`max_len`, or `length` of a list's values", "`length`")
    if (feature.length or feature.max_len) is not None and encoding.sets_length:
        raise _refuse(feature, "the encoding itself says how long the feature is", "a length")


def _check_reference(
    feature: FeatureConfig, features: Sequence[FeatureConfig], types: Mapping[str, str]
) -> None:
    """Checks what an encoding names: another feature, columns to cross, columns of weights."""
    encoding = feature.encoding
    if isinstance(encoding, BagWeightsConfig):
        by_name = {other.name: other for other in features}
        if encoding.of not in by_name:
            message = f"feature {feature.name!r} weights a feature that is not there"
            raise _unknown(message, encoding.of, by_name)
        weighted = by_name[encoding.of]
        own, other = (f"{len(f.columns)} columns, max_len {f.max_len}" for f in (feature, weighted))
        if own != other:
            raise _refuse(feature, f"{other}, as {weighted.name!r} has, which it weights", own)
    elif isinstance(encoding, CrossConfig):
        _check_cross(feature, encoding, types)
    elif isinstance(encoding, MultiHotConfig) and encoding.weights:
        weights, tokens = types[encoding.weights], types[feature.column]
        if value_type(weights) not in NUMBERS or is_list_type(weights) != is_list_type(tokens):
            allowed = f"numbers of the shape of {feature.column!r} as weights"
            raise _refuse(feature, allowed, weights)


def _check_cross(feature: FeatureConfig, encoding: CrossConfig, types: Mapping[str, str]) -> None:
    unknown = sorted(set(encoding.prepared) - set(feature.columns))
    if unknown:
        raise _refuse(feature, f"`prepared` of {', '.join(feature.columns)}", ", ".join(unknown))
    for column in feature.columns:
        preparation = encoding.prepared.get(column)
        accepts = ("int64", "string") if preparation is None else preparation.accepts
        if value_type(types[column]) not in accepts:
            allowed = f"values of type {', '.join(accepts)}"
            if preparation is None and value_type(types[column]) in NUMBERS:
                allowed += f", or `prepared: {{{column}: {{kind: bucketize, boundaries: […]}}}}`"
            raise _refuse(feature, allowed, f"{column}: {types[column]}")
    lists = [column for column in feature.columns if is_list_type(types[column])]
    if len(lists) > 1 and feature.max_len is None:
        # Two lists of 1,000 values have a million combinations, in each row.
        allowed = "`max_len`, the number of combinations of the lists' values that a row keeps"
        raise _refuse(feature, allowed, f"lists {', '.join(lists)}, length {feature.length}")


def _refuse(feature: FeatureConfig, allowed: str, received: str) -> ConfigError:
    return ConfigError(
        f"feature {feature.name!r} cannot be encoded by `{feature.encoding.kind}`",
        received=received,
        allowed=allowed,
    )


def _check_fits(
    config: BuildConfig, features: Sequence[FeatureConfig], types: Mapping[str, str]
) -> None:
    """Checks the columns of the train split that encodings name beside the feature's own."""
    later = {EVENT_NUMBER, *sampling_columns(config)} - {label.name for label in config.all_labels}
    known = sorted(n for n, kind in types.items() if n not in later and not is_list_type(kind))
    for feature in features:
        encoding = feature.encoding
        if isinstance(encoding, TargetConfig) and config.first_label is None:
            raise ConfigError(
                f"feature {feature.name!r} encodes a target, but the build has no label",
                fix="declare `label`",
            )
        for column in getattr(encoding, "top_per_group", None) or ():
            if column not in known:
                message = f"feature {feature.name!r}: its `top_per_group` is no such column"
                raise _unknown(message, column, known)
        age = getattr(encoding, "expire_after_days", None)
        if age is not None and config.events.time is None:
            raise ConfigError(
                f"the tokens of feature {feature.name!r} cannot expire: events have no time",
                received=f"expire_after_days: {age}, events.time: null",
                fix="declare events.time, or leave `expire_after_days` out",
            )


def _unknown(message: str, received: str | None, known: Collection[str]) -> ConfigError:
    allowed, fix = ", ".join(known), did_you_mean(received or "", known)
    return ConfigError(message, received=received, allowed=allowed, fix=fix)

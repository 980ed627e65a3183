"""Checks of a feature plan before anything is read: encodings, their columns, what they need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from conf.encoders.bags import BagWeightsConfig, MultiHotConfig
from conf.encoders.declaration import NUMBERS
from conf.encoders.hashing import CrossConfig
from conf.encoders.target import TargetConfig
from conf.errors import ConfigError, did_you_mean
from conf.etl.build import BuildConfig
from conf.etl.encodings import FeatureConfig
from conf.etl.sources import is_list_type

_CROSSED = ("int64", "string")


def value_type(column_type: str) -> str:
    """Returns the type of a column's values: of its elements where it holds lists.

    A timestamp is what it is read to, an int64.
    """
    name = column_type.removeprefix("list<").removesuffix(">")
    return "int64" if name == "timestamp" else name


def check_encodings(features: Sequence[FeatureConfig], types: Mapping[str, str]) -> None:
    """Checks each feature's encoding against the types of its columns.

    Args:
        features: The features; every column that they name has a type.
        types: Type by column.

    Raises:
        ConfigError: A type or shape that the encoding does not take, or a feature that weights
            refer to is not there.
    """
    by_name = {feature.name: feature for feature in features}
    for feature in features:
        kind = feature.encoding.kind
        if feature.encoding.accepts:
            _check_types(feature, types)
        crosses = isinstance(feature.encoding, CrossConfig)
        shaped = feature.columns if crosses else (feature.column,)
        if feature.length is not None and not any(is_list_type(types[c]) for c in shaped):
            raise _refuse(feature, "`length` is for list columns", types[feature.column])
        if feature.length is not None and kind == "length":
            raise _refuse(feature, "`max_len`, the most values that are counted", "`length`")
        if (feature.length or feature.max_len) is not None and feature.encoding.sets_length:
            raise _refuse(feature, "the encoding itself says how long the feature is", kind)
        if isinstance(feature.encoding, BagWeightsConfig):
            _check_weights(feature, feature.encoding, by_name)
        elif isinstance(feature.encoding, CrossConfig):
            _check_cross(feature, feature.encoding, types)
        elif isinstance(feature.encoding, MultiHotConfig) and feature.encoding.weights:
            _check_hot_weights(feature, feature.encoding.weights, types)


def _check_types(feature: FeatureConfig, types: Mapping[str, str]) -> None:
    accepts, takes = feature.encoding.accepts, feature.encoding.takes
    for column in feature.columns:
        received = types[column]
        is_list = is_list_type(received)
        if value_type(received) not in accepts:
            raise _refuse(feature, f"values of type {', '.join(accepts)}", f"{column}: {received}")
        if is_list and takes == "values":
            raise _refuse(feature, "one value per row, not lists", f"{column}: {received}")
        if not is_list and takes == "lists":
            raise _refuse(feature, "lists", f"{column}: {received}")


def _check_cross(feature: FeatureConfig, encoding: CrossConfig, types: Mapping[str, str]) -> None:
    unknown = sorted(set(encoding.prepared) - set(feature.columns))
    if unknown:
        raise ConfigError(
            f"feature {feature.name!r} prepares a column that it does not cross",
            received=", ".join(unknown),
            allowed=", ".join(feature.columns),
            fix=did_you_mean(unknown[0], feature.columns),
        )
    for column in feature.columns:
        preparation = encoding.prepared.get(column)
        accepts: tuple[str, ...] = _CROSSED
        if preparation is not None:
            accepts = preparation.accepts
        if value_type(types[column]) not in accepts:
            allowed = f"values of type {', '.join(accepts)}"
            if preparation is None and value_type(types[column]) in NUMBERS:
                allowed += f", or `prepared: {{{column}: {{kind: bucketize, boundaries: […]}}}}`"
            raise _refuse(feature, allowed, f"{column}: {types[column]}")
    lists = [column for column in feature.columns if is_list_type(types[column])]
    if len(lists) > 1 and feature.max_len is None:
        # Two lists of 1,000 values have a million combinations, in each row.
        raise _refuse(
            feature,
            "`max_len`, the number of combinations of the lists' values that a row keeps",
            f"lists {', '.join(lists)}, "
            + ("no `max_len`" if feature.length is None else f"length {feature.length}"),
        )


def _check_hot_weights(feature: FeatureConfig, weights: str, types: Mapping[str, str]) -> None:
    received, tokens = types[weights], types[feature.column]
    if value_type(received) not in NUMBERS:
        raise _refuse(feature, "weights that are numbers", f"{weights}: {received}")
    if is_list_type(received) != is_list_type(tokens):
        raise _refuse(
            feature, f"weights of the shape of {feature.column!r}", f"{weights}: {received}"
        )


def _check_weights(
    feature: FeatureConfig, encoding: BagWeightsConfig, by_name: Mapping[str, FeatureConfig]
) -> None:
    weighted = by_name.get(encoding.of)
    if weighted is None:
        raise ConfigError(
            f"feature {feature.name!r} weights a feature that is not there",
            received=encoding.of,
            fix=did_you_mean(encoding.of, by_name),
        )
    if len(weighted.columns) != len(feature.columns) or weighted.max_len != feature.max_len:
        raise ConfigError(
            f"feature {feature.name!r} does not fit feature {weighted.name!r}, which it weights",
            received=f"{len(feature.columns)} columns, max_len {feature.max_len}",
            allowed=f"{len(weighted.columns)} columns, max_len {weighted.max_len}",
        )


def _refuse(feature: FeatureConfig, allowed: str, received: str) -> ConfigError:
    return ConfigError(
        f"feature {feature.name!r} cannot be encoded by `{feature.encoding.kind}`",
        received=received,
        allowed=allowed,
    )


def check_fits(
    config: BuildConfig, features: Sequence[FeatureConfig], types: Mapping[str, str]
) -> None:
    """Checks the columns of the train split that encodings name beside the feature's own.

    Args:
        config: The build's config.
        features: The features.
        types: Type by column.

    Raises:
        ConfigError: A target encoding has no label, or one that is no number; groups are no
            column, or lists; tokens are to expire and events have no time.
    """
    known = _fitted_columns(config, types)
    for feature in features:
        encoding = feature.encoding
        if isinstance(encoding, TargetConfig):
            _check_label(config, feature, encoding, known)
        top = getattr(encoding, "top_per_group", None)
        if top is not None and top.column not in known:
            raise _unknown(feature, "top_per_group.column", top.column, known)
        age = getattr(encoding, "expire_after_days", None)
        if age is not None and config.events.time is None:
            raise ConfigError(
                f"the tokens of feature {feature.name!r} cannot expire: events have no time",
                received=f"expire_after_days: {age}, events.time: null",
                fix="declare events.time, or leave `expire_after_days` out",
            )


def _fitted_columns(config: BuildConfig, types: Mapping[str, str]) -> dict[str, str]:
    """Type of each scalar that train events have when encoders are fitted."""
    names = {*config.event_column_types, *(rolling.name for rolling in config.rolling)}
    if config.sessions is not None:
        names |= {config.sessions.id_column, config.sessions.position_column}
    names |= {label.name for label in config.all_labels}
    return {name: types[name] for name in sorted(names) if not is_list_type(types[name])}


def _check_label(
    config: BuildConfig, feature: FeatureConfig, encoding: TargetConfig, known: Mapping[str, str]
) -> None:
    label = encoding.label or (config.label.name if config.label else None)
    if label is None:
        raise ConfigError(
            f"feature {feature.name!r} encodes a target, but the build has no label",
            received="no `label`, neither of the build nor of the encoding",
            fix="declare `label`, or set the encoding's `label` to a numeric column",
        )
    numbers = {name: kind for name, kind in known.items() if kind in NUMBERS}
    if label not in numbers:
        raise _unknown(feature, "label", label, numbers)


def _unknown(
    feature: FeatureConfig, key: str, received: str, known: Mapping[str, str]
) -> ConfigError:
    return ConfigError(
        f"feature {feature.name!r}: its encoding's `{key}` is no such column of the events",
        received=received,
        allowed=", ".join(known),
        fix=did_you_mean(received, known),
    )

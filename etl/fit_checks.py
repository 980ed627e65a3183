"""Checks that what encoders are fitted on is there, before anything is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from conf.errors import ConfigError, did_you_mean
from conf.etl import BuildConfig, FeatureConfig, TargetConfig
from conf.etl.columns import is_list_type
from conf.operations import NUMBERS


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
    if config.label is not None:
        names.add(config.label.name)
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

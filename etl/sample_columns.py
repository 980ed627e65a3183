"""Columns that the making of samples adds, and the features that follow from them."""

from __future__ import annotations

from conf.etl import BuildConfig, FeatureConfig, IdentityConfig
from conf.schema import Role


def sampling_columns(config: BuildConfig) -> dict[str, Role]:
    """Returns the role of each float column that labels, sampling and weights add."""
    roles: dict[str, Role] = {}
    if config.label_name is not None:
        roles[config.label_name] = "label"
    if config.weight_name is not None:
        roles[config.weight_name] = "weight"
    if config.down_sampling is not None:
        roles[config.down_sampling.name] = "id"
    if config.negatives is not None:
        roles[config.negatives.probability] = "id"
    return roles


def made_columns(config: BuildConfig) -> dict[str, str]:
    """Returns the type of each column that is made of samples, for features to read."""
    return dict.fromkeys(sampling_columns(config), "float32")


def automatic_features(config: BuildConfig) -> list[FeatureConfig]:
    """Returns the features of the made columns that the config does not declare itself."""
    declared = {feature.column for feature in config.features}
    return [
        FeatureConfig(name=name, column=name, role=role, encoding=IdentityConfig())
        for name, role in sampling_columns(config).items()
        if name not in declared
    ]

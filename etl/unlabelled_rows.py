"""What is read and kept of a log whose labels nobody knows yet."""

from __future__ import annotations

from conf.errors import ConfigError
from conf.etl.build import BuildConfig
from conf.etl.contract import ContractConfig
from conf.etl.encodings import FeatureConfig
from conf.etl.split import SplitConfig
from etl.features.plan import made_sample_columns, plan_features

_SERVED_ROLES = ("user", "item", "context", "id")


def leave_out_labels(config: BuildConfig) -> BuildConfig:
    """Returns a build's config without what only training and evaluation need.

    Rules that read a column of the log stay: the column tells events apart, also where it is null.
    Splits matter to nothing but records, so that all events are of one that needs no scan.
    """
    labels = tuple(label for label in config.all_labels if label.conversion is None)
    unlabelled = config.model_copy(
        update={
            "label": labels[0] if labels else None,
            "labels": labels[1:],
            "negatives": None,
            "down_sampling": None,
            "weights": None,
            "train_samples": "all",
            "split": SplitConfig(strategy="hash", key=config.split.key),
            "contract": ContractConfig(),
        }
    )
    return unlabelled.model_copy(update={"sources": unlabelled.used_sources})


def label_columns(config: BuildConfig) -> frozenset[str]:
    """Returns the columns of the log that only labels and weights need: rows may lack them."""
    read = {label.column for label in config.all_labels if label.column is not None}
    if config.weights is not None and config.weights.column is not None:
        read.add(config.weights.column)
    events = config.events
    return frozenset(read - {events.user, events.item, events.time, *_feature_columns(config)})


def _feature_columns(config: BuildConfig) -> set[str]:
    """Columns that features of a model read."""
    return {column for feature in _served_features(config) for column in feature.columns}


def _served_features(config: BuildConfig) -> list[FeatureConfig]:
    made = set(made_sample_columns(config))
    return [
        feature
        for feature in config.features
        if feature.role in _SERVED_ROLES and made.isdisjoint(feature.columns)
    ]


def choose_columns(config: BuildConfig) -> dict[str, str]:
    """Returns what a row holds: by name the column of the events.

    That is what features read, and all else that the log has but for its labels, which names rows.
    A column has its own name, unless that is the name of a feature that is made of another one:
    `predict` would take it for that feature's. Then it has the name of the feature that reads it.

    Raises:
        ConfigError: A feature that reads several columns reads such a one, which has no name then.
    """
    plan_features(config)
    log = config.sources[config.events.source].column_types
    features = _served_features(config)
    first = {feature.name: feature.columns[0] for feature in features}
    own = dict.fromkeys(column for feature in features for column in feature.columns)
    chosen: dict[str, str] = {}
    for column in (*log, *own):
        if column in label_columns(config):
            continue
        if first.get(column, column) == column:
            chosen[column] = column
            continue
        for feature in features:
            if column not in feature.columns:
                continue
            if len(feature.columns) > 1:
                raise ConfigError(
                    f"feature {feature.name!r} reads {column!r}, which is the name of another "
                    f"feature, made of {first[column]!r}: a row cannot tell them apart",
                    received=f"features {feature.name} and {column}",
                    fix=f"rename feature {column!r}, build the dataset anew, and train again",
                )
            chosen[feature.name] = column
    return chosen

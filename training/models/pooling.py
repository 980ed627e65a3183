"""How lists are pooled: what the config asks, checked, with the weights that the build declares."""

from __future__ import annotations

from collections.abc import Mapping

from conf.errors import ConfigError, did_you_mean
from conf.manifest import Manifest
from conf.schema import FeatureSpec
from conf.training.models import PoolingConfig


def complete_pooling(
    pooling: Mapping[str, PoolingConfig], manifest: Manifest, specs: Mapping[str, FeatureSpec]
) -> dict[str, PoolingConfig]:
    """Returns how lists are pooled that the config or the build say something of, by name.

    Args:
        pooling: As configured.
        manifest: The dataset version; it may hold weights of lists.
        specs: The features that the model reads, by name.

    Raises:
        ConfigError: The config pools what is no list, or by what is no list.
    """
    check_pooling(pooling, manifest, specs)
    of_build = find_weights(manifest)
    completed = {}
    for name in specs:
        if name not in pooling and name not in of_build:
            continue
        asked = pooling.get(name) or PoolingConfig()
        weights = asked.weights or of_build.get(name)
        if asked.softmax and weights is None:
            raise ConfigError(
                f"model.pooling.{name}.softmax makes weights of numbers, and there are none",
                received="softmax: true without `weights`",
                fix="name a list of numbers as `weights`, or leave `softmax` out",
            )
        combiner = asked.combiner or ("sum" if name in of_build else "mean")
        changes = {"combiner": combiner, "weights": weights}
        completed[name] = asked.model_copy(update=changes)
    return completed


def find_weights(manifest: Manifest) -> dict[str, str]:
    """Returns the feature that holds the weights of each sparse list, as the build says it."""
    features = manifest.source.config.get("features") or []
    found: dict[str, str] = {}
    for feature in features:
        encoding = feature.get("encoding") or {}
        of = encoding.get("of")
        if encoding.get("kind") == "weights" and of in manifest.schema:
            found[str(of)] = str(feature["name"])
    return found


def check_pooling(
    pooling: Mapping[str, PoolingConfig], manifest: Manifest, specs: Mapping[str, FeatureSpec]
) -> None:
    """Checks what `model.pooling` names.

    Args:
        pooling: As configured.
        manifest: The dataset version.
        specs: The features that the model reads, by name.

    Raises:
        ConfigError: It names no list, or weights or ids that are none.
    """
    for name, asked in pooling.items():
        key = f"model.pooling.{name}"
        if name not in specs or not specs[name].is_list:
            lists = [spec.name for spec in specs.values() if spec.is_list]
            raise ConfigError(
                f"{key} names no list that the model reads",
                received=name,
                allowed=", ".join(lists) or "the model reads no list",
                fix=did_you_mean(name, lists),
            )
        for beside, what in ((asked.weights, "weights"), (asked.ids, "ids")):
            spec = None if beside is None else _find_beside(manifest, key, beside)
            is_ids = spec is not None and spec.dtype == "int64"
            holds_numbers = spec is not None and spec.vocabulary_size is None
            if spec is None or (
                spec.is_list
                and spec.dtype != "bytes"
                and (is_ids if what == "ids" else holds_numbers)
            ):
                continue
            values = "numbers" if what == "weights" else "ids"
            raise ConfigError(
                f"{key}.{what} must be a list of {values}, one for each position",
                received=f"{spec.name}: {spec.dtype}, shape {spec.shape}",
                fix=f"name a list feature of {values}, as long as {name}",
            )


def _find_beside(manifest: Manifest, key: str, name: str) -> FeatureSpec:
    if name not in manifest.schema:
        raise ConfigError(
            f"{key} names a feature that the dataset does not have",
            received=name,
            allowed=", ".join(manifest.schema.names),
            fix=did_you_mean(name, manifest.schema.names),
        )
    return manifest.schema[name]

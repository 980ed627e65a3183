"""How two dataset versions differ, by their manifests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conf.manifest import Manifest
from etl.quality.figures import find_nulls, find_oov

_HIGHLIGHTS = ("mean", "std", "min", "max", "distinct")
# A mean that moves by less than this share of its size is no highlight.
_LEAST_CHANGE = 0.01


def diff_manifests(old: Manifest, new: Manifest) -> dict[str, dict[str, Any]]:
    """Compares two versions of a dataset.

    Returns:
        By part (`rows`, `bytes`, `dropped`, `schema`, `vocabularies`, `config`, `label_rate`,
        `statistics`): `[old, new]` by name, only what differs; None stands for what is not there.
    """
    parts: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "rows": (_rows(old), _rows(new)),
        "bytes": (_bytes(old), _bytes(new)),
        "read": (dict(old.counts.read), dict(new.counts.read)),
        "dropped": (dict(old.counts.dropped), dict(new.counts.dropped)),
        "schema": (_schema(old), _schema(new)),
        "vocabularies": (_vocabularies(old), _vocabularies(new)),
        "config": (flatten(old.source.config), flatten(new.source.config)),
        "label_rate": (dict(old.label_rate), dict(new.label_rate)),
    }
    differences: dict[str, dict[str, Any]] = {
        name: _differences(*pair) for name, pair in parts.items()
    }
    statistics = {
        f"{split}.{feature}": changes
        for split in _union(old.statistics, new.statistics)
        for feature, changes in _statistics(
            _highlights(old, split), _highlights(new, split)
        ).items()
    }
    return {name: part for name, part in {**differences, "statistics": statistics}.items() if part}


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Returns a nested config as one value per dotted path."""
    if isinstance(value, Mapping):
        children = [(str(key), child) for key, child in value.items()]
    elif isinstance(value, list | tuple) and any(isinstance(v, Mapping | list) for v in value):
        # By name where elements have one, so that an element put in between is one difference.
        children = [
            (str(child.get("name", number)) if isinstance(child, Mapping) else str(number), child)
            for number, child in enumerate(value)
        ]
    else:
        return {prefix: value}
    found: dict[str, Any] = {}
    for key, child in children:
        found |= flatten(child, f"{prefix}.{key}" if prefix else key)
    return found


def _rows(manifest: Manifest) -> dict[str, int]:
    return {split.name: split.rows for split in manifest.splits}


def _bytes(manifest: Manifest) -> dict[str, int]:
    return {split.name: split.bytes for split in manifest.splits}


def _schema(manifest: Manifest) -> dict[str, str]:
    # Sizes of vocabularies are a part of their own: they change with every run.
    return {
        spec.name: f"{spec.dtype} {list(spec.shape)} {spec.role} {spec.encoding}"
        for spec in manifest.schema.features
    }


def _vocabularies(manifest: Manifest) -> dict[str, int]:
    return {
        spec.encoding: spec.vocabulary_size
        for spec in manifest.schema.features
        if spec.vocabulary_size is not None
    }


def _union(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys([*old, *new]))


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {
        name: [old.get(name), new.get(name)]
        for name in _union(old, new)
        if old.get(name) != new.get(name) or (name in old) != (name in new)
    }


def _statistics(
    old: Mapping[str, Mapping[str, Any]], new: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, list[Any]]]:
    changes = {}
    for feature in _union(old, new):
        differences = {
            key: pair
            for key, pair in _differences(old.get(feature, {}), new.get(feature, {})).items()
            if _is_notable(*pair)
        }
        if differences:
            changes[feature] = differences
    return changes


def _highlights(manifest: Manifest, split: str) -> dict[str, dict[str, Any]]:
    """What is compared, by feature; shares of nulls and OOV are those that a build shows."""
    specs = {spec.name: spec for spec in manifest.schema.features}
    highlights = {}
    for name, statistics in manifest.statistics.get(split, {}).items():
        found = {key: statistics[key] for key in _HIGHLIGHTS if key in statistics}
        if name in specs:
            nulls, oov = find_nulls(specs[name], statistics), find_oov(specs[name], statistics)
            rates = {"missing_rate": nulls, "oov_rate": oov}
            found |= {key: share.value for key, share in rates.items() if share is not None}
        if isinstance(statistics.get("length"), Mapping):
            found["mean_length"] = statistics["length"].get("mean")
        highlights[name] = found
    return highlights


def _is_notable(old: Any, new: Any) -> bool:
    numbers = isinstance(old, int | float) and isinstance(new, int | float)
    if not numbers:
        return bool(old != new)
    return bool(abs(new - old) > _LEAST_CHANGE * max(abs(old), abs(new)))

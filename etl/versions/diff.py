"""How two dataset versions differ, by their manifests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conf.manifest import Manifest

_HIGHLIGHTS = ("rows", "missing", "oov", "mean", "std", "min", "max", "distinct")
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
    found: dict[str, dict[str, Any]] = {name: _differences(*pair) for name, pair in parts.items()}
    statistics = {
        f"{split}.{feature}": changes
        for split in _union(old.statistics, new.statistics)
        for feature, changes in _statistics(
            old.statistics.get(split, {}), new.statistics.get(split, {})
        ).items()
    }
    return {name: part for name, part in {**found, "statistics": statistics}.items() if part}


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


def _statistics(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, dict[str, list[Any]]]:
    changes = {}
    for feature in _union(old, new):
        found = {
            key: pair
            for key, pair in _differences(
                _highlights(old.get(feature, {})), _highlights(new.get(feature, {}))
            ).items()
            if _is_notable(*pair)
        }
        if found:
            changes[feature] = found
    return changes


def _highlights(feature: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: feature[key] for key in _HIGHLIGHTS if key in feature}
    rows = found.pop("rows", 0)
    for key in ("missing", "oov"):
        if key in found and rows:
            found[f"{key}_rate"] = found[key] / (feature.get("values") or rows)
        found.pop(key, None)
    if isinstance(feature.get("length"), Mapping):
        found["mean_length"] = feature["length"].get("mean")
    return found


def _is_notable(old: Any, new: Any) -> bool:
    numbers = isinstance(old, int | float) and isinstance(new, int | float)
    if not numbers:
        return bool(old != new)
    return bool(abs(new - old) > _LEAST_CHANGE * max(abs(old), abs(new)))

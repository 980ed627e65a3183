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
        By part (`rows`, `bytes`, `read`, `dropped`, `schema`, `vocabularies`, `config`,
        `label_rate`, `statistics`): `[old, new]` by name, only what differs; None stands for what
        is not there.
    """
    before, after = _parts(old), _parts(new)
    differences = {name: _differences(before[name], after[name]) for name in before}
    before, after = _highlights(old), _highlights(new)
    for name in {**before, **after}:
        changes = _differences(before.get(name, {}), after.get(name, {}))
        notable = {key: pair for key, pair in changes.items() if _is_notable(*pair)}
        if notable:
            differences.setdefault("statistics", {})[name] = notable
    return {name: part for name, part in differences.items() if part}


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


def _parts(manifest: Manifest) -> dict[str, dict[str, Any]]:
    specs = manifest.schema.features
    return {
        "rows": {split.name: split.rows for split in manifest.splits},
        "bytes": {split.name: split.bytes for split in manifest.splits},
        "read": dict(manifest.counts.read),
        "dropped": dict(manifest.counts.dropped),
        # Sizes of vocabularies are a part of their own: they change with every run.
        "schema": {s.name: f"{s.dtype} {list(s.shape)} {s.role} {s.encoding}" for s in specs},
        "vocabularies": {
            s.encoding: s.vocabulary_size for s in specs if s.vocabulary_size is not None
        },
        "config": flatten(manifest.source.config),
        "label_rate": dict(manifest.label_rate),
    }


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: [old.get(name), new.get(name)]
        for name in {**old, **new}
        if old.get(name) != new.get(name) or (name in old) != (name in new)
    }


def _highlights(manifest: Manifest) -> dict[str, dict[str, Any]]:
    """What is compared, by `split.feature`; nulls and OOV are those that a build shows."""
    specs = {spec.name: spec for spec in manifest.schema.features}
    highlights = {}
    for split, features in manifest.statistics.items():
        for name, statistics in features.items():
            found = {key: statistics[key] for key in _HIGHLIGHTS if key in statistics}
            if name in specs:
                nulls, oov = find_nulls(specs[name], statistics), find_oov(specs[name], statistics)
                rates = {"missing_rate": nulls, "oov_rate": oov}
                found |= {key: share.value for key, share in rates.items() if share is not None}
            if isinstance(statistics.get("length"), Mapping):
                found["mean_length"] = statistics["length"].get("mean")
            highlights[f"{split}.{name}"] = found
    return highlights


def _is_notable(old: Any, new: Any) -> bool:
    numbers = isinstance(old, int | float) and isinstance(new, int | float)
    if not numbers:
        return bool(old != new)
    return bool(abs(new - old) > _LEAST_CHANGE * max(abs(old), abs(new)))

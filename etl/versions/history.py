"""The published versions of a dataset: listed, compared, rolled back to, and removed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from conf.artefacts.dataset import published_versions, read_manifest
from conf.errors import ConfigError, InputDataError, UpstreamNotReadyError, did_you_mean
from conf.manifest import Manifest
from conf.publication.entries import move_pointer
from etl.quality.figures import find_nulls, find_oov
from etl.versions.publish import Dataset, hold_lock, read_current, remove_version, sweep_leftovers

_HIGHLIGHTS = ("mean", "std", "min", "max", "distinct")
# A mean that moves by less than this share of its size is no highlight.
_LEAST_CHANGE = 0.01


@dataclass(frozen=True)
class VersionInfo:
    """One version: rows by split, bytes (linked files in each version), first and last day."""

    version_id: str
    is_current: bool
    created_at: str | None = None
    rows: Mapping[str, int] | None = None
    bytes: int | None = None
    dates: tuple[str, str] | None = None
    parent: str | None = None
    damage: str | None = None


def list_versions(dataset: Dataset) -> list[VersionInfo]:
    """Returns the published versions, oldest first; damaged ones say what is wrong."""
    ids, current = published_versions(dataset.base), read_current(dataset)
    if not ids:
        raise UpstreamNotReadyError(
            "there is no published dataset version here",
            received=dataset.base,
            allowed="the directory of a dataset: <output.root>/<name>",
        )
    versions = [_describe(dataset, version_id, version_id == current) for version_id in ids]
    if current is not None and current not in ids:
        versions.append(VersionInfo(current, True, damage="CURRENT names it, and it is not there"))
    return versions


def _describe(dataset: Dataset, version_id: str, is_current: bool) -> VersionInfo:
    try:
        manifest = read_manifest(dataset.version(version_id))
    except InputDataError as error:
        return VersionInfo(version_id, is_current, damage=error.what)
    run = manifest.run
    return VersionInfo(
        version_id,
        is_current,
        manifest.created_at,
        {split.name: split.rows for split in manifest.splits},
        manifest.bytes,
        (run.first_day, run.last_day) if run and run.first_day and run.last_day else None,
        manifest.parent,
    )


def roll_back(dataset: Dataset, version_id: str | None = None) -> tuple[str | None, str]:
    """Makes another undamaged version current, by default the one before; returns both ids."""
    ids = published_versions(dataset.base)
    try:
        current = read_current(dataset)
    except InputDataError:  # an empty `CURRENT`, which this mends
        current = None
    chosen = version_id or find_previous(dataset, ids, current)
    if chosen is None or chosen not in ids:
        raise ConfigError(
            "there is no such published version to go back to",
            received=chosen or f"none before the current one, {current}",
            allowed=", ".join(ids) or "no version is published",
            fix=did_you_mean(chosen, ids) if chosen else "name one by --to",
        )
    read_manifest(dataset.version(chosen))
    if chosen != current:
        move_pointer(dataset.base, chosen, before=current)
    return current, chosen


def find_previous(dataset: Dataset, ids: list[str], current: str | None) -> str | None:
    """Returns the parent of a version, else the newest before it; of None the newest of all."""
    if current is not None:
        with suppress(InputDataError):  # a damaged version is a reason to roll back
            parent = read_manifest(dataset.version(current)).parent
            if parent in ids:
                return parent
    return next((name for name in reversed(ids) if current is None or name < current), None)


def collect_garbage(
    dataset: Dataset, keep: int | None, older_than_days: float | None, *, dry_run: bool = False
) -> list[VersionInfo]:
    """Removes versions that may go (see `select_garbage`), and what dead builds left."""
    # Refuses a wrong path before a lock file is made there.
    chosen = select_garbage(list_versions(dataset), keep, older_than_days)
    if not dry_run:
        with hold_lock(dataset):
            chosen = select_garbage(list_versions(dataset), keep, older_than_days)
            for version in chosen:
                remove_version(dataset, version.version_id)
            sweep_leftovers(dataset)
    return chosen


def select_garbage(
    versions: Sequence[VersionInfo],
    keep: int | None,
    older_than_days: float | None,
    now: datetime | None = None,
) -> list[VersionInfo]:
    """Chooses the versions that may go, oldest first: not the current one, nor the newest."""
    given = [limit for limit in (keep, older_than_days) if limit is not None]
    if not given or keep == 0 or min(given) < 0:
        raise ConfigError(
            "gc needs to be told what may go",
            received=f"--keep {keep}, --older-than {older_than_days}",
            allowed="--keep 1 or more, --older-than 0 or more, or both: a version must pass both",
        )
    limit = (now or datetime.now(UTC)) - timedelta(days=older_than_days or 0)
    return [
        version
        for version in (versions if keep is None else versions[:-keep])
        if not version.is_current and (older_than_days is None or _is_older(version, limit))
    ]


def _is_older(version: VersionInfo, limit: datetime) -> bool:
    if version.created_at is not None:
        return datetime.fromisoformat(version.created_at) < limit
    try:  # a damaged manifest does not tell; the id does
        moment = datetime.strptime(version.version_id.partition("-")[0], "%Y%m%dT%H%M%S%fZ")
    except ValueError:
        return False
    return moment.replace(tzinfo=UTC) < limit


def diff_manifests(old: Manifest, new: Manifest) -> dict[str, dict[str, Any]]:
    """Returns what differs between two versions, by part and name: `[old, new]`, or None."""
    before, after = _parts(old), _parts(new)
    parts = {name: _differences(before[name], after[name]) for name in before}
    before, after = _highlights(old), _highlights(new)
    statistics = {}
    for name in before | after:
        changes = _differences(before.get(name, {}), after.get(name, {}))
        statistics[name] = {key: pair for key, pair in changes.items() if _is_notable(*pair)}
    parts["statistics"] = {name: changes for name, changes in statistics.items() if changes}
    return {name: part for name, part in parts.items() if part}


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Returns a nested config as one value per dotted path."""
    if isinstance(value, Mapping):
        children = [(str(key), child) for key, child in value.items()]
    elif isinstance(value, list | tuple) and any(isinstance(v, Mapping | list) for v in value):
        # By name where elements have one, so that an element put in between is one difference.
        names = [v.get("name", n) if isinstance(v, Mapping) else n for n, v in enumerate(value)]
        children = list(zip(map(str, names), value, strict=True))
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
    if not (isinstance(old, int | float) and isinstance(new, int | float)):
        return bool(old != new)
    return bool(abs(new - old) > _LEAST_CHANGE * max(abs(old), abs(new)))

"""The published versions of a dataset: listed, rolled back to, and removed when they may go."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from conf.artefacts.dataset import DatasetPaths, published_versions, read_manifest
from conf.errors import ConfigError, InputDataError, UpstreamNotReadyError, did_you_mean
from etl.versions.publish import hold_lock, remove_version, sweep_leftovers
from etl.versions.stored import Dataset, StoredDataset, find_current, make_current


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

    def to_json(self) -> dict[str, Any]:
        """Returns it as JSON values."""
        return asdict(self)


def list_versions(dataset: Dataset) -> list[VersionInfo]:
    """Returns the published versions, oldest first; damaged ones say what is wrong."""
    ids, current = published_versions(dataset.base), find_current(dataset)
    if not ids:
        raise UpstreamNotReadyError(
            "there is no published dataset version here",
            received=dataset.base,
            allowed="the directory of a dataset: <output.root>/<name>",
            fix="build one by `sluice build`, or correct the path",
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
    rows, run = {split.name: split.rows for split in manifest.splits}, manifest.run
    dates = None
    if run is not None and run.first_day is not None and run.last_day is not None:
        dates = run.first_day, run.last_day
    return VersionInfo(
        version_id, is_current, manifest.created_at, rows, manifest.bytes, dates, manifest.parent
    )


def roll_back(dataset: Dataset, version_id: str | None = None) -> tuple[str | None, str]:
    """Makes another published version current, by default the one before.

    Returns:
        The version that was current, None where `CURRENT` named none, and the one that is now.

    Raises:
        ConfigError: There is no such version, or none before the current one.
        InputDataError: The version is damaged; the current one stays.
        UpstreamNotReadyError: Another process is publishing and does not end, or was faster.
    """
    ids = published_versions(dataset.base)
    try:
        current = find_current(dataset)
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
    read_manifest(dataset.version(chosen))  # refuses a damaged one
    if chosen != current:
        make_current(dataset, chosen, before=current)
    return current, chosen


def find_previous(dataset: Dataset, ids: list[str], current: str | None) -> str | None:
    """Returns the parent of a version, else the newest before it; of None the newest of all."""
    if current is not None:
        try:
            parent = read_manifest(dataset.version(current)).parent
        except InputDataError:  # a damaged version is a reason to roll back
            parent = None
        if parent in ids:
            return parent
    return next((name for name in reversed(ids) if current is None or name < current), None)


def select_garbage(
    versions: Sequence[VersionInfo],
    keep: int | None,
    older_than_days: float | None,
    now: datetime | None = None,
) -> list[VersionInfo]:
    """Chooses the versions that may go, oldest first, never the current one.

    The newest `keep` stay, and those younger than `older_than_days`: with both limits a version
    must pass both to go.
    """
    if keep is None and older_than_days is None:
        raise ConfigError(
            "gc needs to be told what may go",
            received="neither --keep nor --older-than",
            allowed="--keep N, --older-than DAYS, or both: then a version must pass both to go",
        )
    if (keep is not None and keep < 1) or (older_than_days is not None and older_than_days < 0):
        raise ConfigError(
            "a limit of gc is out of range",
            received=f"--keep {keep}, --older-than {older_than_days}",
            allowed="--keep 1 or more, --older-than 0 or more",
        )
    limit = None
    if older_than_days is not None:
        limit = (now or datetime.now(UTC)) - timedelta(days=older_than_days)
    may_go = versions if keep is None else versions[:-keep]
    return [version for version in may_go if not version.is_current and _is_older(version, limit)]


def _is_older(version: VersionInfo, limit: datetime | None) -> bool:
    moment = _created(version)
    return limit is None or (moment is not None and moment < limit)


def _created(version: VersionInfo) -> datetime | None:
    if version.created_at is not None:
        return datetime.fromisoformat(version.created_at)
    try:  # a damaged manifest does not tell; the id does
        moment = datetime.strptime(version.version_id.partition("-")[0], "%Y%m%dT%H%M%S%fZ")
    except ValueError:
        return None
    return moment.replace(tzinfo=UTC)


def collect_garbage(
    dataset: Dataset, keep: int | None, older_than_days: float | None, *, dry_run: bool = False
) -> list[VersionInfo]:
    """Removes versions that may go (see `select_garbage`), and what dead builds left.

    Returns:
        The versions that were removed, or would be.

    Raises:
        ConfigError: No limit is given, or one out of range.
        UpstreamNotReadyError: A build is running, or there is no such dataset.
    """
    # Refuses a wrong path before a lock file is made there.
    chosen = select_garbage(list_versions(dataset), keep, older_than_days)
    if dry_run:
        return chosen
    place, remove, sweep = _find_steps(dataset)
    with hold_lock(place):
        chosen = select_garbage(list_versions(dataset), keep, older_than_days)
        for version in chosen:
            remove(version.version_id)
        sweep()
    return chosen


def _find_steps(
    dataset: Dataset,
) -> tuple[DatasetPaths, Callable[[str], None], Callable[[], object]]:
    """Where the lock lies, what removes a version, and what removes leftovers."""
    if isinstance(dataset, StoredDataset):
        return dataset.here, dataset.remove, dataset.sweep_leftovers
    return dataset, partial(remove_version, dataset), partial(sweep_leftovers, dataset)

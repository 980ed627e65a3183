"""The published versions of a dataset, which of them may go, and their removal.

`remove_version` and `StoredDataset.remove` remove a single one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from conf.artefacts.dataset import DatasetPaths, published_versions, read_manifest
from conf.errors import ConfigError, InputDataError, UpstreamNotReadyError
from conf.manifest import Manifest
from etl.versions.publish import hold_lock, remove_version, sweep_leftovers
from etl.versions.stored import Dataset, StoredDataset, find_current


@dataclass(frozen=True)
class VersionInfo:
    """One version.

    Attributes:
        version_id: Its id.
        is_current: Whether readers take it.
        created_at: When it was built, ISO 8601.
        rows: Records by split.
        bytes: Bytes of its shards and further files; hard-linked ones count in each version.
        dates: First and last day that its run was asked for, or None.
        parent: Version that was current before it.
        damage: What is wrong with it, or None.
    """

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
    """Returns the published versions, oldest first; damaged ones say what is wrong.

    Raises:
        UpstreamNotReadyError: There is no such dataset.
        InputDataError: `CURRENT` is empty.
    """
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
    return VersionInfo(
        version_id,
        is_current,
        manifest.created_at,
        {split.name: split.rows for split in manifest.splits},
        manifest.bytes,
        _dates(manifest),
        manifest.parent,
    )


def _dates(manifest: Manifest) -> tuple[str, str] | None:
    run = manifest.run
    if run is None or run.first_day is None or run.last_day is None:
        return None
    return run.first_day, run.last_day


def select_garbage(
    versions: Sequence[VersionInfo],
    keep: int | None,
    older_than_days: float | None,
    now: datetime | None = None,
) -> list[str]:
    """Chooses the versions that may go; never the current one.

    Args:
        versions: All versions, oldest first.
        keep: Number of newest versions that stay, the current one always beside them.
        older_than_days: Versions younger than this stay.
        now: The present; for tests.

    Returns:
        Ids, oldest first. With both limits a version must pass both to go.

    Raises:
        ConfigError: No limit is given, or a negative one.
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
    kept = {v.version_id for v in (versions[-keep:] if keep is not None else ())}
    limit = None
    if older_than_days is not None:
        limit = (now or datetime.now(UTC)) - timedelta(days=older_than_days)
    return [
        v.version_id
        for v in versions
        if not v.is_current and v.version_id not in kept and _is_older(v, limit)
    ]


def _is_older(version: VersionInfo, limit: datetime | None) -> bool:
    if limit is None:
        return True
    moment = _created(version)
    return moment is not None and moment < limit


def _created(version: VersionInfo) -> datetime | None:
    if version.created_at is not None:
        return datetime.fromisoformat(version.created_at)
    try:  # a damaged manifest does not tell; the id does
        moment = datetime.strptime(version.version_id.partition("-")[0], "%Y%m%dT%H%M%S%fZ")
    except ValueError:
        return None
    return moment.replace(tzinfo=UTC)


def collect_garbage(
    dataset: Dataset,
    keep: int | None,
    older_than_days: float | None,
    *,
    dry_run: bool = False,
) -> list[VersionInfo]:
    """Removes versions that may go, and what dead builds left.

    Args:
        dataset: The dataset.
        keep: As for `select_garbage`.
        older_than_days: As for `select_garbage`.
        dry_run: Whether to remove nothing.

    Returns:
        The versions that were removed, or would be.

    Raises:
        ConfigError: As for `select_garbage`.
        UpstreamNotReadyError: A build is running, or there is no such dataset.
    """
    if dry_run:
        versions = list_versions(dataset)
        chosen = select_garbage(versions, keep, older_than_days)
        return [v for v in versions if v.version_id in chosen]
    list_versions(dataset)  # refuses a wrong path before a lock file is made there
    place, remove, sweep = _find_steps(dataset)
    with hold_lock(place):
        versions = list_versions(dataset)
        chosen = select_garbage(versions, keep, older_than_days)
        for version_id in chosen:
            remove(version_id)
        sweep()
    return [v for v in versions if v.version_id in chosen]


def _find_steps(
    dataset: Dataset,
) -> tuple[DatasetPaths, Callable[[str], None], Callable[[], object]]:
    """Where the lock lies, what removes a version, and what removes leftovers."""
    if isinstance(dataset, StoredDataset):
        return dataset.here, dataset.remove, dataset.sweep_leftovers
    return dataset, partial(remove_version, dataset), partial(sweep_leftovers, dataset)

"""Rolling back: the pointer moves to an earlier version, in one step."""

from __future__ import annotations

from conf.artefacts.dataset import published_versions, read_manifest
from conf.errors import ConfigError, InputDataError, did_you_mean
from etl.versions.stored import Dataset, find_current, make_current


def roll_back(dataset: Dataset, version_id: str | None = None) -> tuple[str | None, str]:
    """Makes another published version current; readers see the old one or the new.

    Args:
        dataset: The dataset.
        version_id: The version; None for the one that was current before the current one was
            built.

    Returns:
        The version that was current, None where `CURRENT` named none, and the one that is now.

    Raises:
        ConfigError: There is no such version, or none before the current one.
        InputDataError: The version is damaged; the current one stays.
        UpstreamNotReadyError: Another process is publishing and does not end, or was faster.
    """
    ids, current = published_versions(dataset.base), _find_current(dataset)
    if version_id is None:
        version_id = find_previous(dataset, ids, current)
        if version_id is None:
            raise ConfigError(
                "there is no version before the current one",
                received=f"current: {current}",
                allowed=", ".join(ids) or "no version is published",
                fix="name one by --to",
            )
    elif version_id not in ids:
        raise ConfigError(
            "there is no such published version",
            received=version_id,
            allowed=", ".join(ids) or "no version is published",
            fix=did_you_mean(version_id, ids),
        )
    read_manifest(dataset.version(version_id))  # refuses a damaged one
    if version_id == current:
        return current, version_id
    make_current(dataset, version_id, before=current)
    return current, version_id


def _find_current(dataset: Dataset) -> str | None:
    """Id of the current version; None where an empty `CURRENT` names none, which this mends."""
    try:
        return find_current(dataset)
    except InputDataError:
        return None


def find_previous(dataset: Dataset, ids: list[str], current: str | None) -> str | None:
    """Returns the version that was current before another: its parent, or the newest before it.

    Args:
        dataset: The dataset.
        ids: Published versions, oldest first.
        current: The other version; None: there is none, and the newest one is meant.
    """
    if current is not None:
        try:
            parent = read_manifest(dataset.version(current)).parent
        except InputDataError:  # a damaged version is a reason to roll back
            parent = None
        if parent in ids:
            return parent
    earlier = [name for name in ids if current is None or name < current]
    return earlier[-1] if earlier else None

"""Lists the published versions of a dataset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from conf.dataset import DatasetPaths, published_versions, read_manifest
from conf.errors import InputDataError, UpstreamNotReadyError
from conf.manifest import Manifest
from etl.publish import read_current


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


def list_versions(paths: DatasetPaths) -> list[VersionInfo]:
    """Returns the published versions, oldest first; damaged ones say what is wrong.

    Raises:
        UpstreamNotReadyError: There is no such dataset.
    """
    ids = published_versions(paths.base)
    if not ids:
        raise UpstreamNotReadyError(
            "there is no published dataset version here",
            received=paths.base,
            allowed="the directory of a dataset: <output.root>/<name>",
            fix="build one by `sluice build`, or correct the path",
        )
    current = read_current(paths)
    return [_describe(paths, version_id, version_id == current) for version_id in ids]


def _describe(paths: DatasetPaths, version_id: str, is_current: bool) -> VersionInfo:
    try:
        manifest = read_manifest(paths.version(version_id))
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

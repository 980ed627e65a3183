"""The fingerprint of a run: what it is asked for, and whether that has been built already."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.artefacts.dataset import DatasetPaths, published_versions
from conf.dates import DateRange
from conf.errors import InputDataError, read_code_version
from conf.etl.build import BuildConfig
from conf.manifest import Manifest, RunInfo
from conf.publication.working_copy import describe_place
from conf.schema import fingerprint
from etl.sources.bad_rows import find_last_day
from etl.sources.snapshot import RunInputs
from etl.versions.publish import read_current
from etl.versions.stored import make_current, read_published

logger = logging.getLogger("sluice.build")


@dataclass(frozen=True)
class RunRequest:
    """What a run is asked for beside its config.

    Attributes:
        dates: Days to build, or None where the inputs are not split by day.
        force: Whether to build although nothing has changed.
        refit: Whether numbers are fitted anew; a run with days keeps those of the version before.
    """

    dates: DateRange | None = None
    force: bool = False
    refit: bool = False

    @property
    def keeps_numbers(self) -> bool:
        """Whether fitted numbers are those of the version before, where it has some."""
        return self.dates is not None and not self.refit


@dataclass(frozen=True)
class Parent:
    """The version that is current when a build begins; a damaged one has no manifest."""

    version_id: str
    manifest: Manifest | None
    damage: str | None = None


def fingerprint_run(config: BuildConfig, inputs: RunInputs, request: RunRequest) -> str:
    """Returns the fingerprint of all that decides a version's content.

    A file counts by path, size and state, a table by its state, and today where a column has
    `not_after: now`; where the output lies, and the session that writes it, do not count.
    """
    dates = request.dates
    moving_days = _list_moving_days(config)
    return fingerprint(
        {
            "config": content_config(config.resolved()),
            "inputs": sorted(
                (f.source, f.path, f.bytes, f.state or str(f.modified_ms)) for f in inputs.files
            ),
            "tables": sorted((t.source, t.place, t.state or "") for t in inputs.tables),
            "dates": None if dates is None else [str(dates.first), str(dates.last)],
            "code_version": read_code_version(),
            **({"refit": True} if request.refit else {}),
            **({"last_days": moving_days} if moving_days else {}),
        }
    )


def _list_moving_days(config: BuildConfig) -> list[tuple[str, str, str]]:
    """Columns whose last day is the clock's, with that day: the same rows are others tomorrow."""
    return [
        (name, column.name, str(find_last_day(column, None)))
        for name, source in sorted(config.used_sources.items())
        for column in source.columns
        if column.not_after == "now"
    ]


def content_config(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what of a resolved config has an influence on the content."""
    kept = {key: value for key, value in resolved.items() if key not in ("spark", "data_dir")}
    kept["output"] = {key: value for key, value in resolved["output"].items() if key != "root"}
    return kept


def describe_run(run_fingerprint: str, request: RunRequest) -> RunInfo:
    """Describes a run for the manifest."""
    dates = request.dates
    if dates is None:
        return RunInfo(run_fingerprint)
    days = {str(day): run_fingerprint for day in dates.days()}
    return RunInfo(run_fingerprint, str(dates.first), str(dates.last), days)


def read_parent(paths: DatasetPaths) -> Parent | None:
    """Reads the current version; a damaged one does not hinder a build that replaces it."""
    current = read_current(paths)
    if current is None:
        return None
    try:
        return Parent(current, read_published(paths, current))
    except InputDataError as error:
        logger.warning("the current version is damaged: %s", error.what)
        words = filter(None, (error.what, error.received))
        return Parent(current, None, ": ".join(map(str, words)))


def find_same_version(
    paths: DatasetPaths,
    parent: Parent | None,
    run: RunInfo,
    *,
    replaces_days: bool,
    grows: bool = False,
) -> tuple[Path, Manifest] | None:
    """Finds a published, undamaged version that holds what a run would build.

    A run that replaces its days alone has nothing to do where the current version holds just these.
    """
    if replaces_days:
        return _find_same_days(paths, parent, run)
    candidates = published_versions(paths.base)
    if grows:
        # An earlier vocabulary would give its next ids to other tokens than the versions after it
        # did, and numbers that were fitted anew since then would be forgotten.
        candidates = [] if parent is None else [parent.version_id]
    for version_id in reversed(candidates):
        if not version_id.endswith(f"-{run.fingerprint[:8]}"):
            continue
        try:
            manifest = read_published(paths, version_id)
        except InputDataError as error:
            logger.warning("version %s is damaged: %s", version_id, error.what)
            continue
        if _is_made_by(manifest, run):
            return paths.version(version_id), manifest
    return None


def _find_same_days(
    paths: DatasetPaths, parent: Parent | None, run: RunInfo
) -> tuple[Path, Manifest] | None:
    if parent is None or parent.manifest is None or parent.manifest.run is None:
        return None
    known = parent.manifest.run.days
    if any(known.get(day) != made for day, made in run.days.items()):
        return None
    return paths.version(parent.version_id), parent.manifest


def take_same_version(paths: DatasetPaths, parent: Parent | None, version: Path) -> None:
    """Makes a version that holds what a run would build the current one, if it is not."""
    if parent is not None and parent.version_id == version.name:
        logger.info("nothing has changed since %s: nothing was built", describe_place(version))
        return
    make_current(paths, version.name, before=None if parent is None else parent.version_id)
    place = describe_place(version)
    logger.info("%s holds the same already: nothing was built; it is current again", place)


def _is_made_by(manifest: Manifest, run: RunInfo) -> bool:
    made_by = manifest.run
    is_whole = made_by is not None and not any(made_by.reused_rows.values())
    return is_whole and made_by is not None and made_by.fingerprint == run.fingerprint

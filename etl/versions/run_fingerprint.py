"""The fingerprint of a run: what it is asked for, whether that is built, and what it builds on."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from conf.artefacts.dataset import DatasetPaths, published_versions
from conf.dates import DateRange
from conf.errors import ConfigError, InputDataError, read_code_version
from conf.etl.build import BuildConfig
from conf.etl.time_columns import find_time_columns
from conf.manifest import Manifest, RunInfo
from conf.publication.entries import move_pointer
from conf.publication.working_copy import describe_place
from conf.schema import fingerprint
from etl.sources.bad_rows import find_last_day
from etl.sources.snapshot import RunInputs
from etl.versions.publish import read_current, read_published

logger = logging.getLogger("sluice.build")

# What shards of one split may differ in.
_FREE_KEYS = ("shards", "eval_shards", "shard_bytes", "shard_rows", "partition_overwrite")
_ALL_DAYS = "build all days anew: --set output.partition_overwrite=static with the whole range"


@dataclass(frozen=True)
class RunRequest:
    """What a run is asked for beside its config: days, building without changes, fitting anew."""

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
    """Returns the fingerprint of all that decides a version's content, and of nothing else."""
    dates = request.dates
    # Columns whose last day is the clock's: the same rows are others tomorrow.
    moving_days = [
        (name, column.name, str(find_last_day(column, None)))
        for name, source in sorted(config.used_sources.items())
        for column in source.columns
        if column.not_after == "now"
    ]
    return fingerprint(
        {
            "config": _content_config(config.resolved()),
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


def _content_config(resolved: Mapping[str, Any]) -> dict[str, Any]:
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

    One that `grows` looks at the current version alone: an earlier vocabulary would give its next
    ids to other tokens than the versions after it did.
    """
    if replaces_days:
        return _find_same_days(paths, parent, run)
    current = [] if parent is None else [parent.version_id]
    for version_id in current if grows else reversed(published_versions(paths.base)):
        if version_id.endswith(f"-{run.fingerprint[:8]}"):
            try:
                manifest = read_published(paths, version_id)
            except InputDataError as error:
                logger.warning("version %s is damaged: %s", version_id, error.what)
                continue
            made = manifest.run
            if made and made.fingerprint == run.fingerprint and not any(made.reused_rows.values()):
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
    move_pointer(paths.base, version.name, before=None if parent is None else parent.version_id)
    place = describe_place(version)
    logger.info("%s holds the same already: nothing was built; it is current again", place)


def find_base(
    paths: DatasetPaths, config: BuildConfig, parent: Parent | None
) -> tuple[Path, Manifest] | None:
    """Returns the version whose other days are kept, undamaged and of this config; None: none."""
    if config.output.partition_overwrite != "dynamic" or parent is None:
        return None
    if parent.manifest is None:
        raise InputDataError(
            "the current version, whose other days would be kept, is damaged",
            received=paths.version(parent.version_id),
            fix=f"roll back to an earlier version by `sluice versions rollback`, or {_ALL_DAYS}",
        )
    _check_reusable(config, parent.manifest)
    return paths.version(parent.version_id), parent.manifest


def _check_reusable(config: BuildConfig, parent: Manifest) -> None:
    """Refuses to mix shards of two configs in one version, with the keys that differ."""
    try:
        before = _shard_config(BuildConfig.model_validate(dict(parent.source.config)))
    except ValidationError as error:
        raise _refuse_config(error.errors()[0]["msg"], parent) from error
    now = _shard_config(config)
    if changed := sorted(key for key in now if now[key] != before.get(key)):
        raise _refuse_config(", ".join(changed), parent)


def _refuse_config(received: str, parent: Manifest) -> ConfigError:
    return ConfigError(
        "the config has changed since the version whose partitions would be kept",
        received=received,
        allowed=f"the config of version {parent.dataset_version}",
        fix=_ALL_DAYS,
    )


def _shard_config(config: BuildConfig) -> dict[str, Any]:
    content = _content_config(config.resolved())
    content.pop("sources")  # the same columns may come from elsewhere
    # Rules judge a version; only slices are part of the statistics that days are merged by.
    times = [time for time in find_time_columns(config) if time.use != "rule"]
    content["units of times"] = {time.name: time.unit for time in times}
    content["contract"] = {"slices": content["contract"]["slices"]}
    output = content.pop("output")
    kept = {key: value for key, value in output.items() if key not in _FREE_KEYS}
    return {**content, **{f"output.{key}": value for key, value in kept.items()}}


def complete_run(
    run: RunInfo, base: tuple[Path, Manifest] | None, reused_rows: Mapping[str, int]
) -> RunInfo:
    """Adds to a run what its version shares with the one whose other days are kept."""
    if base is None:
        return run
    earlier = {} if base[1].run is None else base[1].run.days
    return replace(run, days=dict(sorted({**earlier, **run.days}.items())), reused_rows=reused_rows)

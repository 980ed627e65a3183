"""The version that a run takes its other days from: which it is, and whether its shards fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from conf.errors import ConfigError, InputDataError
from conf.etl.build import BuildConfig
from conf.manifest import Manifest, RunInfo
from conf.paths import DatasetPaths
from etl.versions.run_fingerprint import Parent, RunRequest, content_config

# What shards of one split may differ in.
_FREE_KEYS = ("shards", "eval_shards", "shard_bytes", "shard_rows", "partition_overwrite")


def check_reusable(config: BuildConfig, parent: Manifest) -> None:
    """Refuses to mix shards of two configs in one version.

    Raises:
        ConfigError: Names the keys in which the config differs from the parent's, or says why
            the parent's is refused by now.
    """
    fix = "build all days anew: --set output.partition_overwrite=static with the whole range"
    try:
        before = _shard_config(BuildConfig.model_validate(dict(parent.source.config)))
    except ValidationError as error:
        raise ConfigError(
            "the config of the version whose partitions would be kept is refused by now",
            received=error.errors()[0]["msg"],
            allowed=f"the config of version {parent.dataset_version}",
            fix=fix,
        ) from error
    now = _shard_config(config)
    changed = sorted(key for key in now if now[key] != before.get(key))
    if changed:
        raise ConfigError(
            "the config has changed since the version whose partitions would be kept",
            received=", ".join(changed),
            allowed=f"the config of version {parent.dataset_version}",
            fix=fix,
        )


def _shard_config(config: BuildConfig) -> dict[str, Any]:
    content = content_config(config.resolved())
    content.pop("sources")  # the same columns may come from elsewhere
    # Rules judge a version; only slices are part of the statistics that days are merged by.
    content["contract"] = {"slices": content["contract"]["slices"]}
    output = content.pop("output")
    kept = {key: value for key, value in output.items() if key not in _FREE_KEYS}
    return {**content, **{f"output.{key}": value for key, value in kept.items()}}


def find_base(
    paths: DatasetPaths, config: BuildConfig, request: RunRequest, parent: Parent | None
) -> tuple[Path, Manifest] | None:
    """Returns the version whose other days are kept; None where all is built.

    Raises:
        ConfigError: Its partitions were built by another config.
        InputDataError: It is damaged.
    """
    if config.output.partition_overwrite != "dynamic" or parent is None:
        return None
    if parent.manifest is None:
        raise InputDataError(
            "the current version, whose other days would be kept, is damaged",
            received=paths.version(parent.version_id),
            fix="roll back to an earlier version by `sluice versions rollback`, or build all days "
            "with --set output.partition_overwrite=static",
        )
    check_reusable(config, parent.manifest)
    return paths.version(parent.version_id), parent.manifest


def complete_run(
    run: RunInfo, base: tuple[Path, Manifest] | None, reused_rows: Mapping[str, int]
) -> RunInfo:
    """Adds to a run what its version shares with the one whose other days are kept."""
    if base is None:
        return run
    earlier = {} if base[1].run is None else base[1].run.days
    return replace(run, days=dict(sorted({**earlier, **run.days}.items())), reused_rows=reused_rows)


def check_split_by_day(config: BuildConfig) -> None:
    """Refuses a split whose bounds depend on which days are read.

    Raises:
        ConfigError: Temporal by fractions or durations.
    """
    split = config.split
    is_fixed = split.test_from_ts is not None and (
        split.validation is not True or split.validation_from_ts is not None
    )
    if split.strategy == "temporal" and not is_fixed:
        raise ConfigError(
            "output.partition_overwrite: dynamic needs a split that is the same for every day",
            received="split.strategy: temporal, "
            + ("by fractions" if split.test is None else f"test: {split.test}"),
            allowed="fixed test_from_ts and validation_from_ts, or another strategy",
        )

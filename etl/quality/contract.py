"""The two points at which a build checks its contract: sources read, version to be published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.etl import BuildConfig
from conf.manifest import SplitInfo
from conf.schema import FeatureSchema
from etl.quality.feature_rules import check_feature_rules
from etl.quality.result import RuleResult, settle_results
from etl.quality.versions import VersionView

if TYPE_CHECKING:
    from datetime import date

    from etl.sources import Source, SourceCounts


def check_sources(
    config: BuildConfig,
    sources: Mapping[str, Source],
    counts: Mapping[str, SourceCounts],
    previous: VersionView | None,
    run_date: date | None = None,
) -> tuple[RuleResult, ...]:
    """Checks the rules on sources: one Spark aggregate per source that has any.

    Args:
        config: The build's config.
        sources: The sources as read.
        counts: Their rows.
        previous: The current version, or None where there is none.
        run_date: The last day that the run is for, or None.

    Raises:
        InputDataError: A rule of severity `error` is violated; the message names all of them.
        ConfigError: A freshness rule has no day to compare with.
    """
    from etl.quality.source_rules import SourcesAsRead, check_source_rules

    rows = {} if previous is None else previous.source_rows
    return settle_results(
        check_source_rules(config, SourcesAsRead(sources, counts, rows, run_date))
    )


def check_version(
    config: BuildConfig,
    staging: Path,
    schema: FeatureSchema,
    splits: Sequence[SplitInfo],
    previous: VersionView | None,
) -> tuple[RuleResult, ...]:
    """Checks the rules on features and splits, from statistics alone.

    Args:
        config: The build's config.
        staging: Directory of the version, statistics and encoders written.
        schema: Its features.
        splits: Its splits.
        previous: The current version, or None where there is none.

    Raises:
        InputDataError: A rule of severity `error` is violated; the message names all of them.
    """
    rows = {split.name: split.rows for split in splits}
    version = VersionView(staging, schema, {}, rows)
    return settle_results(check_feature_rules(config, version, previous))


def list_results(*results: Sequence[RuleResult]) -> tuple[dict[str, Any], ...]:
    """Returns the results as the manifest holds them."""
    return tuple(result.to_json() for part in results for result in part)

"""The encoders of the version before: what of them a build continues.

Vocabularies that grow append to theirs. A run with days keeps fitted numbers, so that a feature
means the same from day to day and models of either day can be compared, until it is told to refit.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from conf.artefacts.dataset import DatasetPaths
from conf.artefacts.encoder_files import read_plan_file
from conf.encoders import ENCODERS_DIR, EncoderPlan
from conf.errors import InputDataError
from conf.etl.build import BuildConfig
from conf.etl.encodings import FeatureConfig, TargetConfig
from conf.manifest import Manifest
from etl.encoders.feature_plan import FeaturePlan
from etl.encoders.fit import EarlierEncoders, plan_inputs
from etl.versions.run_fingerprint import Parent

logger = logging.getLogger("sluice.encoders")

_OF_FEATURE = ("column", "encoding", "max_len", "length")
_OF_COLUMN = ("type", "field", "separator", "timestamp_format", "pair", "pair_default")
_OF_SOURCE = ("format", "separator", "quote", "escape", "null_values", "pattern", "encoding")
_OF_JOIN = ("source", "column", "valid_from", "valid_to", "known_at", "match")
_OF_HISTORIES = ("events", "histories", "session_gap_minutes", "most_frequent")


def find_earlier_encoders(
    paths: DatasetPaths,
    config: BuildConfig,
    features: FeaturePlan,
    parent: Parent | None,
    *,
    keeps_numbers: bool,
) -> EarlierEncoders | None:
    """Returns the encoders of the current version, where a build continues them.

    Fitted numbers are kept where `keeps_numbers` says so, vocabularies that grow always.
    """
    keeps_numbers = keeps_numbers and features.fits_numbers
    if parent is None or not (features.has_incremental_vocabulary or keeps_numbers):
        return None
    fix = "roll back to an earlier version by `sluice versions rollback`"
    fix += "" if features.has_incremental_vocabulary else ", or fit anew by --refit"
    if parent.manifest is None:
        raise InputDataError(
            "the current version, whose encoders the new one continues, is damaged",
            received=parent.damage,
            fix=fix,
        )
    directory = paths.version(parent.version_id) / ENCODERS_DIR
    plan = read_plan_file(directory)
    if plan.fingerprint != parent.manifest.encoders_fingerprint:
        raise InputDataError(
            "the encoders of the current version, which the new one continues, were changed",
            received=f"{directory}: fingerprint {plan.fingerprint}",
            allowed=f"{parent.manifest.encoders_fingerprint}, as the manifest says",
            fix=f"restore encoders.json, {fix}",
        )
    kept = _find_kept(config, features, parent.manifest, plan) if keeps_numbers else frozenset()
    return EarlierEncoders(parent.version_id, directory, plan, kept)


def _find_kept(
    config: BuildConfig, features: FeaturePlan, parent: Manifest, plan: EncoderPlan
) -> frozenset[str]:
    """The features whose numbers were fitted from columns and settings that have not changed."""
    now, before = config.resolved(), parent.source.config
    fitted = [feature for feature in features.features if feature.encoding.fits_numbers]
    kept = frozenset(
        feature.name
        for feature in fitted
        if _settings(now, feature) == _settings(before, feature)
        and plan.column(feature.name).inputs == plan_inputs(features, feature)
    )
    changed = [feature.name for feature in fitted if feature.name not in kept]
    if kept:
        names, version = ", ".join(sorted(kept)), parent.dataset_version
        logger.info("numbers kept from version %s: %s; --refit fits them anew", version, names)
    if changed:
        logger.info("fitted anew, as declared in another way before: %s", ", ".join(changed))
    return kept


def _settings(config: Mapping[str, Any], feature: FeatureConfig) -> list[Any]:
    """All of a resolved config that the numbers of a feature follow from."""
    declared = {one["name"]: one for one in config.get("features", ())}.get(feature.name, {})
    label = config.get("label") if isinstance(feature.encoding, TargetConfig) else None
    return [_choose(declared, _OF_FEATURE), label, describe_meaning(config, feature.columns)]


def describe_meaning(config: Mapping[str, Any], columns: Collection[str]) -> dict[str, Any]:
    """Returns all of a resolved config that says what some columns hold."""
    sources = config.get("sources", {}).values()
    known = {own.get("name") for source in sources for own in source.get("columns", ())}
    meaning: dict[str, Any] = {}
    left = list(columns)
    while left:
        if (column := left.pop()) not in meaning:
            meaning[column] = list(_find_declared(config, column)) or _find_maker(config, column)
            left += [name for name in _list_words(meaning[column]) if name in known]
    return meaning


def _find_declared(config: Mapping[str, Any], column: str) -> Iterator[dict[str, Any]]:
    """The sources that hold a column: how it is written there, and the joins that bring it."""
    for name, source in sorted(config.get("sources", {}).items()):
        joins = [join for join in config.get("joins", ()) if join.get("source") == name]
        for place, declared in enumerate(source.get("columns", ())):
            if declared.get("name") == column:
                # Without names in the input a column is the value that stands at its place.
                has_names = declared.get("field") or source.get("header") == "by_name"
                yield {
                    "column": _choose(declared, _OF_COLUMN),
                    "source": _choose(source, _OF_SOURCE),
                    "place": None if has_names else place,
                    "joins": [_choose(join, _OF_JOIN) for join in joins],
                }


def _choose(section: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    return {key: section.get(key) for key in keys}


def _find_maker(config: Mapping[str, Any], column: str) -> Any:
    """What makes a column that no source holds: a window, or histories."""
    windows = [made for made in config.get("rolling", ()) if made.get("name") == column]
    return windows or _choose(config, _OF_HISTORIES)


def _list_words(found: Any) -> Iterator[str]:
    if isinstance(found, str):
        yield found
    elif isinstance(found, Mapping | list | tuple):
        for value in found.values() if isinstance(found, Mapping) else found:
            yield from _list_words(value)

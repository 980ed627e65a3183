"""The encoders of the version before: what of them a build continues.

Vocabularies that grow append to theirs. A run with days keeps fitted numbers, so that a feature
means the same from day to day and models of either day can be compared, until it is told to refit.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from conf.artefacts.dataset import DatasetPaths
from conf.artefacts.encoder_files import read_plan_file
from conf.encoders import ENCODERS_DIR, EncoderPlan
from conf.encoders.target import TargetConfig
from conf.errors import InputDataError
from conf.etl.build import BuildConfig
from conf.manifest import Manifest
from etl.encoders.fit import EarlierEncoders
from etl.features.column_meaning import describe_meaning
from etl.features.encoder_plan import plan_inputs
from etl.features.plan import FeaturePlan
from etl.versions.run_fingerprint import Parent

logger = logging.getLogger("sluice.encoders")


def find_earlier_encoders(
    paths: DatasetPaths,
    config: BuildConfig,
    features: FeaturePlan,
    parent: Parent | None,
    *,
    keeps_numbers: bool,
) -> EarlierEncoders | None:
    """Returns the encoders of the current version, where a build continues them.

    Args:
        paths: The dataset.
        config: The build's config.
        features: Its features.
        parent: The current version.
        keeps_numbers: Whether fitted numbers are kept; vocabularies that grow always do.

    Raises:
        InputDataError: The version is damaged, or a file of its encoders is gone: its tokens would
            get other ids, and its features other numbers.
    """
    keeps_numbers = keeps_numbers and features.fits_numbers
    if parent is None or not (features.has_incremental_vocabulary or keeps_numbers):
        return None
    if parent.manifest is None:
        advice = "" if features.has_incremental_vocabulary else ", or fit anew by --refit"
        raise InputDataError(
            "the current version, whose encoders the new one continues, is damaged",
            received=parent.damage,
            fix=f"roll back to an earlier version by `sluice versions rollback`{advice}",
        )
    directory = paths.version(parent.version_id) / ENCODERS_DIR
    plan = read_plan_file(directory)
    if plan.fingerprint != parent.manifest.encoders_fingerprint:
        advice = "" if features.has_incremental_vocabulary else ", or fit anew by --refit"
        raise InputDataError(
            "the encoders of the current version, which the new one continues, were changed",
            received=f"{directory}: fingerprint {plan.fingerprint}",
            allowed=f"{parent.manifest.encoders_fingerprint}, as the manifest says",
            fix="restore encoders.json, roll back to an earlier version by "
            f"`sluice versions rollback`{advice}",
        )
    kept = _find_kept(config, features, parent.manifest, plan) if keeps_numbers else frozenset()
    return EarlierEncoders(parent.version_id, directory, plan, kept)


def _find_kept(
    config: BuildConfig, features: FeaturePlan, parent: Manifest, plan: EncoderPlan
) -> frozenset[str]:
    """The features whose numbers were fitted from columns and settings that have not changed."""
    before = {feature["name"]: feature for feature in parent.source.config.get("features", ())}
    resolved = config.resolved()
    now = {feature["name"]: feature for feature in resolved["features"]}
    labels = [(one.get("label"), one.get("labels")) for one in (resolved, parent.source.config)]
    fitted = [feature for feature in features.features if feature.encoding.fits_numbers]
    kept = frozenset(
        feature.name
        for feature in fitted
        if _settings(now[feature.name]) == _settings(before.get(feature.name, {}))
        and plan.column(feature.name).inputs == plan_inputs(features, feature)
        and describe_meaning(resolved, feature.columns)
        == describe_meaning(parent.source.config, feature.columns)
        and (labels[0] == labels[1] or not isinstance(feature.encoding, TargetConfig))
    )
    changed = [feature.name for feature in fitted if feature.name not in kept]
    if kept:
        logger.info(
            "numbers kept from version %s: %s; --refit fits them anew",
            parent.dataset_version, ", ".join(sorted(kept)),
        )  # fmt: skip
    if changed:
        logger.info("fitted anew, as declared in another way before: %s", ", ".join(changed))
    return kept


def _settings(feature: Mapping[str, Any]) -> dict[str, Any]:
    return {key: feature.get(key) for key in ("column", "encoding", "max_len", "length")}

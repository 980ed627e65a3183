"""The schema of imported records, and whether they hold what it says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from conf.encoders import KEY_PREFIX
from conf.errors import InputDataError
from conf.etl.imported import ImportedFeatureConfig
from conf.schema import OOV_ID, PAD_ID, FeatureSchema, FeatureSpec
from etl.imported.features import ImportedFeatures
from etl.imported.ids import (
    count_ids,
    describe_special_ids,
    refuse_special_ids,
    warn_of_sparse_ids,
)
from etl.tfrecord.types.features import WireFeature

_ROLE_OF_SPLIT = {"catalog": "item", "users": "user"}
"""Splits whose records hold one side alone."""


def build_schema(
    features: ImportedFeatures, statistics: Mapping[str, Mapping[str, Any]]
) -> FeatureSchema:
    """Builds the schema of the records that were read.

    Args:
        features: How features lie in the records.
        statistics: By split and feature.

    Raises:
        InputDataError: Records lack a declared feature, or hold ids that have another meaning.
    """
    specs = []
    special: dict[str, str] = {}
    for config, wire in zip(features.config.features, features.wire, strict=True):
        held = [
            by_feature[config.name]
            for split, by_feature in statistics.items()
            if _ROLE_OF_SPLIT.get(split, config.role) == config.role
        ]
        _check_present(config, wire, held)
        specs.append(_build_spec(config, wire, held))
        are_ids = config.reads_as_ids(wire.kind) or config.are_keys
        found = describe_special_ids(held, is_list=wire.is_list) if are_ids else None
        if found is not None and not features.config.declares_ids(config):
            special[config.name] = found
    refuse_special_ids(special, [f.name for f in features.config.features if f.are_keys])
    return FeatureSchema(_share_sizes(specs))


def _build_spec(
    config: ImportedFeatureConfig,
    wire: WireFeature,
    found: Sequence[Mapping[str, Any]],
) -> FeatureSpec:
    shape: tuple[int | None, ...] = (config.length,) if wire.is_list else ()
    are_ids = config.reads_as_ids(wire.kind)
    spec = FeatureSpec(
        name=config.name,
        dtype=wire.kind,
        role=config.role,
        shape=shape,
        max_len=config.max_len,
        vocabulary_size=count_ids(config, found) if are_ids else None,
        shared_embedding=config.table,
        pad_value=config.pad_value,
    )
    if not are_ids and not config.are_keys:
        return spec
    warn_of_sparse_ids(spec, found)
    if are_ids:
        return spec
    absent = PAD_ID if wire.is_list else OOV_ID
    return replace(spec, encoding=f"{KEY_PREFIX}{spec.name}", pad_value=absent)


def _share_sizes(specs: Sequence[FeatureSpec]) -> tuple[FeatureSpec, ...]:
    """Gives the features of a table its greatest number of ids."""
    sizes: dict[str, int] = {}
    for spec in specs:
        sizes[spec.table] = max(sizes.get(spec.table, 0), spec.vocabulary_size or 0)
    return tuple(
        spec if spec.vocabulary_size is None else replace(spec, vocabulary_size=sizes[spec.table])
        for spec in specs
    )


def _check_present(
    config: ImportedFeatureConfig, wire: WireFeature, found: Sequence[Mapping[str, Any]]
) -> None:
    """Refuses what training would stop at: absent values, and lists of another length."""
    rows, missing = (sum(one[key] for one in found) for key in ("rows", "missing"))
    if missing == rows:
        raise InputDataError(
            f"no record holds feature {config.name!r}",
            received=f"{rows:,} records without it",
            fix="correct its name, or leave it out of `features`",
        )
    are_ids = config.reads_as_ids(wire.kind) or config.are_keys
    is_optional = config.pad_value is not None or are_ids
    is_required = config.length is not None or not wire.is_list
    if missing and is_required and not is_optional:
        raise InputDataError(
            f"records lack feature {config.name!r}",
            received=f"{missing:,} of {rows:,} records",
            fix="give it a pad_value, which stands for an absent value",
        )
    if config.length is None:
        return
    lengths = {one["length"][key] for one in found for key in ("min", "max")} - {None}
    allowed = {config.length, 0} if is_optional else {config.length}
    if not lengths <= allowed:
        raise InputDataError(
            f"lists of feature {config.name!r} are not of the declared length",
            received=f"{min(lengths)} to {max(lengths)} values",
            allowed=f"length: {config.length}",
            fix="correct its length, or declare max_len for lists of any length",
        )

"""How long lists get: `max_len` of the schema, or else the longest list that train holds."""

from __future__ import annotations

from dataclasses import replace

from conf.manifest import Manifest
from conf.schema import FeatureSpec


def bound_list(manifest: Manifest, spec: FeatureSpec) -> FeatureSpec:
    """Bounds a list without `max_len` by the longest in train, where the statistics tell it.

    Any other feature is returned as it is.
    """
    if not spec.is_ragged or spec.max_len is not None:
        return spec
    lengths = manifest.statistics.get("train", {}).get(spec.name, {}).get("length", {})
    longest = lengths.get("max")
    return replace(spec, max_len=int(longest)) if longest else spec


def list_length(spec: FeatureSpec) -> int | None:
    """Returns the length of a padded list, or None where it has no bound."""
    return spec.max_len if spec.is_ragged else spec.shape[0]

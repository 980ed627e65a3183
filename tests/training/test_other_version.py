"""Which other versions a run may be measured on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf

from conf.artefacts.dataset import read_manifest
from conf.errors import ConfigError
from conf.manifest import Manifest, RunInfo
from conf.schema import FeatureSchema
from training.encoders.vocabularies import Vocabulary, read_encoded_version
from training.other_version import _check_order, _take_encodings, match_served

DAY_MS = 86_400_000


def dated(manifest: Manifest, version: str, *days: str) -> Manifest:
    run = RunInfo("f", days[0], days[-1], dict.fromkeys(days, "f"))
    return replace(manifest, dataset_version=version, run=run)


def test_a_version_of_earlier_days_is_refused_whenever_it_was_built(tiny_manifest) -> None:
    own = dated(tiny_manifest, "2", "2026-01-02", "2026-01-03")
    _check_order(own, dated(own, "3", "2026-01-03", "2026-01-04"))
    _check_order(own, dated(own, "3", "2026-01-01", "2026-01-03"))
    with pytest.raises(ConfigError, match="of a log that ends earlier") as refused:
        _check_order(own, dated(own, "3", "2026-01-01", "2026-01-02"))
    assert "2026-01-04" in refused.value.render()
    with pytest.raises(ConfigError, match="is older than the one"):
        _check_order(own, dated(own, "1", "2026-01-04"))


def test_without_days_the_last_event_counts(tiny_manifest) -> None:
    def ending(version: str, day: int) -> Manifest:
        source = replace(tiny_manifest.source, event_ts_ms_range=(0, day * DAY_MS))
        return replace(tiny_manifest, dataset_version=version, source=source)

    _check_order(ending("2", 5), ending("3", 5))
    with pytest.raises(ConfigError, match="of a log that ends earlier"):
        _check_order(ending("2", 5), ending("3", 4))


def test_networks_read_the_features_in_the_order_of_the_run(tiny_version: Path) -> None:
    manifest = read_manifest(tiny_version)
    there = read_encoded_version(tiny_version, manifest)
    turned = replace(manifest, schema=FeatureSchema(manifest.schema.features[::-1]))
    here = read_encoded_version(tiny_version, turned)
    assert here.manifest.schema.names != manifest.schema.names
    assert _take_encodings((), here, there).manifest.schema == manifest.schema


def vocabulary(tokens: list[str], buckets: int | None = None) -> Vocabulary:
    return Vocabulary("v", "string", pa.array(tokens), buckets)


def test_unknown_tokens_have_the_rows_that_the_earlier_version_serves() -> None:
    new, old = vocabulary(["b", "x", "y"], 2), vocabulary(["a", "b"], 2)
    bucket = [int(tf.strings.to_hash_bucket_fast(token, 2)) + 2 for token in "xy"]
    assert match_served(new, old).tolist() == [0, 1, 2, 3, 5, *bucket]
    assert match_served(vocabulary(["b", "x"], 3), old) is None
    plain = vocabulary(["a", "b"])
    assert match_served(vocabulary(["b", "x"], 1), plain).tolist() == [0, 1, 1, 3, 1]
    retired = replace(plain, retired=np.array([False, True]))
    assert match_served(vocabulary(["b", "a"]), retired).tolist() == [0, 1, 1, 2]

from __future__ import annotations

from dataclasses import replace

import pytest

from conf.errors import ConfigError
from conf.manifest import Manifest
from conf.schema import FeatureSchema
from training.models.base import find_feature, table_size


def test_a_misspelt_feature_gets_a_hint(tiny_manifest: Manifest) -> None:
    with pytest.raises(ConfigError, match="did you mean 'genres'"):
        find_feature(tiny_manifest, "generes")


def test_features_of_one_table_must_have_one_vocabulary(tiny_manifest: Manifest) -> None:
    assert table_size(tiny_manifest, tiny_manifest.schema["history"]) == 42
    features = tuple(
        replace(spec, vocabulary_size=7) if spec.name == "history" else spec
        for spec in tiny_manifest.schema.features
    )
    manifest = replace(tiny_manifest, schema=FeatureSchema(features))
    with pytest.raises(ConfigError, match="one vocabulary per embedding table"):
        table_size(manifest, manifest.schema["movie_id"])
    with pytest.raises(ConfigError, match="cannot be embedded"):
        table_size(manifest, manifest.schema["label"])

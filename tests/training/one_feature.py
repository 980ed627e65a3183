"""A dataset of one split and one feature."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from conf.manifest import Manifest, ShardInfo, SplitInfo
from conf.schema import FeatureSchema, FeatureSpec
from tests.training.fixtures import write_shard


def one_feature(
    tmp_path: Path, manifest: Manifest, spec: FeatureSpec, rows: list[dict]
) -> Manifest:
    """Writes the split `test` of rows with one feature; returns its manifest."""
    schema = FeatureSchema((spec,))
    write_shard(tmp_path / "test.tfrecord", rows, schema)
    size = (tmp_path / "test.tfrecord").stat().st_size
    shard = ShardInfo("test.tfrecord", len(rows), size, "00000000")
    return replace(manifest, schema=schema, splits=(SplitInfo("test", (shard,)),))

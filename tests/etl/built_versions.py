"""Versions read back with their ids turned into tokens, and small ones published by hand."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from conf.artefacts.dataset import DatasetPaths
from conf.manifest import Manifest
from conf.publication.entries import stage_entry
from etl.build import BuildResult
from etl.tfrecord.types.features import WireFeature
from etl.versions.publish import publish_version, read_current
from tests.datasets import build_manifest
from tests.tfrecord_files import read_file


def read_split(version: Path, manifest: Manifest, split: str) -> list[dict[str, Any]]:
    """Rows of a split with its ids turned back into tokens."""
    tokens: dict[str, dict[int, Any]] = {}
    for spec in manifest.schema.features:
        if spec.vocabulary_size:
            table = pq.read_table(version / "encoders" / f"{spec.encoding}.parquet").to_pydict()
            tokens[spec.name] = dict(zip(table["id"], table["token"], strict=True))
    wire = [WireFeature(s.name, s.dtype, s.is_list) for s in manifest.schema.features]
    files = [version / shard.path for shard in manifest.split(split).shards]
    rows = [row for file in files for row in read_file(file, wire).to_pylist()]
    return [{n: _decode(v, tokens[n]) if n in tokens else v for n, v in r.items()} for r in rows]


def read_columns(result: BuildResult, split: str, *wire: WireFeature) -> pa.Table:
    """Records of a split as they are written; by default all features of the schema."""
    specs = result.manifest.schema.features
    chosen = wire or [WireFeature(spec.name, spec.dtype, spec.is_list) for spec in specs]
    shards = [result.version / shard.path for shard in result.manifest.split(split).shards]
    return pa.concat_tables(read_file(shard, chosen) for shard in shards)


def _decode(value: Any, tokens: dict[int, Any]) -> Any:
    if isinstance(value, list):
        return [tokens.get(item, "OOV") for item in value]
    return None if value is None else tokens.get(value, "OOV")


def without_raw(statistics: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Statistics without those of raw columns, which a write by the connector does not see."""
    return {
        split: {
            name: {key: value for key, value in found.items() if key != "raw"}
            for name, found in features.items()
        }
        for split, features in statistics.items()
    }


def shard_digests(version: Path, manifest: Manifest) -> dict[str, str]:
    return {
        shard.path: hashlib.sha256((version / shard.path).read_bytes()).hexdigest()
        for split in manifest.splits
        for shard in split.shards
    }


def publish(paths: DatasetPaths, version_id: str, **changed: Any) -> Path:
    """Publishes a version of one shard of 16 bytes, with some fields of its manifest changed."""
    manifest = replace(build_manifest(version_id), parent=read_current(paths), **changed)
    with stage_entry(paths.versions, version_id) as staging:
        (staging / "train").mkdir()
        (staging / "train" / "part-0").write_bytes(b"x" * 16)
        return publish_version(paths, staging, manifest)

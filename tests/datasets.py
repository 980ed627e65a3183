"""Manifests made by hand, and dataset versions written again in the packed layout."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from conf.atomic_output import write_text_atomic
from conf.manifest import (
    MANIFEST_FILE,
    DatasetKeys,
    Manifest,
    RowCounts,
    ShardInfo,
    SourceSnapshot,
    SplitInfo,
)
from conf.paths import read_manifest
from conf.schema import FeatureSchema, FeatureSpec, plan_slots
from etl.tfrecord.codec.crc32c import crc32c
from etl.tfrecord.codec.decode import read_file
from etl.tfrecord.codec.encode import PackedEncoder
from etl.tfrecord.types.features import WireFeature


def build_manifest(version_id: str) -> Manifest:
    return Manifest(
        dataset_name="d",
        dataset_version=version_id,
        created_at="2026-01-01T00:00:00+00:00",
        record_type="Example",
        compression=None,
        splits=(SplitInfo("train", (ShardInfo("train/part-0", 1, 10, "00000000"),)),),
        schema=FeatureSchema((FeatureSpec("u", "int64", "user", vocabulary_size=5),)),
        keys=DatasetKeys(user="u", item="i"),
        encoder_files=(),
        encoders_fingerprint="0",
        statistics={"train": {"u": {"rows": 1}}},
        label_rate={},
        source=SourceSnapshot((), (1, 2), {"name": "d"}, "0"),
        counts=RowCounts({"log": 1}, {"log": {}}, 1, {"train": 1}, {}),
        code_version="0",
    )


def pack_version(version: Path, target: Path) -> Path:
    """Copies an uncompressed dataset version of Examples, its shards in the packed layout."""
    shutil.copytree(version, target)
    manifest = pack_manifest(read_manifest(version), version, target)
    write_text_atomic(target / MANIFEST_FILE, manifest.dumps())
    return target


def pack_manifest(manifest: Manifest, version: Path, target: Path) -> Manifest:
    """Writes the shards of a manifest below `target`; returns the manifest of these."""
    slots = plan_slots(manifest.schema)
    wire = [WireFeature(s.name, s.dtype, s.is_list) for s in manifest.schema.features]
    splits = []
    for split in manifest.splits:
        shards = []
        for shard in split.shards:
            table = read_file(version / shard.path, wire)
            encoder = PackedEncoder(table.schema, "Example", slots)
            data = b"".join(
                chunk.tobytes()
                for batch in table.to_batches()
                for chunk in encoder.encode_chunks(batch)
            )
            (target / shard.path).parent.mkdir(parents=True, exist_ok=True)
            (target / shard.path).write_bytes(data)
            shards.append(ShardInfo(shard.path, shard.rows, len(data), f"{crc32c(data):08x}"))
        splits.append(replace(split, shards=tuple(shards)))
    return replace(manifest, splits=tuple(splits), slots=slots)

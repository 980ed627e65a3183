"""Dataset versions written again in the packed layout."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from conf.dataset import read_manifest, write_text_atomic
from conf.layout import plan_slots
from conf.manifest import MANIFEST_FILE, Manifest, ShardInfo
from etl.tfrecord.crc32c import crc32c
from etl.tfrecord.decode import WireFeature, read_tfrecords
from etl.tfrecord.encode_packed import PackedEncoder


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
            table = read_tfrecords(version / shard.path, wire)
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

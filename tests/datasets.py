"""Manifests made by hand, dataset versions in the packed layout, counts of their records."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from conf.artefacts.dataset import read_manifest
from conf.manifest import (
    MANIFEST_FILE,
    DatasetKeys,
    Manifest,
    RowCounts,
    ShardInfo,
    SourceSnapshot,
    SplitInfo,
)
from conf.schema import FeatureSchema, FeatureSpec, plan_slots
from conf.storage.atomic_output import write_text_atomic
from etl.tfrecord.codec.crc32c import crc32c
from etl.tfrecord.codec.encode import PackedEncoder
from etl.tfrecord.types.features import WireFeature
from tests.tfrecord_files import read_file, read_records


def build_manifest(version_id: str) -> Manifest:
    return Manifest(
        dataset_name="d",
        dataset_version=version_id,
        created_at="2026-01-01T00:00:00+00:00",
        record_type="Example",
        compression=None,
        splits=(SplitInfo("train", (ShardInfo("train/part-0", 1, 16, "00000000"),)),),
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


Counts = dict[int, list[int]]
"""By id: rows, events, positives."""


def count_train_records(version: Path, manifest: Manifest) -> dict[str, Counts]:
    """Counts the users and items of the train records one by one, as protocol buffers have them."""
    config = manifest.source.config
    negatives = config.get("negatives") or {"strategy": "exposure", "splits": ()}
    has_drawn = negatives["strategy"] != "exposure" and "train" in negatives["splits"]
    samples = config.get("train_samples", "all")
    most = samples - 1 if isinstance(samples, int) else None  # The row before has the others.
    parts = {"user": manifest.keys.user, "item": manifest.keys.item}
    found: dict[str, Counts] = {part: {} for part, name in parts.items() if name is not None}
    for record in read_train_records(version, manifest):
        label = manifest.keys.label
        positive = label is None or any(value > 0 for value in record.get(label, ()))
        event = positive or not has_drawn
        past = record.get(manifest.keys.history or "", ()) if samples != "all" else ()
        for part in found:
            own = (record.get(str(parts[part])) or [1])[0]
            found[part].setdefault(own, [0, 0, 0])[0] += 1
            before = [own] * len(past[:most]) if part == "user" else past[:most]
            for place, counts in ((1, event), (2, positive)):
                for one in [own, *before] if counts else ():
                    found[part].setdefault(one, [0, 0, 0])[place] += 1
    return found


def read_train_records(version: Path, manifest: Manifest) -> Iterator[dict[str, list[Any]]]:
    """The values of each feature of the train records, by TensorFlow's own classes."""
    import tensorflow as tf

    is_example = manifest.record_type == "Example"
    message = tf.train.Example if is_example else tf.train.SequenceExample
    for shard in manifest.split("train").shards:
        for payload in read_records(version / shard.path):
            record = message.FromString(payload)
            features = (record.features if is_example else record.context).feature
            values = {name: _values(feature) for name, feature in features.items()}
            if not is_example:
                for name, steps in record.feature_lists.feature_list.items():
                    values[name] = [value for step in steps.feature for value in _values(step)]
            for slot in manifest.slots:
                values[slot.feature] = [values[slot.packed][slot.offset]]
            yield values


def _values(feature: Any) -> list[Any]:
    kind = feature.WhichOneof("kind")
    return [] if kind is None else list(getattr(feature, kind).value)

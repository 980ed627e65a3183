"""Manifests made by hand, and counts of a version's records."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from conf.artefacts.train_counts import COUNT_COLUMNS
from conf.manifest import (
    DatasetKeys,
    Manifest,
    RowCounts,
    ShardInfo,
    SourceSnapshot,
    SplitInfo,
)
from conf.schema import FeatureSchema, FeatureSpec
from tests.tfrecord_files import read_records


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


def read_train_counts(version: Path, manifest: Manifest) -> dict[str, Counts]:
    """The counts that a version holds, as anybody's Parquet reader has them."""
    found = {}
    for part, info in manifest.train_counts.items():
        table = pq.read_table(version / info.path)
        assert tuple(table.column_names) == COUNT_COLUMNS
        ids, *counts = (column.to_pylist() for column in table.columns)
        assert ids == sorted(set(ids))
        found[part] = dict(zip(ids, map(list, zip(*counts, strict=True)), strict=True))
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

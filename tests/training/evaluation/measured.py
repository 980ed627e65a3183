"""Untrained models of a dataset version, and what its records and vocabularies hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import tensorflow as tf

from conf.artefacts.dataset import read_manifest
from conf.manifest import Manifest, SplitInfo
from conf.training.train import TrainConfig
from tests.training.tiny_dataset import describe_shard
from tests.training.toy_models import TinyTowers
from training.checkpoint.restore import TrainedModel
from training.input.batches import build_eval_dataset
from training.models.registry import build_model


def build_measured(
    version: Path, model: dict[str, Any] | None = None, manifest: Manifest | None = None,
    **sections: Any,
) -> TrainedModel:  # fmt: skip
    """A model of a config; without one two small towers."""
    manifest = manifest or read_manifest(version)
    given = {"dataset": "d", "name": "n", **sections, **({"model": model} if model else {})}
    config = TrainConfig.model_validate(given)
    built = build_model(config.model, manifest, 3) if model else TinyTowers(manifest)
    return TrainedModel(Path(), built, config, manifest, version)


def configure(trained: TrainedModel, **evaluation: Any) -> TrainedModel:
    given = {"dataset": "d", "name": "n", "evaluation": evaluation}
    return replace(trained, config=TrainConfig.model_validate(given))


def read_ids(trained: TrainedModel, name: str) -> dict[Any, int]:
    table = pq.read_table(Path(str(trained.version_dir)) / "encoders" / f"{name}.parquet")
    return dict(zip(table["token"].to_pylist(), table["id"].to_pylist(), strict=True))


def read_rows(
    version: Path, manifest: Manifest, split: str, names: tuple[str, ...] | None = None
) -> list[dict[str, Any]]:
    ragged = ("seen", "history", "genres") if names is None else ()
    batches = build_eval_dataset(version, manifest, split, 1, names, ragged)
    return [{name: value[0].numpy() for name, value in batch.items()} for batch in batches]


def rewrite_records(
    version: Path, split: str, change: Callable[[Any], None], manifest: Manifest | None = None
) -> Manifest:
    """Changes the features of each record of a split, in place; returns the manifest of that."""
    manifest, shards = manifest or read_manifest(version), []
    for shard in manifest.split(split).shards:
        path = str(version / shard.path)
        records = [tf.train.Example.FromString(r.numpy()) for r in tf.data.TFRecordDataset(path)]
        with tf.io.TFRecordWriter(path) as writer:
            for example in records:
                change(example.features.feature)
                writer.write(example.SerializeToString())
        shards.append(describe_shard(version, shard.path, shard.rows))
    new = SplitInfo(split, tuple(shards))
    splits = tuple(new if s.name == split else s for s in manifest.splits)
    return replace(manifest, splits=splits)


def measure_by_hand(ranked: list[int], relevant: Collection[Any], k: int) -> dict[str, float]:
    hits, gain, precisions, first = 0, 0.0, 0.0, 0.0
    for place, item in enumerate(ranked[:k], 1):
        if item in relevant:
            hits += 1
            gain += 1 / math.log2(place + 1)
            precisions += hits / place
            first = first or 1 / place
    ideal = sum(1 / math.log2(place + 1) for place in range(1, min(k, len(relevant)) + 1))
    return {
        f"hit_rate@{k}": float(hits > 0),
        f"recall@{k}": hits / (len(relevant) or 1),
        f"ndcg@{k}": gain / (ideal or 1),
        f"precision@{k}": hits / k,
        f"map@{k}": precisions / (len(relevant) or 1),
        f"mrr@{k}": first,
    }

"""What a step of a softmax over the catalogue takes of memory, counted by TensorFlow's allocator.

To be run with `TF_CPU_ALLOCATOR_USE_BFC=true`: the other allocators of a CPU count on some
processors alone. Prints one JSON object, bytes by model.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from conf.artefacts.dataset import read_manifest
from conf.manifest import Manifest
from conf.schema import FeatureSchema
from conf.training.models import DSSMConfig, SASRecConfig
from conf.training.objectives import SoftmaxConfig
from training.models.registry import build_model
from training.models.retrieval import RetrievalModel
from training.networks.network import TrainingPass
from training.objectives.item_objectives import CatalogSoftmax, ItemData
from training.objectives.softmax_memory import count_item_tower, estimate_softmax_memory
from training.objectives.user_items import KnownItems, group_pairs

ITEMS, ROWS, GENRES = 5000, 64, 12
DSSM: dict[str, Any] = {
    "embedding_dim": 16, "user_features": ("user_id",), "objective": SoftmaxConfig(),
}  # fmt: skip
DEEP: dict[str, Any] = {**DSSM, "item_features": ("movie_id",), "item_hidden_units": (64, 64)}
MASKED = SoftmaxConfig(mask="user_items")
MEASURED: dict[str, DSSMConfig | SASRecConfig] = {
    "lists": DSSMConfig(**DSSM),
    "normalized": DSSMConfig(**DEEP, batch_normalization=True),
    "mask": SASRecConfig(item_features=("movie_id",), embedding_dim=16, objective=MASKED),
}


class _Catalogue:
    """Features of many items."""

    def __init__(self) -> None:
        self._genres = tf.random.stateless_uniform([ITEMS, GENRES], [1, 2], 2, 6, tf.int64)

    def lookup(self, ids: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"movie_id": ids, "genres": tf.gather(self._genres, ids)}


def change(manifest: Manifest, name: str, **changes: Any) -> Manifest:
    """Returns a manifest with another specification of a feature."""
    features = [replace(s, **changes) if s.name == name else s for s in manifest.schema.features]
    return replace(manifest, schema=FeatureSchema(tuple(features)))


def measure(name: str, manifest: Manifest) -> dict[str, int]:
    """Bytes that a step holds at most, and what is estimated with and without its item tower."""
    config, manifest = MEASURED[name], change(manifest, "genres", max_len=GENRES)
    for key in ("movie_id", "history", "seen"):
        manifest = change(manifest, key, vocabulary_size=ITEMS)
    planned = estimate_softmax_memory(config, manifest, ROWS)
    assert planned is not None
    model = build_model(config, manifest, 1)
    assert isinstance(model, RetrievalModel)
    memory = count_item_tower(planned, model, manifest)
    rest = 3 * 4 * ITEMS * 16  # The table and what the optimizer keeps.
    held = _measure_peak(_build_step(model, name == "mask")) + rest
    return {"held": held, "needed": memory.needed_bytes, "planned": planned.needed_bytes}


def _build_step(model: RetrievalModel, is_masked: bool) -> Callable[[], list[Any]]:
    rng = np.random.default_rng(1)
    known = None
    if is_masked:
        pairs = np.stack([rng.integers(2, 60, 600), rng.integers(2, ITEMS, 600)], axis=1)
        known = KnownItems("movie_id", ("user_id", group_pairs(pairs)), (), ITEMS)
    catalogue: Any = _Catalogue()
    items = ItemData("movie_id", catalogue, known)
    objective = CatalogSoftmax(items, np.arange(2, ITEMS), ITEMS)
    batch = {
        "user_id": tf.constant(rng.integers(2, 60, ROWS)),
        "movie_id": tf.constant(rng.integers(2, ITEMS, ROWS)),
        "history": tf.constant(rng.integers(2, ITEMS, [ROWS, 8])),
    }
    state = [variable for network in model.networks for variable in network.state_variables]

    @tf.function
    def differentiate() -> list[Any]:
        training = TrainingPass(tf.constant([1, 2]), state, [one.read_value() for one in state])
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(objective(model, batch, training))
        return [g for g in tape.gradient(loss, model.trainable_variables) if g is not None]

    return differentiate


def _measure_peak(work: Callable[[], Any]) -> int:
    work()  # Traced and compiled.
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    tf.config.experimental.reset_memory_stats("CPU:0")
    work()
    return int(tf.config.experimental.get_memory_info("CPU:0")["peak"] - before)


if __name__ == "__main__":
    # How many operations run beside each other says how many cores there are.
    tf.config.threading.set_inter_op_parallelism_threads(1)
    of_version = read_manifest(Path(sys.argv[1]))
    print(json.dumps({name: measure(name, of_version) for name in MEASURED}))

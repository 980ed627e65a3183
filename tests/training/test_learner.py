from __future__ import annotations

from pathlib import Path

import pytest
import tensorflow as tf

from conf.errors import ConfigError
from conf.manifest import Manifest
from conf.training import TrainConfig
from training.chunks import TrainingData
from training.learner import Learner, build_learner


def build(version: Path, manifest: Manifest, **changes: object) -> Learner:
    settings = {"dataset": "d", "name": "n", "input": {"batch_size": 64}, **changes}
    config = TrainConfig.model_validate(settings)
    return build_learner(config, TrainingData(version, manifest), tf.distribute.get_strategy(), 9)


def test_a_step_reads_what_model_and_objective_name(
    tiny_version: Path, tiny_manifest: Manifest
) -> None:
    learner = build(tiny_version, tiny_manifest, model={"name": "dssm", "embedding_dim": 4})
    features = learner.inputs.features
    assert len(features) == len(set(features))
    assert {*learner.model.user_inputs, *learner.model.item_inputs} <= set(features)
    looked_up = {name for lookup in learner.inputs.lookups or () for name in lookup.features}
    assert looked_up <= set(features)
    assert {"history", "movie_id"} <= looked_up


def test_scaled_gradients_are_not_checked(tiny_version: Path, tiny_manifest: Manifest) -> None:
    half = {"mixed_precision": True, "half_dtype": "float16"}
    with pytest.raises(ConfigError, match="check_gradients"):
        build(tiny_version, tiny_manifest, compute=half, fit={"check_gradients": True})

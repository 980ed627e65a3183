"""Trains given global batches on logical CPU devices."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf
from pydantic import TypeAdapter

from conf.artefacts.dataset import read_manifest
from conf.training.input import InputConfig
from conf.training.models import ModelConfig
from conf.training.optimizer import OptimizerConfig
from conf.training.train import DevicesConfig
from tests.training.toy_models import ToyModel, build_toy_batches, squared_error
from training.distribution.strategy import build_run_steps, build_strategy, distribute_batches
from training.input.batches import build_train_dataset
from training.loop.optimizers import Optimizers
from training.loop.step import StepOptions, TrainStep
from training.models.registry import build_model
from training.objectives.objective import build_objective, list_state

STEPS, BATCH = 5, 16


def train(optimizer: dict[str, Any], replicas: int) -> list[list[float]]:
    """Returns all weights after some steps, flat; copies of all replicas are checked equal.

    Args:
        optimizer: Its config; `dtype`, if there, is what products are computed in.
        replicas: Devices to train on.
    """
    dtype = tf.as_dtype(optimizer.pop("dtype", "float32"))
    strategy = build_strategy(DevicesConfig(cpu_replicas=replicas))
    with strategy.scope():
        model = ToyModel(l2=1e-3)
        optimizers = Optimizers(OptimizerConfig.model_validate(optimizer), model, STEPS)
    options = StepOptions(seed=1, dtype=dtype)
    step = TrainStep(model, squared_error, optimizers, options)
    batches = iter(distribute_batches(build_toy_batches(BATCH), strategy))
    build_run_steps(strategy, step)(batches, tf.constant(STEPS))
    weights = []
    for variable in optimizers.variables_in_step_order:
        copies = [c.numpy() for c in strategy.experimental_local_results(variable)]
        for copy in copies[1:]:
            np.testing.assert_array_equal(copy, copies[0])
        weights.append(copies[0].ravel().tolist())
    return weights


def train_objective(model_config: dict[str, Any], version: Path, replicas: int) -> list[Any]:
    """Returns all weights after some steps, and what the objective has counted, flat.

    Args:
        model_config: Of a retrieval model; `parts`, if there, is in how many a batch is computed.
        version: Dataset version.
        replicas: Devices to train on.
    """
    parts = model_config.pop("parts", None)
    models: TypeAdapter[Any] = TypeAdapter(ModelConfig)
    config, manifest = models.validate_python(model_config), read_manifest(version)
    strategy = build_strategy(DevicesConfig(cpu_replicas=replicas))
    # Normalization cancels the bias before it: Adam would blow up what is left of its gradient.
    dense = {"kind": "sgd"}
    optimizer = {"learning_rate": 0.02, "epsilon": 1e-4, "accumulate_steps": parts, "dense": dense}
    with strategy.scope():
        model = build_model(config, manifest, 1)
        optimizers = Optimizers(OptimizerConfig.model_validate(optimizer), model, STEPS)
        objective = build_objective(config, version, manifest, model, BATCH // (parts or 1))
    step = TrainStep(model, objective, optimizers, StepOptions(seed=1))
    names = tuple(dict.fromkeys((*model.inputs, *objective.inputs)))
    dataset = build_train_dataset(
        version, manifest, InputConfig(batch_size=BATCH), epoch=0, seed=1, features=names
    )
    batches = iter(distribute_batches(dataset, strategy))
    losses = build_run_steps(strategy, step)(batches, tf.constant(STEPS)).losses
    found = [losses.numpy().tolist()]
    state = [*model.state_variables, *list_state(objective)]
    for variable in [*optimizers.variables_in_step_order, *state]:
        copies = [c.numpy() for c in strategy.experimental_local_results(variable)]
        for copy in copies[1:]:
            np.testing.assert_array_equal(copy, copies[0])
        found.append(copies[0].ravel().tolist())
    return found


def train_objectives(
    replicas: int, configs: dict[str, dict[str, Any]], version: str, result: Path
) -> None:
    """Trains models by each of the objectives, and writes what comes out as JSON."""
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * replicas,
    )
    found = {name: train_objective(c, Path(version), replicas) for name, c in configs.items()}
    result.write_text(json.dumps(found))


def train_all(replicas: int, configs: dict[str, dict[str, Any]], result: Path) -> None:
    """Trains by each of the optimizers, and writes the weights as JSON.

    To be run in a process of its own, since the number of devices is fixed once TensorFlow has
    started, and since its collectives confuse groups of several sizes.
    """
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * replicas,
    )
    found = {name: train(config, replicas) for name, config in configs.items()}
    result.write_text(json.dumps(found))

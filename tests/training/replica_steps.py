"""Trains given global batches on logical CPU devices."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

from conf.training.optimizer import OptimizerConfig
from conf.training.train import DevicesConfig
from tests.training.toy_models import ToyModel, build_toy_batches, squared_error
from training.distribution.strategy import build_strategy, distribute_batches
from training.loop.gradients import LossScale
from training.loop.optimizers import Optimizers
from training.loop.step import StepOptions, TrainStep, build_run_steps

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
        scale = LossScale(1024.0, 2) if dtype == tf.float16 else None
        optimizers = Optimizers(OptimizerConfig.model_validate(optimizer), model, STEPS, scale)
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

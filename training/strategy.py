"""Which devices train: all GPUs, or one or several logical CPU devices."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import tensorflow as tf

from conf.errors import ConfigError, InputDataError
from conf.training import DevicesConfig


def build_strategy(config: DevicesConfig) -> tf.distribute.Strategy:
    """Returns the strategy for this machine.

    One device needs no strategy: TensorFlow's default one does the same steps without the cost
    of mirroring.

    Args:
        config: How many replicas to run where there is no GPU.

    Raises:
        ConfigError: TensorFlow has started with fewer logical devices than are asked for.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        for gpu in gpus:
            _allow_growth(gpu)
        names = [device.name for device in tf.config.list_logical_devices("GPU")]
    else:
        names = _cpu_devices(config.cpu_replicas)
    if len(names) == 1:
        return tf.distribute.get_strategy()
    return _mirror(tuple(names))


def describe_devices(strategy: tf.distribute.Strategy) -> list[str]:
    """Returns the names of the devices that a strategy computes on."""
    if strategy.num_replicas_in_sync > 1:
        return [str(device) for device in strategy.extended.worker_devices]
    kind = "GPU" if tf.config.list_physical_devices("GPU") else "CPU"
    return [f"/device:{kind}:0"]


def check_batch_size(batch_size: int, strategy: tf.distribute.Strategy) -> None:
    """Refuses a batch that replicas cannot share evenly.

    Raises:
        ConfigError: The batch size is not a multiple of the number of replicas.
    """
    replicas = strategy.num_replicas_in_sync
    below = batch_size - batch_size % replicas
    if batch_size != below:
        raise ConfigError(
            "input.batch_size must be a multiple of the number of replicas",
            received=f"{batch_size} rows on {replicas} replicas",
            allowed=" or ".join(str(size) for size in (below, below + replicas) if size),
        )


def distribute_batches(dataset: tf.data.Dataset, strategy: tf.distribute.Strategy) -> Any:
    """Splits each global batch over the replicas, in order.

    Raises:
        InputDataError: A list has no bounded length.
    """
    if strategy.num_replicas_in_sync == 1:
        return dataset
    unbounded = [
        name for name, spec in dataset.element_spec.items() if isinstance(spec, tf.RaggedTensorSpec)
    ]
    if unbounded:
        raise InputDataError(
            "several replicas need lists of a bounded length",
            received=f"{', '.join(unbounded)}: no max_len, and no statistics of its length",
            fix="set the feature's max_len and build the dataset again, or train on one device",
        )
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return strategy.experimental_distribute_dataset(dataset.with_options(options))


def seed_everything(seed: int) -> None:
    """Seeds Python, NumPy and TensorFlow."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    tf.random.set_seed(seed)


@functools.cache
def _mirror(names: tuple[str, ...]) -> tf.distribute.Strategy:
    """One strategy per process and set of devices.

    Each new MirroredStrategy numbers its collectives from the start again, and the runtime
    confuses them with those of the one before.
    """
    return tf.distribute.MirroredStrategy(names)


def _allow_growth(gpu: tf.config.PhysicalDevice) -> None:
    try:
        tf.config.experimental.set_memory_growth(gpu, True)
    except RuntimeError:
        return  # TensorFlow has started already: its memory setting stands.


def _cpu_devices(replicas: int) -> list[str]:
    cpu = tf.config.list_physical_devices("CPU")[0]
    configured = tf.config.get_logical_device_configuration(cpu) or []
    if len(configured) < replicas and replicas > 1:
        try:
            tf.config.set_logical_device_configuration(
                cpu, [tf.config.LogicalDeviceConfiguration()] * replicas
            )
        except RuntimeError as error:
            raise ConfigError(
                "TensorFlow has already started with fewer CPU devices in this process",
                received=f"devices.cpu_replicas = {replicas}",
                allowed=f"at most {max(1, len(configured))}",
                fix="train in a fresh process, or set devices.cpu_replicas accordingly",
            ) from error
    return [device.name for device in tf.config.list_logical_devices("CPU")[:replicas]]

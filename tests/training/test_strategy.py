from __future__ import annotations

import random

import numpy as np
import pytest
import tensorflow as tf

from conf.errors import ConfigError
from conf.training import DevicesConfig
from training.strategy import build_strategy, describe_devices, seed_everything

no_gpu = pytest.mark.skipif(
    bool(tf.config.list_physical_devices("GPU")), reason="this machine has a GPU"
)


@no_gpu
def test_one_and_two_cpu_replicas() -> None:
    one, two = (build_strategy(DevicesConfig(cpu_replicas=n)) for n in (1, 2))
    assert one.num_replicas_in_sync == 1
    assert two.num_replicas_in_sync == 2
    assert len(describe_devices(one)) == 1
    assert len(set(describe_devices(two))) == 2


@no_gpu
def test_more_replicas_than_tensorflow_started_with_are_refused() -> None:
    tf.config.list_logical_devices("CPU")  # starts the runtime
    with pytest.raises(ConfigError, match="at most 2"):
        build_strategy(DevicesConfig(cpu_replicas=3))


def test_seeding_repeats_every_generator() -> None:
    def draw() -> list[float]:
        seed_everything(-7)
        return [random.random(), np.random.rand(), float(tf.random.uniform([]))]

    assert draw() == draw()

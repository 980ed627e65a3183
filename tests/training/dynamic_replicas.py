"""Trains on keys on some logical CPU devices, in a process of its own."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

from tests.training.dynamic_runs import (
    DSSM,
    build_config,
    build_ruled_config,
    build_trainer,
    read_state,
)


def train(version: str, replicas: int, result: str, ruled: bool, tiered: bool = False) -> None:
    """Writes the state at the end of a run; copies of all replicas are checked equal."""
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * replicas,
    )
    # What drops out differs from replica to replica.
    optimizer = {"learning_rate": 0.02, "epsilon": 1e-4}
    config = build_config({**DSSM, "dropout": None}, optimizer=optimizer)
    if ruled:
        config = build_ruled_config(tiered=tiered, dropout=None)
    trainer = build_trainer(config, Path(version), replicas=replicas)
    run = Path(result).with_suffix("")
    run.mkdir()
    trainer.fit(run, None)
    for table in trainer.parts.model.tables.values():
        copies = [copy.numpy() for copy in
                  trainer.parts.strategy.experimental_local_results(table.variable)]  # fmt: skip
        assert len(copies) == replicas
        for copy in copies[1:]:
            np.testing.assert_array_equal(copy, copies[0])
    np.savez(result, **read_state(trainer))

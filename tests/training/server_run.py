"""The processes of a run with parameter servers; the chief records what workers train on."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

import training.evaluation.evaluate  # noqa: F401  # Imported once, before processes are forked.
from conf.training.train import StepRange, TrainConfig
from tests.training.killed_run import KEYS, row_keys
from tests.training.processes import ClusterTask
from training.distribution.cluster import read_server_cluster
from training.distribution.parameter_server import serve_chief
from training.distribution.scheduled_steps import ScheduledSteps
from training.embedding import static_table
from training.fit import fit_run
from training.loop import assembly
from training.monitoring.progress import NoProgress


@dataclass(frozen=True)
class Task(ClusterTask):
    """What a process does.

    Attributes:
        kills: Processes to kill once so many batches of the run are given out; 0 is the chief.
        profile: Steps that the chief profiles, or None.
    """

    kills: Mapping[int, int]
    profile: StepRange | None = None


def run_task(task: Task) -> None:
    """Serves or trains, and ends the process."""
    with task.in_cluster():
        config = TrainConfig.model_validate_json(task.config.read_text())
        cluster = read_server_cluster()
        if not cluster.is_chief:
            sys.exit(serve_chief(cluster, config.devices.worker_timeout_s, lambda _: None))
        RecordedSteps.log = task.config.with_name("rows.jsonl")
        RecordedSteps.kills = dict(task.kills)
        assembly.ScheduledSteps = RecordedSteps  # type: ignore[misc]
        static_table.MIN_SHARD_BYTES = 1  # Splits the small tables of the test, too.
        fit_run(config, NoProgress(), resume=task.resume, profile=task.profile)


class RecordedSteps(ScheduledSteps):
    """Steps that note their rows in a queue of the first parameter server, and may kill."""

    log: Path
    kills: dict[int, int]

    def __init__(self, strategy: Any, train_step: Any, optimizers: Any) -> None:
        with tf.device("/job:ps/task:0/device:CPU:0"):
            self._rows = tf.queue.FIFOQueue(1000, [tf.int64] * len(KEYS))

        def recorded(batch: dict[str, tf.Tensor]) -> tf.Tensor:
            loss = train_step(batch)
            with tf.control_dependencies([loss]):
                noted = self._rows.enqueue([batch[name] for name in KEYS])
            with tf.control_dependencies([noted]):
                return tf.identity(loss)

        super().__init__(strategy, recorded, optimizers)

    def __call__(self, iterator: Any, steps: tf.Tensor) -> Any:
        first = int(self._optimizers.step.read_value())
        result = super().__call__(KillingIterator(iterator, first, self.kills), steps)
        with self.log.open("a") as file:
            for _ in range(int(self._rows.size())):
                rows = row_keys(dict(zip(KEYS, self._rows.dequeue(), strict=True)))
                file.write(json.dumps([os.getpid(), first, rows]) + "\n")
        return result


class KillingIterator:
    """Gives batches, and kills a process before some of them, while others are under way."""

    def __init__(self, iterator: Any, first: int, kills: dict[int, int]) -> None:
        self._iterator, self._next, self._kills = iterator, first, kills
        self.element_spec = iterator.element_spec

    def get_next(self) -> Any:
        pid = self._kills.pop(self._next, None)
        if pid is not None:
            os.kill(pid or os.getpid(), signal.SIGKILL)
        self._next += 1
        return self._iterator.get_next()
